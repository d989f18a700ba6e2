"""Images as a run gets them: sizes, channels, held-out parts, blends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.data import open_data
from lowrank_cnn.data.augment import Mixer
from lowrank_cnn.method.convert import convert
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.evaluate import evaluate
from lowrank_cnn.train.inputs import as_network_wants, channels_of, open_for


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"batch_size": 128},
            "80 images to train on, fewer than one batch of 128: set a batch size of 80 or less",
        ),
        (
            {"batch_size": 80, "holdout": 0.1},
            r"72 images to train on, after 8 are held out, fewer than .* 72 or less \(batch_size=72\), hold out",
        ),
        ({"holdout": 80}, r"holdout=80 leaves none of the 80 training images to train on: hold out fewer"),
        ({"holdout": 0.001}, r"holdout=0.001 of 80 training images is not one: set a larger share"),
    ],
)
def test_too_few_images_are_answered_with_what_to_change(driver, change: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        fit(driver.tiny_net(), driver.tiny_data(), dataclasses.replace(driver.PLAIN, **change), progress=False)


@pytest.mark.parametrize("field", ["cutout", "pad", "test_shift"])
def test_settings_that_hide_every_image_are_refused(driver, field: str):
    recipe = dataclasses.replace(driver.PLAIN, **{field: 100})
    with pytest.raises(LowRankError, match=f"{field}=100 leaves nothing to see of images of .*{field}=0 turns"):
        fit(driver.tiny_net(), driver.tiny_data(), recipe, progress=False)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Grey photographs of many sizes, dark and bright, in a flat folder."""
    image = pytest.importorskip("PIL.Image")
    for number in range(20):
        folder = tmp_path / ("dark", "bright")[number % 2]
        folder.mkdir(exist_ok=True)
        image.new("L", (14 + number % 3, 14), 20 + 180 * (number % 2) + number).save(folder / f"{number}.png")
    return tmp_path


def sized_net() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    note(network, input_size=(3, 10, 12))
    return network


def test_a_path_is_trained_on_as_the_network_wants_it(photos: Path) -> None:
    recipe = Recipe(name="small", batch_size=8, epochs=2, lr=0.05)
    record = fit(sized_net(), str(photos), recipe, progress=False, device="cpu")
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
        data = as_network_wants(reading(), sized_net(), Recipe(), reading, **options)
        assert data.train.size == (3, side, side)


def test_a_crop_of_the_recipe_decides_the_size(photos: Path) -> None:
    data = open_for(sized_net(), photos, Recipe(crop=8))
    assert data.train.size is None
    assert data.train.channels == 3


def test_channels_are_those_of_the_first_conv() -> None:
    assert channels_of(create_model("nin", in_channels=1, width=0.05)) == 1
    assert channels_of(nn.Linear(2, 2)) is None
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1))
    assert [channels_of(convert(net, scheme)) for scheme in ("lr", "lr-join")] == [3, 3]
    data = open_for(convert(sized_net(), "lr"), "digits", Recipe())
    assert (data.train.channels, data.test.channels) == (3, 3)


@pytest.mark.parametrize("use", [fit, evaluate])
def test_other_classes_are_refused_before_an_image_is_decoded(photos: Path, monkeypatch, use: Callable) -> None:
    def decode(*_, **__):
        raise AssertionError("images were decoded")

    monkeypatch.setattr("lowrank_cnn.data.StreamedSplit.decode", decode)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = open_data(photos, image_size=12)
    with pytest.raises(LowRankError, match="4 outputs for an image, and the data 2 classes"):
        use(network, data, device="cpu")


IMAGES = torch.arange(8, dtype=torch.float64).view(8, 1, 1, 1).expand(8, 3, 16, 20).clone()
LABELS = torch.arange(8)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.3, 0.7)])
def test_targets_say_what_the_pixels_are(mixup: float, cutmix: float) -> None:
    """Every pixel is its class number, so that the mean of an image is the mean of its targets."""
    for batch in range(6):
        mixed, targets = Mixer(mixup, cutmix, 8, seed=0)(IMAGES, LABELS, 0, batch)
        torch.testing.assert_close(targets.sum(1), torch.ones(8))
        means = (targets.double() * torch.arange(8).double()).sum(1)
        torch.testing.assert_close(mixed.mean((1, 2, 3)), means, rtol=1e-5, atol=1e-6)
    values = {float(value) for value in mixed.unique()}
    assert cutmix == 0 or mixup or values <= set(range(8))  # CutMix pastes, and blends nothing


def test_draws_depend_on_seed_epoch_and_batch_alone() -> None:
    def mixed(seed: int, epoch: int, batch: int) -> torch.Tensor:
        torch.manual_seed(batch * 100)
        return Mixer(0.4, 1.0, 8, seed=seed)(IMAGES, LABELS, epoch, batch)[0]

    torch.manual_seed(3)
    first = mixed(0, 1, 2)
    assert torch.equal(first, mixed(0, 1, 2))
    assert not torch.equal(first, mixed(1, 1, 2))
    assert not torch.equal(first, mixed(0, 2, 2))
    assert not torch.equal(first, mixed(0, 1, 3))


def test_a_run_with_everything_on_learns_and_repeats(driver) -> None:
    more = {"mixup": 0.2, "cutmix": 1.0, "zoom": 0.7, "jitter": 0.2, "auto_augment": "trivial", "accumulate": 2}
    recipe = get_recipe("digits", batch_size=16, epochs=3, crop="none", pad=0, **more)
    runs = [fit(driver.tiny_net(), driver.tiny_data(), recipe, progress=False, device="cpu") for _ in range(2)]
    assert runs[0].result["loss"] == runs[1].result["loss"]
    assert runs[0].history[-1]["train_loss"] < 1.5


def test_colours_cannot_be_changed_after_whitening(driver) -> None:
    recipe = get_recipe("digits", batch_size=16, epochs=1, crop="none", pad=0, preprocess="whiten", jitter=0.1)
    with pytest.raises(LowRankError, match="need preprocess=standardize"):
        fit(driver.tiny_net(), driver.tiny_data(), recipe, progress=False, device="cpu")
