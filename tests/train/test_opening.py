"""Data straight from a path: in the channels and the size that the network is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.data import open_data
from lowrank_cnn.method.convert import convert
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.evaluate import evaluate
from lowrank_cnn.train.inputs import as_network_wants, channels_of, open_for


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Grey photographs of many sizes, dark and bright, in a flat folder."""
    image = pytest.importorskip("PIL.Image")
    for number in range(20):
        folder = tmp_path / ("dark", "bright")[number % 2]
        folder.mkdir(exist_ok=True)
        image.new("L", (14 + number % 3, 14), 20 + 180 * (number % 2) + number).save(folder / f"{number}.png")
    return tmp_path


def colour_net() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    note(network, input_size=(3, 10, 12))
    return network


def test_a_path_is_trained_on_as_the_network_wants_it(photos: Path) -> None:
    recipe = Recipe(name="small", batch_size=8, epochs=2, lr=0.05)
    record = fit(colour_net(), str(photos), recipe, progress=False, device="cpu")
    assert record.data["image"] == [3, 10, 12]
    assert (record.data["train"], record.data["test"]) == (16, 4)
    assert record.data["sized_by"] == "network"


def test_a_network_that_is_tuned_gets_the_size_that_it_was_trained_on(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(10):
        (folder := tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        image.new("RGB", (20, 20), (number, 0, 0)).save(folder / f"{number}.png")
    reading = partial(open_data, tmp_path)
    for tuned, sized, side in ((False, False, 20), (True, True, 20), (True, False, 12)):
        options = {"input_size": (3, 12, 12), "sized": sized, "tuned": tuned}
        data = as_network_wants(reading(), colour_net(), Recipe(), reading, **options)
        assert data.train.size == (3, side, side)


def test_a_crop_of_the_recipe_decides_the_size(photos: Path) -> None:
    data = open_for(colour_net(), photos, Recipe(crop=8))
    assert data.train.size is None
    assert data.train.channels == 3


def test_channels_are_those_of_the_first_conv() -> None:
    assert channels_of(create_model("nin", in_channels=1, width=0.05)) == 1
    assert channels_of(nn.Linear(2, 2)) is None
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1))
    assert [channels_of(convert(net, scheme)) for scheme in ("lr", "lr-join")] == [3, 3]


def test_a_network_for_colour_that_is_low_rank_reads_grey_images_in_colour(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for place in range(12):
        folder = tmp_path / "photos" / f"class{place % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        image.new("L", (12, 12), 20 * place).save(folder / f"{place}.png")
    for source in (tmp_path / "photos", "digits"):
        data = open_for(convert(colour_net(), "lr"), source, Recipe())
        assert (data.train.channels, data.test.channels) == (3, 3)


@pytest.mark.parametrize("use", [fit, evaluate])
def test_other_classes_are_refused_before_an_image_is_decoded(photos: Path, monkeypatch, use: Callable) -> None:
    def decode(*_, **__):
        raise AssertionError("images were decoded")

    monkeypatch.setattr("lowrank_cnn.data.sources.decode_rows", decode)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = open_data(photos, image_size=12)
    with pytest.raises(LowRankError, match="4 outputs for an image, and the data 2 classes"):
        use(network, data, device="cpu")
