import re
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.report.figures import FIGURES, FigureOptions, draw_figure
from lowrank_cnn.report.records import Records

pytest.importorskip("vl_convert", reason="figures are drawn by vl-convert")

ROOT = Path(__file__).parents[3]
EXPECTED = {
    "vgg": ["VGG-11 on ILSVRC", "Top-5 error", "vgg11-gmp-lr-join-wfull", "4G", "12%"],
    "places": ["VGG-11 on Places", "vgg11-gmp-sf", "17.5%"],
    "googlenet": ["googlenet-lr-conv1", "published, low-rank"],
    "nin": ["Network-in-Network on CIFAR-10", "Top-1 error", "nin-c3-lr"],
    "big-picture-macs": ["Multiply-accumulates per image", "published, more augmentation", "10G", "200G"],
    "big-picture-params": ["Parameters", "100M"],
    "timings": ["vgg11-gmp-lr, published", "conv5y-2", "CPU r = 0.94, GPU r = 0.82"],
    "curves": ["nin-paper on CIFAR-10", "Epoch", "bands: lowest to highest run"],
    "classes": ["Accuracy by class", "Share of the class that is recognised", "class 3"],
    "confusion": ["Confusion matrix", "Predicted class", "nin-c3-lr on CIFAR-10, nin-paper: "],
    "pairs": ["Classes confused most", "class 0 taken for class 1"],
    "calibration": ["Calibration: off by 9.99% on average", "Share of right answers"],
    "filters": ["(a) vertical 3\N{MULTIPLICATION SIGN}1", "(c) combined by the join", "64 filters"],
    "connections": ["(a) fully connected", "1,296 connections", "9 weights", "96 connections"],
    "receptive-field": ["nin, as initialised", "nin-c3-lr, as initialised"],
    "shapes": ["vgg11-gmp-lr", "1x3", "3x1"],
    "spectra": ["Singular values of the dense filters of nin", "conv3_1", "1st of random filters"],
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_shows(name: str, records: Records, tmp_path: Path, text_of):
    small = Records([run for run in records.runs if run.network.name.startswith("nin")])
    of_runs = dict.fromkeys(
        ("curves", "classes", "confusion", "pairs", "calibration"), FigureOptions(records=small)
    )
    options = {"receptive-field": FigureOptions(model="nin-c3-lr"), **of_runs}.get(name, FigureOptions())
    text = text_of(draw_figure(name, tmp_path / "out.svg", options))
    for words in EXPECTED[name]:
        assert any(words in found for found in text), (words, sorted(text))


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_formats_by_the_name_of_the_file(kind: str, tmp_path: Path):
    one, two = (draw_figure("nin", tmp_path / f"{n}.{kind}").read_bytes() for n in "ab")
    assert one.startswith({"svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG"}[kind])
    assert kind == "pdf" or one == two  # a PDF lists its objects in any order


def test_every_picture_of_the_docs_can_be_made_again():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    pictures = {path.stem for path in (ROOT / "docs" / "images").iterdir()}
    named = re.search("^FIGURES := (.*)$", recipe, re.MULTILINE)
    assert named is not None
    assert {*named[1].split(), *re.findall(r"docs/images/([\w-]+)\.svg", recipe)} == pictures


@pytest.mark.parametrize(
    ("name", "out", "options", "says"),
    [
        ("vggg", "a.svg", FigureOptions(), "did you mean vgg"),
        ("vgg", "a.bmp", FigureOptions(), "svg, pdf, png"),
        ("vgg", "a.svg", FigureOptions(model="nin"), "takes no model"),
        ("filters", "a.svg", FigureOptions(records=Records()), "takes no runs"),
        ("filters", "a.svg", FigureOptions(model="nin", checkpoint="x"), "not both"),
        ("spectra", "a.svg", FigureOptions(model="nin-c3-lr"), "no dense filters"),
        ("vgg", "a.svg", FigureOptions(pretrained="cifar10"), "takes no model, checkpoint or weights"),
        ("filters", "a.svg", FigureOptions(checkpoint="x", pretrained="cifar10"), "its own weights"),
        ("filters", "a.svg", FigureOptions(model="nin", pretrained="places"), "places"),
    ],
)
def test_what_cannot_be_drawn_is_refused(name: str, out: str, options: FigureOptions, says: str, tmp_path: Path):
    with pytest.raises(LowRankError, match=says):
        draw_figure(name, tmp_path / out, options)
