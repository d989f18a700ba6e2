"""How the weights' gradient is divided for the Hopper kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from lowrank_cnn.kernels.conv.hopper_plan import (
    SHARED,
    weight_box,
    weight_run_rows,
    weight_tile,
    weights_shared_bytes,
    weights_unsupported,
)
from lowrank_cnn.kernels.problem import pose

SIDES = [((1, 1), (0, 0)), ((0, 0), (1, 1))]


def problem(channels=64, filters=48, dtype=torch.bfloat16, stride=(1, 1)):
    shapes = [(filters, channels, 3, 1), (filters, channels, 1, 3)]
    return pose((8, channels, 12, 12), shapes, dtype, stride=stride, padding=SIDES)


def test_the_default_tile_lets_two_programs_reside():
    tile = weight_tile(problem())
    run, images, cross = weight_box(problem(), tile)
    assert run * images * cross == tile.pixels
    assert 2 * (weights_shared_bytes(problem(), tile) + 1024) <= SHARED


def test_tiles_are_numbered_group_by_group():
    tile = weight_tile(problem(128))
    (down, across), tiles = weight_run_rows(problem(128), tile)
    assert (down.turned, across.turned) == (0, 1)
    assert down.first_tile == 0
    assert across.first_tile == tiles // 2 == 2  # two blocks of 64 channels
    assert across.start == 3 * 128 * 48


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stride": (2, 2)}, "stride"),
        ({"dtype": torch.float32}, "16-bit"),
        ({"channels": 12}, "multiple of 8"),
        ({"filters": 8}, "fewer than 16"),
    ],
)
def test_it_refuses_the_rest(change, why):
    assert weights_unsupported(problem()) is None
    assert why in weights_unsupported(problem(**change))
