"""Figures as the command `lowrank figure` draws them, and what they show of a network."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from record_examples import RESULTS, records_of
from torch import nn
from typer.testing import CliRunner

import lowrank_cnn as lr
from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.graph.finalize_shapes import LearnedShapes
from lowrank_cnn.method.schemes import build_conv, parse_scheme
from lowrank_cnn.models.filters import dense_filters, first_filters, singular_energy, spatial_energy
from lowrank_cnn.paper.published import rows
from lowrank_cnn.report import Records
from lowrank_cnn.report.figures import FIGURES, draw_figure, shapes_spec
from lowrank_cnn.report.trade import draw_frontier
from tests.choose.conftest import made_frontier

pytest.importorskip("vl_convert", reason="figures are drawn by vl-convert")

ROOT = Path(__file__).parents[2]
TIMES = "\N{MULTIPLICATION SIGN}"
EXPECTED = {
    "vgg": ["VGG-11 on ILSVRC", "Top-5 error", "vgg11-gmp-lr-join-wfull", "4G", "12%"],
    "places": ["VGG-11 on Places", "vgg11-gmp-sf", "17.5%"],
    "googlenet": ["googlenet-lr-conv1", "published, low-rank"],
    "nin": ["Network-in-Network on CIFAR-10", "Top-1 error", "nin-c3-lr"],
    "big-picture-macs": ["Multiply-accumulates per image", "published, more augmentation", "10G", "200G"],
    "big-picture-params": ["Parameters", "100M"],
    "timings": ["vgg11-gmp-lr, published", "conv5y-2", "CPU r = 0.94, GPU r = 0.82"],
    "curves": ["nin-paper on CIFAR-10", "Epoch", "bands: lowest to highest run"],
    "filters": [f"(a) vertical 3{TIMES}1", "(c) combined by the join", "64 filters"],
    "connections": ["(a) fully connected", "1,296 connections", "9 weights", "96 connections"],
    "receptive-field": ["nin, as initialised", "nin-c3-lr, as initialised"],
    "shapes": ["vgg11-gmp-lr", "1x3", "3x1"],
    "spectra": ["Singular values of the dense filters of nin", "conv3_1", "1st of random filters"],
}


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of the random images that a receptive field is averaged over."""
    monkeypatch.setattr("lowrank_cnn.models.filters.PIXELS", 64**2)


def figure(out: Path, *arguments: object) -> Path:
    done = CliRunner().invoke(build(), ["figure", *map(str, arguments), "-o", str(out)])
    if done.exception is not None:
        raise done.exception
    return out


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_shows(name: str, runs: Path, tmp_path: Path, text_of):
    given = [option for i in range(3) for option in ("--runs", runs / f"nin-c3-lr-{i}")]
    options = given if name == "curves" else []
    options += ["--model", "nin-c3-lr"] if name == "receptive-field" else []
    text = text_of(figure(tmp_path / "out.svg", name, *options))
    for words in EXPECTED[name]:
        assert any(words in found for found in text), (words, sorted(text))
    if name.startswith("big-picture"):
        assert {row.network for row in rows() if row.dataset == "ilsvrc12" and row.top5 is not None} <= text


@pytest.mark.parametrize("kind", ["svg", "pdf", "PNG"])
def test_formats_by_the_name_of_the_file(kind: str, tmp_path: Path):
    one, two = (draw_figure("nin", tmp_path / f"{n}.{kind}").read_bytes() for n in "ab")
    assert one.startswith({"svg": b"<svg", "pdf": b"%PDF", "PNG": b"\x89PNG"}[kind])
    assert kind == "pdf" or one == two  # a PDF lists its objects in any order


def test_every_picture_of_the_docs_can_be_made_again(tmp_path: Path, text_of):
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    pictures = {path.stem for path in (ROOT / "docs" / "images").iterdir()}
    named = re.search("^FIGURES := (.*)$", recipe, re.MULTILINE)
    assert named is not None
    drawn = {*named[1].split(), *re.findall(r"docs/images/([\w-]+)\.svg", recipe)}
    assert pictures - {"strips", "demo"} == drawn  # by hand, a recording
    text = text_of(figure(tmp_path / "nin.svg", "nin", "--runs", RESULTS / "cifar10"))
    assert {"dense", "low-rank", "published, baseline"} <= text
    assert [words for words in text if words.startswith("nin-c3-lr, 150 epochs")]
    assert not [words for words in text if "init" in words]  # the ablation is another question
    assert text_of(ROOT / "docs" / "images" / "nin.svg") == text, "make figures draws it anew"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vggg"], "did you mean vgg"),
        (["vgg", "--model", "nin"], "takes no model"),
        (["vgg", "--model", "nin", "--pretrained", "cifar10"], "takes no model and no weights"),
        (["filters", "--runs", RESULTS / "cifar10"], "takes no runs"),
        (["filters", "--model", "x.safetensors", "--pretrained", "cifar10"], "taken with the weights it has"),
        (["filters", "--model", "nin", "--pretrained", "places"], "places"),
        (["spectra", "--model", "nin-c3-lr"], "no dense filters"),
        (["shapes", "--into", "model.py:make"], "give --model as well"),
        (["curves"], "--runs"),
        (["timings", "--runs", RESULTS / "cifar10" / "paper"], "no record among these has times of layers"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: list, says: str, tmp_path: Path):
    with pytest.raises(LowRankError, match=says):
        figure(tmp_path / "a.svg", *arguments)
    assert not (tmp_path / "a.svg").exists()


def test_what_python_cannot_draw_is_refused(tmp_path: Path):
    bare = {"kind": "training", "model": {"name": "nin"}}
    for name, out, options, says in (
        ("vgg", "a.bmp", {}, "svg, pdf, png"),
        ("filters", "a.svg", {}, "is of a network"),
        ("filters", "a.svg", {"networks": [("mine", nn.ReLU())]}, "ReLU has no convolution"),
        ("receptive-field", "a.svg", {"networks": [("mine", nn.ReLU())]}, "ReLU has no convolution"),
        ("shapes", "a.svg", {"networks": [("mine", nn.Conv2d(3, 4, 1))]}, "no spatial"),
        ("curves", "a.svg", {"records": records_of(bare)}, "no run"),
    ):
        with pytest.raises(LowRankError, match=says):
            draw_figure(name, tmp_path / out, **options)


def test_records_join_the_published_points(records: Records, runs: Path, tmp_path: Path, text_of):
    for name, words in (
        ("nin", {"dense", "low-rank"}),
        ("vgg", {"The same networks trained here on tiny-imagenet-100"}),
        ("timings", {"nin-c3-lr, measured here"}),
    ):
        assert words <= text_of(figure(tmp_path / f"{name}.svg", name, "--runs", runs))
    others = [replace(run, recipe="another") for run in records.runs]
    both = Records([*records.runs, *others])
    text = text_of(draw_figure("nin", tmp_path / "both.svg", records=both))
    assert {"nin-c3-lr (nin-paper)", "nin-c3-lr (another)", "nin-c3-lr"} <= text


def test_a_checkpoint_shows_what_was_learned(tmp_path: Path, text_of):
    pytest.importorskip("lightning_fabric", reason="training needs lightning-fabric")
    from lowrank_cnn.data import Data, ResidentSplit

    labels = torch.arange(16) % 2
    images = (90 + 80 * labels)[:, None, None, None].expand(-1, 3, 16, 16).to(torch.uint8).contiguous()
    split = ResidentSplit.of(images, labels)
    network = lr.create_model("nin-c3-lr", num_classes=2, width=0.05)
    recipe = lr.get_recipe("modern", epochs=1, batch_size=8, crop=14)
    lr.fit(network, Data("grey", ("dark", "bright"), split, split), recipe, out=tmp_path / "run", device="cpu")
    drawn = figure(tmp_path / "out.svg", "filters", "--model", tmp_path / "run")
    assert "First layer of nin-c3-lr, trained" in text_of(drawn)
    text = text_of(figure(tmp_path / "out.svg", "receptive-field", "--model", tmp_path / "run"))
    assert {"nin, as initialised", "nin-c3-lr, trained"} <= text
    assert len([words for words in text if "of 196 pixels hold" in words]) == 2  # the twin sees images as large


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("filters", "nin-c3-lr", {"First layer of nin-c3-lr, trained on CIFAR-10", "96 filters"}),
        ("spectra", "nin", {"Singular values of the dense filters of nin, trained on CIFAR-10", "random filters"}),
    ],
)
def test_the_weights_of_the_package_can_be_shown(name: str, model: str, words: set[str], tmp_path: Path, text_of):
    drawn = figure(tmp_path / "out.svg", name, "--model", model, "--pretrained", "cifar10")
    assert words <= text_of(drawn)


def test_a_frontier_names_every_design_and_its_kinds(tmp_path: Path, text_of):
    designs = {"dense": (0.93, 1.0, 3), "dense@0.5": (0.9, 0.5, 3), "lr": (0.91, 0.4, 2)}
    found = made_frontier(tmp_path, designs)
    drawn = draw_frontier(found, tmp_path / "f.svg")
    words = {"thin at 0.5", "dense", "thin", "low-rank", "Milliseconds for a batch"}
    assert words <= text_of(drawn)
    assert "Mean of 2 to 3 runs" in drawn.read_text()
    found.rows[0].timing = None
    text = text_of(draw_frontier(found, tmp_path / "f.svg"))
    assert "Milliseconds for a batch" not in text
    assert "Parameters" in text
    with pytest.raises(LowRankError, match="nothing to draw"):
        draw_frontier(replace(found, rows=[]), tmp_path / "f.svg")


@pytest.mark.parametrize(
    ("scheme", "titles"),
    [
        ("dense", [f"3{TIMES}3"]),
        ("lr", [f"vertical 3{TIMES}1", f"horizontal 1{TIMES}3"]),
        ("lr-join", [f"vertical 3{TIMES}1", f"horizontal 1{TIMES}3", "combined by the join"]),
        ("separable", [f"horizontal 1{TIMES}3", "the two halves combined"]),
    ],
)
def test_the_filters_of_a_first_layer(scheme: str, titles: list[str]):
    conv = build_conv(3, 8, 3, scheme, bias=False).double()
    found = first_filters(nn.Sequential(conv))
    assert [title for title, _ in found] == titles
    if "combined" in titles[-1]:
        image = torch.randn(1, 3, 9, 9, dtype=torch.float64)
        torch.testing.assert_close(conv(image), nn.functional.conv2d(image, found[-1][1], padding=1))


def test_trained_filters_are_of_lower_rank_than_random_ones():
    for weight in dense_filters(lr.create_model("nin", pretrained="cifar10")).values():
        chance = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        assert spatial_energy(weight)[0] > spatial_energy(chance)[0] + 0.05
    rank_one = torch.einsum("dch,dcw->dchw", torch.randn(4, 3, 3), torch.randn(4, 3, 3))
    assert spatial_energy(rank_one)[0] == pytest.approx(1.0)
    assert singular_energy(rank_one[:1].expand(5, -1, -1, -1))[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("layers", "shapes", "expected"),
    [
        (
            [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)],
            {"0": "exact(3x1=4, 1x3=12)"},
            [("0", "3x1", 0.25), ("0", "1x3", 0.75), ("2", "3x3", 1.0)],
        ),
        (
            [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)],
            {"1": "exact(1x1=8)"},
            [("0", "3x3", 1.0), ("1", "1x1", 1.0), ("3", "3x3", 1.0)],
        ),
    ],
)
def test_bars_of_shapes_are_shares_of_the_dense_filters(layers: list, shapes: dict, expected: list):
    net = LearnedShapes({name: parse_scheme(text) for name, text in shapes.items()}).apply(nn.Sequential(*layers))
    bars = shapes_spec("learned", net)["datasets"]["shapes"]
    assert [(bar["layer"], bar["shape"], bar["share"]) for bar in bars] == expected
    assert bars[0]["spoken"].endswith(f"filters are {expected[0][1]}")
