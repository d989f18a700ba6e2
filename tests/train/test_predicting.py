"""Images in every form that users have them, and what is no image."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Standardize
from lowrank_cnn.train import Recipe
from lowrank_cnn.train.evaluate import predict
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
    ]
    answers = predict(trained, forms, device="cpu")
    assert answers[0][0][0] == "green"
    assert all(answer == answers[0] for answer in answers)
    assert all(predict(trained, form, device="cpu") == answers[:1] for form in forms)


def test_a_folder_is_all_its_images(trained: Trained, green: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / ".thumbs").mkdir()
    for name in ("b.png", "deeper/a.png", ".hidden.png", ".thumbs/c.png"):
        Image.fromarray(green).save(tmp_path / name)
    assert len(predict(trained, tmp_path, device="cpu")) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(LowRankError, match="there is no image below"):
        predict(trained, tmp_path / "empty", device="cpu")


def test_grey_images_and_alpha(trained: Trained, green: np.ndarray) -> None:
    grey = predict(trained, np.full((6, 8), 90, np.uint8), device="cpu")[0]
    assert grey[0][1] == pytest.approx(1 / 3)
    clear = np.dstack([green, np.full((6, 8), 255, np.uint8)])
    assert predict(trained, clear, device="cpu") == predict(trained, green, device="cpu")


def test_one_bad_image_does_not_silence_the_others(trained: Trained, green: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    asked = [green, tmp_path / "bad.jpg", tmp_path / "none.jpg", green]
    answers = predict(trained, asked, device="cpu", bad="skip")
    assert [answer is None for answer in answers] == [False, True, True, False]
    with pytest.raises(LowRankError, match=r"bad\.jpg is not an image that can be used"):
        predict(trained, asked, device="cpu")
    with pytest.raises(LowRankError, match="bad is refuse or skip"):
        predict(trained, asked, device="cpu", bad="maybe")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (np.zeros((6, 8, 3)), r"of uint8, not float64 \[6, 8, 3\]"),
        (torch.zeros(6, 8, 5, dtype=torch.uint8), r"of uint8, not uint8 \[8, 5, 6\]"),
        (3, "not a int"),
        (b"junk", "the bytes is not an image that can be used"),
    ],
)
def test_what_is_no_image(trained: Trained, image: object, says: str) -> None:
    with pytest.raises(LowRankError, match=says):
        predict(trained, image, device="cpu")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_pipes_and_devices_are_no_images(trained: Trained, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for name, target in {"zero.png": "/dev/zero", "link.png": tmp_path / "pipe.png"}.items():
        (tmp_path / name).symlink_to(target)
    for name in ("pipe.png", "zero.png", "link.png"):
        with pytest.raises(LowRankError, match=r"png cannot be read \(Not a regular file\)"):
            predict(trained, tmp_path / name)


def test_the_mode_of_the_network_stays(trained: Trained, green: np.ndarray) -> None:
    trained.network.train()
    predict(trained, green)
    assert all(module.training for module in trained.network.modules())


def test_a_network_that_gives_nan_is_refused(trained: Trained, green: np.ndarray) -> None:
    spoilt = nn.Sequential(*trained.network, nn.Linear(3, 3))
    nn.init.constant_(spoilt[-1].bias, float("nan"))
    with pytest.raises(LowRankError, match="the network gives NaN"):
        predict(dataclasses.replace(trained, network=spoilt), green, device="cpu")


def test_views_are_averaged_as_in_evaluation(trained: Trained) -> None:
    """A network that sees the left half alone answers by both halves where the recipe mirrors test images."""
    pixels = torch.zeros(3, 6, 8, dtype=torch.uint8)
    pixels[0, :, :4], pixels[1, :, 4:] = 100, 200
    left = nn.Sequential(nn.ZeroPad2d((0, -4, 0, 0)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    alone = dataclasses.replace(trained, network=left)
    assert predict(alone, pixels, device="cpu")[0][0][0] == "red"
    mirrored = dataclasses.replace(alone, recipe=Recipe(test_mirror=True))
    assert predict(mirrored, pixels, device="cpu")[0][0][0] == "green"


def test_of_equal_scores_the_first_class_is_named(trained: Trained) -> None:
    assert [name for name, _ in predict(trained, torch.zeros(3, 6, 8, dtype=torch.uint8))[0]] == list(
        trained.classes
    )
