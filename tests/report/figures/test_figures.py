import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from lowrank_cnn.method.layers import build_conv
from lowrank_cnn.models import create_model
from lowrank_cnn.paper.published import rows
from lowrank_cnn.report import read_records
from lowrank_cnn.report.figures import FIGURES, FigureOptions, draw_figure
from lowrank_cnn.report.figures.connections import connection_matrix
from lowrank_cnn.report.figures.filters import combined, filter_banks, mosaic
from lowrank_cnn.report.figures.receptive import area, effective_field
from lowrank_cnn.report.figures.spectra import channel_energy, dense_layers, spatial_energy
from lowrank_cnn.report.records import Records
from lowrank_cnn.system.errors import LowRankError

pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")

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
    "filters": ["(a) vertical 3\N{MULTIPLICATION SIGN}1", "(c) combined by the join", "64 filters"],
    "connections": ["(a) fully connected", "1,296 connections", "9 weights", "96 connections"],
    "receptive-field": ["nin, as initialised", "nin-c3-lr, as initialised"],
    "spectra": ["Singular values of the dense filters of nin", "conv3_1", "1st of random filters"],
}


def text_of(svg: Path) -> set[str]:
    content = svg.read_text(encoding="utf-8")
    return {re.sub(r"<[^>]*>", "", found).strip() for found in re.findall(r"<text.*?</text>", content, re.DOTALL)}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_shows(name: str, records: Records, tmp_path: Path):
    given = {"receptive-field": FigureOptions(model="nin-c3-lr"), "curves": FigureOptions(records=records)}
    options = given.get(name, FigureOptions())
    text = text_of(draw_figure(name, tmp_path / "out.svg", options))
    for words in EXPECTED[name]:
        assert any(words in found for found in text), (words, sorted(text))


@pytest.mark.parametrize("name", ["big-picture-macs", "big-picture-params"])
def test_no_network_of_the_big_picture_goes_unnamed(name: str, tmp_path: Path):
    named = text_of(draw_figure(name, tmp_path / "out.svg"))
    ilsvrc = {row.network for row in rows() if row.dataset == "ilsvrc12" and row.top5 is not None}
    assert ilsvrc <= named


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_formats_by_the_name_of_the_file(kind: str, tmp_path: Path):
    one, two = (draw_figure("nin", tmp_path / f"{n}.{kind}").read_bytes() for n in "ab")
    assert one.startswith({"svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG"}[kind])
    assert kind == "pdf" or one == two  # a PDF lists its objects in any order


def test_records_join_the_published_points(records: Records, tmp_path: Path):
    text = text_of(draw_figure("nin", tmp_path / "a.svg", FigureOptions(records=records)))
    assert {"dense, trained here", "low-rank, trained here"} <= text
    text = text_of(draw_figure("vgg", tmp_path / "b.svg", FigureOptions(records=records)))
    assert "The same networks trained here on tiny-imagenet-100" in text
    text = text_of(draw_figure("timings", tmp_path / "c.svg", FigureOptions(records=records)))
    assert "nin-c3-lr, measured here" in text


def test_the_committed_runs_stand_beside_the_published(tmp_path: Path):
    committed = read_records([ROOT / "benchmarks" / "results" / "cifar10"])
    text = text_of(draw_figure("nin", tmp_path / "nin.svg", FigureOptions(records=committed)))
    assert {"dense, trained here", "low-rank, trained here", "published, baseline"} <= text
    assert [words for words in text if words.startswith("nin-c3-lr, 150 epochs")]
    assert not [words for words in text if "init" in words]  # the ablation is another question
    assert text_of(ROOT / "docs" / "images" / "nin.svg") == text, "make figures draws it anew"


def test_curves_need_runs(tmp_path: Path):
    for found, says in ((None, "--runs"), (Records(), "no run")):
        with pytest.raises(LowRankError, match=says):
            draw_figure("curves", tmp_path / "b.svg", FigureOptions(records=found))


def test_networks_of_several_recipes_say_by_which_they_were_trained(records: Records, tmp_path: Path):
    others = [replace(run, recipe="another") for run in records.runs]
    text = text_of(
        draw_figure("nin", tmp_path / "a.svg", FigureOptions(records=Records([*records.runs, *others])))
    )
    assert {"nin-c3-lr (nin-paper)", "nin-c3-lr (another)", "nin-c3-lr"} <= text


def test_every_picture_of_the_docs_can_be_made_again():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    pictures = {path.stem for path in (ROOT / "docs" / "images").iterdir()}
    named = re.search("^FIGURES := (.*)$", recipe, re.MULTILINE)
    assert named is not None
    assert {*named[1].split(), *re.findall(r"docs/images/([\w-]+)\.svg", recipe)} == pictures


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("filters", "nin-c3-lr", {"First layer of nin-c3-lr, trained on CIFAR-10", "96 filters"}),
        ("spectra", "nin", {"Singular values of the dense filters of nin, trained on CIFAR-10", "random filters"}),
        ("receptive-field", "nin-c3-lr", {"nin, trained on CIFAR-10", "nin-c3-lr, trained on CIFAR-10"}),
    ],
)
def test_the_weights_of_the_package_can_be_shown(name: str, model: str, words: set[str], tmp_path: Path):
    options = FigureOptions(model=model, pretrained="cifar10")
    assert words <= text_of(draw_figure(name, tmp_path / "out.svg", options))


def test_trained_filters_are_of_lower_rank_than_random_ones():
    for weight in dense_layers(create_model("nin", pretrained="cifar10")).values():
        chance = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        assert spatial_energy(weight)[0] > spatial_energy(chance)[0] + 0.05


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


def test_a_checkpoint_shows_what_was_learned(tmp_path: Path):
    pytest.importorskip("lightning_fabric", reason="training needs lightning-fabric")
    from lowrank_cnn.data import Data, ResidentSplit
    from lowrank_cnn.train import fit, get_recipe

    labels = torch.arange(16) % 2
    images = (90 + 80 * labels)[:, None, None, None].expand(-1, 3, 16, 16).to(torch.uint8).contiguous()
    split = ResidentSplit.of(images, labels)
    network = create_model("nin-c3-lr", num_classes=2, width=0.05)
    recipe = get_recipe("modern", epochs=1, batch_size=8, crop=14)
    fit(network, Data("grey", ("dark", "bright"), split, split), recipe, out=tmp_path / "run", device="cpu")
    figure = draw_figure("filters", tmp_path / "out.svg", FigureOptions(checkpoint=tmp_path / "run"))
    assert "First layer of nin-c3-lr, trained" in text_of(figure)
    with mock.patch("lowrank_cnn.report.figures.options.create_model", wraps=create_model) as built:
        text = text_of(
            draw_figure("receptive-field", tmp_path / "out.svg", FigureOptions(checkpoint=tmp_path / "run"))
        )
    assert {"nin, as initialised", "nin-c3-lr, trained"} <= text
    assert len([words for words in text if "of 196 pixels hold" in words]) == 2
    built.assert_called_once_with("nin", width=0.05, num_classes=2, in_channels=3, image_size=14)


@pytest.mark.parametrize("scheme", ["lr-join", "mixture(kx1, 1xk, kxk, join)", "separable"])
def test_the_combined_filters_are_what_the_chain_computes(scheme: str):
    conv = build_conv(3, 6, (3, 5), scheme, bias=False).double()
    image = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    dense = nn.functional.conv2d(image, combined(conv), padding=(1, 2))  # type: ignore[arg-type]
    torch.testing.assert_close(conv(image), dense)


def test_the_banks_of_a_first_layer():
    def banks(scheme: str) -> list[str]:
        return [bank.title for bank in filter_banks(build_conv(3, 8, 3, scheme))]

    times = "\N{MULTIPLICATION SIGN}"
    assert banks("dense") == [f"3{times}3"]
    assert banks("lr") == [f"vertical 3{times}1", f"horizontal 1{times}3"]
    assert banks("lr-join") == [f"vertical 3{times}1", f"horizontal 1{times}3", "combined by the join"]
    assert banks("separable") == [f"horizontal 1{times}3", "the two halves combined"]


def test_a_mosaic_is_white_where_a_cross_has_nothing():
    cross = torch.zeros(1, 3, 3, 3)
    cross[:, :, 1, :] = 1.0
    cross[:, :, :, 1] = -1.0
    image = mosaic(cross)
    assert image.shape == (3, 3, 3)
    assert image[0, 0].tolist() == [1.0, 1.0, 1.0]
    assert image[0, 1].tolist() == [0.0, 0.0, 0.0]
    cross[:, :, 1, 0] = 2.0
    assert mosaic(cross)[1, 0].max() < 0.95  # and not where it has most


def test_connections_are_those_of_a_convolution():
    matrix = connection_matrix(1, 3)
    assert matrix.shape == (36, 36)
    assert matrix[7].nonzero().flatten().tolist() == [6, 7, 8]
    assert matrix[7][[6, 7, 8]].tolist() == [1, 2, 3]
    assert int(connection_matrix(3, 3).count_nonzero()) == 256


def test_the_field_of_a_single_filter_is_its_shape():
    conv = nn.Conv2d(3, 64, (3, 1), padding=(1, 0))
    field = effective_field(conv)
    rows, columns = field.nonzero(as_tuple=True)
    assert set(columns.tolist()) == {80}
    assert rows.tolist() == [79, 80, 81]
    assert area(field) == 3


def test_low_rank_networks_see_less():
    dense, low = (effective_field(create_model(name)) for name in ("nin", "nin-c3-lr"))
    assert area(low) < area(dense)


def test_spectra_know_a_rank_one_filter():
    rank_one = torch.einsum("dch,dcw->dchw", torch.randn(4, 3, 3), torch.randn(4, 3, 3))
    assert spatial_energy(rank_one)[0] == pytest.approx(1.0)
    assert channel_energy(rank_one[:1].expand(5, -1, -1, -1))[0] == pytest.approx(1.0)
