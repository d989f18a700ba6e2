"""Which first layers the window kernel takes, and how it cuts them."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.kernels.conv.hopper_plan import padded_size, window_filters, window_shape, window_unsupported
from lowrank_cnn.kernels.problem import pose

SAME = [((1, 1), (1, 1))]


def problem(size=(2, 3, 8, 8), shape=(16, 3, 3, 3), dtype=torch.bfloat16, **other):
    return pose(size, [shape], dtype, **{"stride": (1, 1), "padding": SAME, "relu": True, "pool": "floor"} | other)


@pytest.mark.parametrize(
    "other",
    [
        {"pool": None},
        {"stride": (2, 2)},
        {"size": (2, 3, 7, 8), "pool": "ceil"},
        {"dtype": torch.float32},
        {"size": (2, 5, 8, 8), "shape": (16, 5, 3, 3)},
        {"shape": (16, 3, 5, 5), "padding": [((2, 2), (2, 2))]},
        {"shape": (24, 3, 3, 3)},
        {"padding": [((0, 2), (0, 2))]},
        {"size": (1 << 20, 3, 32, 32)},
    ],
)
def test_what_it_does_not_take(other):
    assert window_unsupported(problem()) is None
    assert window_unsupported(problem(**other))


def test_images_are_padded_to_even_rows_of_memory():
    assert padded_size(problem()) == (10, 10)
    assert padded_size(problem(size=(2, 3, 9, 9))) == (11, 12)


def test_tiles_suit_the_size():
    assert window_shape(problem(size=(2, 3, 224, 224))) == (4, 16)
    assert window_shape(problem(size=(2, 3, 16, 16))) == (8, 8)
    assert [window_filters(problem(shape=(f, 3, 3, 3))) for f in (128, 96, 48)] == [64, 32, 16]
