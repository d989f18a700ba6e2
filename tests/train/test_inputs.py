"""A recipe that asks for more images than there are is answered with what to change."""

from __future__ import annotations

import dataclasses

import pytest

from lowrank_cnn.errors import LowRankError
from lowrank_cnn.train import fit
from lowrank_cnn.train.inputs import held_out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"batch_size": 128},
            "80 images to train on, fewer than one batch of 128: set batch_size .* to 80 or less",
        ),
        (
            {"batch_size": 80, "holdout": 0.1},
            "72 images to train on, after 8 are held out, fewer than one batch of 80: .* 72 or less, hold out",
        ),
        ({"holdout": 80}, r"holdout=80 leaves none of the 80 training images to train on: hold out fewer"),
        ({"holdout": 0.001}, r"holdout=0.001 of 80 training images is not one: set a larger share"),
    ],
)
def test_too_few_images_are_answered_with_what_to_change(driver, change: dict, says: str):
    with pytest.raises(LowRankError, match=says):
        fit(driver.tiny_net(), driver.tiny_data(), dataclasses.replace(driver.PLAIN, **change), progress=False)


@pytest.mark.parametrize(("holdout", "images"), [(0.1, 8), (5, 5), (1, 1)])
def test_what_is_held_out_is_a_share_or_a_count(driver, holdout: float, images: int):
    assert held_out(dataclasses.replace(driver.PLAIN, holdout=holdout), 80) == images
