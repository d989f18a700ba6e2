"""`predict`: images in every form that users have them, and what is no image."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Standardize
from lowrank_cnn.train.inputs import preprocessing
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import Trained

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def trained() -> Trained:
    """Says red, green or blue by the brightest channel of a 6x8 image."""
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    preprocess = Standardize(torch.zeros(3), torch.full((3,), 50.0))
    return Trained(network, preprocess, Recipe(), ("red", "green", "blue"), (3, 6, 8))


@pytest.fixture
def green() -> np.ndarray:
    return np.tile(np.array([10, 200, 30], np.uint8), (6, 8, 1))


def test_all_forms_of_an_image_get_the_same_answer(trained: Trained, green: np.ndarray, tmp_path: Path) -> None:
    Image.fromarray(green).save(tmp_path / "a.png")
    forms = [
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        (tmp_path / "a.png").read_bytes(),
        Image.fromarray(green),
        green,
        torch.from_numpy(green).permute(2, 0, 1),
        np.dstack([green, np.full((6, 8), 255, np.uint8)]),
    ]
    trained.network.train()
    answers = lr.predict(trained, forms, device="cpu")
    assert answers[0][0][0] == "green"
    assert sum(probability for _, probability in answers[0]) == pytest.approx(1.0, rel=1e-5)
    assert all(answer == answers[0] for answer in answers)
    assert all(lr.predict(trained, form, device="cpu") == answers[:1] for form in forms)
    assert all(module.training for module in trained.network.modules())
    grey = lr.predict(trained, np.full((6, 8), 90, np.uint8), device="cpu", top=3)[0]
    assert [name for name, _ in grey] == list(trained.classes)  # of equal scores, the first class comes first
    assert grey[0][1] == pytest.approx(1 / 3)
    Image.new("RGB", (50, 40), (200, 10, 10)).save(tmp_path / "large.png")
    assert lr.predict(trained, tmp_path / "large.png", top=1)[0][0][0] == "red"


def test_a_folder_is_all_its_images(trained: Trained, green: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / ".thumbs").mkdir()
    for name in ("b.png", "deeper/a.png", ".hidden.png", ".thumbs/c.png"):
        Image.fromarray(green).save(tmp_path / name)
    assert len(lr.predict(trained, tmp_path, device="cpu")) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(LowRankError, match="there is no image below"):
        lr.predict(trained, tmp_path / "empty", device="cpu")


def test_one_bad_image_does_not_silence_the_others(trained: Trained, green: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    asked = [green, tmp_path / "bad.jpg", tmp_path / "none.jpg", green]
    answers = lr.predict(trained, asked, device="cpu", bad="skip")
    assert [answer is None for answer in answers] == [False, True, True, False]
    with pytest.raises(LowRankError, match=r"bad\.jpg is not an image that can be used"):
        lr.predict(trained, asked, device="cpu")


@pytest.mark.parametrize(
    ("image", "options", "says"),
    [
        (np.zeros((6, 8, 3)), {}, r"of uint8, not float64 \[6, 8, 3\]"),
        (torch.zeros(6, 8, 5, dtype=torch.uint8), {}, r"of uint8, not uint8 \[8, 5, 6\]"),
        (3, {}, "not a int"),
        (b"junk", {}, "the bytes is not an image that can be used"),
        ("none.png", {}, "cannot be read"),
        ([], {"top": 0}, "top must be a whole number of at least 1, not 0"),
        ([], {"top": 1.5}, "top must be a whole number of at least 1, not 1.5"),
        ([], {"bad": "maybe"}, "bad must be skip or refuse"),
    ],
)
def test_what_is_no_image_or_option_is_refused(trained: Trained, image: object, options: dict, says: str) -> None:
    with pytest.raises(LowRankError, match=says):
        lr.predict(trained, image, device="cpu", **options)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_pipes_and_devices_are_no_images(trained: Trained, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for name, target in {"zero.png": "/dev/zero", "link.png": tmp_path / "pipe.png"}.items():
        (tmp_path / name).symlink_to(target)
    for name in ("pipe.png", "zero.png", "link.png"):
        with pytest.raises(LowRankError, match=r"png cannot be read \(Not a regular file\)"):
            lr.predict(trained, tmp_path / name)


def test_networks_that_cannot_answer_are_refused(trained: Trained, green: np.ndarray) -> None:
    spoilt = nn.Sequential(*trained.network, nn.Linear(3, 3))
    nn.init.constant_(spoilt[-1].bias, float("nan"))
    with pytest.raises(LowRankError, match="the network gives NaN"):
        lr.predict(dataclasses.replace(trained, network=spoilt), green, device="cpu")
    with pytest.raises(LowRankError, match="predict needs a trained network"):
        lr.predict(nn.Linear(1, 1), [])


def test_views_are_averaged_as_in_evaluation(trained: Trained) -> None:
    """A network that sees the left half alone answers by both halves where the recipe mirrors test images."""
    pixels = torch.zeros(3, 6, 8, dtype=torch.uint8)
    pixels[0, :, :4], pixels[1, :, 4:] = 100, 200
    left = nn.Sequential(nn.ZeroPad2d((0, -4, 0, 0)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    alone = dataclasses.replace(trained, network=left)
    assert lr.predict(alone, pixels, device="cpu")[0][0][0] == "red"
    mirrored = dataclasses.replace(alone, recipe=Recipe(test_mirror=True))
    assert lr.predict(mirrored, pixels, device="cpu")[0][0][0] == "green"


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("sizes", [[(20, 20)] * 4, [(20, 26), (31, 20), (40, 40), (18, 22)]], ids=["one", "many"])
@pytest.mark.parametrize("framing", [{"crop": 14}, {"crop": 14, "resize": 16}, {"crop": 28, "resize": 32}])
def test_predict_shows_the_network_what_evaluate_does(tmp_path, mode, sizes, framing):
    for part in ("train", "val"):
        for number, size in enumerate(sizes):
            path = tmp_path / part / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise(size, 90).convert(mode).save(path)
    images, recipe = lr.open_data(tmp_path), Recipe(**framing)
    channels = len(Image.new(mode, (1, 1)).getbands())
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))
    trained = Trained(network, preprocessing(images.train, recipe), recipe, images.classes, images.test.size or ())
    seen: list[torch.Tensor] = []
    network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    lr.evaluate(trained, images, batch_size=1, device="cpu")
    evaluated = seen[-len(sizes) :]
    lr.predict(trained, sorted(tmp_path.glob("val/*/*.png")), device="cpu")
    predicted = torch.cat(seen[-len(sizes) :])
    assert predicted.shape == (len(sizes), channels, framing["crop"], framing["crop"])
    torch.testing.assert_close(predicted, torch.cat(evaluated))
