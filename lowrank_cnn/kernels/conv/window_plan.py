"""How a pooled first layer is divided for `window`: tiles of windows, and weights for the places in a window.

The four pixels of a 2x2 pool read one window of 4x4 pixels. With four channels per pixel a row of the window is 16
values, which is one step of the matrix unit. Rows of neighbouring windows begin 16 bytes apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowrank_cnn.kernels.conv.pack import union_taps
from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.system.arithmetic import ceil_div

WINDOWS = 64
"""Windows of a tile: as many as four warps multiply at once."""
PLACES = 4
"""Pixels of a window's row, and channels of a padded pixel."""
ROWS_READ = 3
SHAPES = ((4, 16), (8, 8), (2, 32))
"""Rows and columns of windows in a tile."""


@dataclass(frozen=True)
class WindowTile:
    """Tuned sizes: tiles in flight, and programs of a multiprocessor."""

    stages: int = 3
    residents: int = 3


def unsupported(problem: Problem) -> str | None:
    """Why the window kernel cannot run a problem, or None if it can."""
    if problem.stride != (1, 1) or problem.pool is None or (problem.pool == "ceil" and not problem.even):
        return "no whole 2x2 windows at stride 1"
    if problem.dtype not in (torch.bfloat16, torch.float16) or problem.channels > PLACES:
        return f"{problem.channels} channels of {problem.dtype} (the window kernel takes up to 4 of 16 bits)"
    if any(abs(place) > 1 for tap in union_taps(problem.groups) for place in tap):
        return "taps beyond the neighbouring pixels"
    if problem.filters % 16:
        return f"{problem.filters} filters, no multiple of 16"
    if 0 in problem.result_size:
        return "no window at all"
    height, width = padded_size(problem)
    if PLACES * (problem.batch + 1) * height * width >= 1 << 31:
        return "more values than 32 bits count"
    return None


def padded_size(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a padded image: one before, one after, and an even number of columns."""
    rows, columns = problem.result_size
    height, width = max(problem.height, 2 * rows) + 2, max(problem.width, 2 * columns) + 2
    return height, width + width % 2


def filters_per_tile(problem: Problem) -> int:
    return next(size for size in (64, 32, 16) if problem.filters % size == 0)


def window_shape(problem: Problem) -> tuple[int, int]:
    """The shape of a tile that wastes the fewest windows at the borders."""
    rows, columns = problem.result_size
    return min(SHAPES, key=lambda shape: ceil_div(rows, shape[0]) * ceil_div(columns, shape[1]))


def tile_counts(problem: Problem) -> tuple[int, int]:
    """Tiles of windows along the rows and the columns of an image."""
    (rows, columns), (height, width) = window_shape(problem), problem.result_size
    return ceil_div(height, rows), ceil_div(width, columns)


def pack_windows(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """[2 * 3 * filters, 16]: for each column of the pool, row of taps and filter, 4 places by 4 channels."""
    around = weights[0].new_zeros((ROWS_READ, ROWS_READ, PLACES, problem.filters), dtype=dtype)
    first = 0
    for group, weight in zip(problem.groups, weights, strict=True):
        down, right = 1 - group.top, 1 - group.left
        place = around[down : down + group.height, right : right + group.width, : problem.channels]
        place[..., first : first + group.filters] = weight.detach().permute(2, 3, 1, 0)
        first += group.filters
    packed = around.new_zeros((2, ROWS_READ, problem.filters, PLACES, PLACES))
    rows = around.permute(0, 3, 1, 2)
    for column in range(2):
        packed[column, :, :, column : column + ROWS_READ] = rows
    return packed.view(-1, PLACES * PLACES)


def unpack_windows(dw: Tensor, problem: Problem) -> tuple[list[Tensor], Tensor]:
    """The groups' [filters, channels, height, width] and the bias gradient, from gradients as in `pack_windows`.

    The bias gradient is that of the channel of ones (see `pad_channels`) at the middle tap.
    """
    packed = dw.view(2, ROWS_READ, problem.filters, PLACES, PLACES)
    around = packed[0, :, :, :ROWS_READ] + packed[1, :, :, 1:]
    parts = around.permute(1, 3, 0, 2).split([group.filters for group in problem.groups])
    found = [
        part[:, : problem.channels, 1 - g.top : 1 - g.top + g.height, 1 - g.left : 1 - g.left + g.width]
        for part, g in zip(parts, problem.groups, strict=True)
    ]
    return found, around[1, :, 1, problem.channels].contiguous()
