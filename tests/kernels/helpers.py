"""What tests of kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PADDING = [((1, 1), (0, 0)), ((0, 0), (1, 1))]
FIRST_LAYERS = [
    pytest.param((2, 3, 9, 7), [(3, 1, 8), (1, 3, 8)], {"relu": True, "pool": "floor"}, id="low-rank, pool"),
    pytest.param((1, 3, 8, 6), [(3, 3, 20)], {"relu": True}, id="dense, ragged filters"),
    pytest.param(
        (1, 3, 11, 9), [(7, 1, 8), (1, 7, 8)], {"stride": (2, 2), "pool": "ceil"}, id="stride 2, clipped"
    ),
    pytest.param((1, 1, 5, 5), [(5, 1, 8), (1, 5, 8), (1, 1, 4)], {"bias": False}, id="grey"),
    pytest.param((1, 4, 7, 8), [(3, 1, 8), (1, 3, 8)], {"stride": (1, 2)}, id="uneven stride"),
]
"""First layers of networks: the size of the input, the groups, and the options."""


def same(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The padding with which a filter of this size keeps the size of its input."""
    rows, columns = (height - 1) // 2, (width - 1) // 2
    return (rows, height - 1 - rows), (columns, width - 1 - columns)


def assert_well_formed(operator: Callable[..., Any], arguments: Sequence[Any], *, gradients: bool) -> None:
    """Assert that an operator has a right schema and fake kernel, and with `gradients` a formula for these."""
    tests = ("test_schema", "test_faketensor", *(("test_autograd_registration",) if gradients else ()))
    found = torch.library.opcheck(operator, tuple(arguments), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}, found


def numbers(size: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that TF32 holds exactly, or a pool on a GPU could choose another winner than float64 does."""
    return (torch.randn(size, device=DEVICE) * 64).round().div(64).to(dtype)


def inputs(
    size: Sequence[int] = (2, 8, 6, 6), filters: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor], Tensor]:
    """An input, the weights of a vertical and a horizontal group, and the bias."""
    x = numbers(size, dtype).contiguous(memory_format=torch.channels_last)
    weights = [numbers((filters, size[1], *shape), dtype) for shape in ((3, 1), (1, 3))]
    return x, weights, numbers(2 * filters)
