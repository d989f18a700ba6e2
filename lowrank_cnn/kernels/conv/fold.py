"""Rewrite a convolution of stride 2 as one of stride 1, over blocks of 2x2 pixels with 4 times the channels.

Tap t of a filter reads pixel 2 o + t - top for output o. With t - top = 2 q + r, that is part r of block o + q: a
filter over blocks. 7x7 taps over 3 channels become 4x4 over 12, and 3x3 become 2x2 over four times the channels.
The MACs grow by up to 1.8, the added ones with zeros, but they run in kernels that are fast and have gradients.

At stride 1, few channels are padded with zeros in the same way, as blocks of one pixel.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.kernels.problem import Pair, Problem, TapGroup, pixels_last
from lowrank_cnn.system.arithmetic import ceil_div


def folded(problem: Problem) -> Problem | None:
    """The problem over blocks; None if that is the problem itself, or a stride is above 2."""
    rows, columns = problem.stride
    full = _whole(problem.channels * rows * columns, problem.dtype)
    if not {rows, columns} <= {1, 2} or full == problem.channels:
        return None
    groups = []
    for group in problem.groups:
        height, top = _side(group.height, group.top, rows)
        width, left = _side(group.width, group.left, columns)
        groups.append(TapGroup(height, width, group.filters, top, left))
    return replace(
        problem,
        channels=full,
        height=ceil_div(problem.height, rows),
        width=ceil_div(problem.width, columns),
        groups=tuple(groups),
        stride=(1, 1),
    )


def fold_pixels(x: Tensor, stride: Pair) -> Tensor:
    """[N, C, H, W] as blocks, channels-last, with channels padded by zeros to a multiple of 16 bytes."""
    (batch, channels, height, width), (rows, columns) = x.shape, stride
    used = channels * rows * columns
    full = _whole(used, x.dtype)
    pixels, size = pixels_last(x), (ceil_div(height, rows), ceil_div(width, columns))
    if height % rows == 0 and width % columns == 0:
        parts = pixels.view(batch, size[0], rows, size[1], columns, channels).permute(0, 1, 3, 2, 4, 5)
        return functional.pad(parts.reshape(batch, *size, used), (0, full - used)).permute(0, 3, 1, 2)
    blocks = x.new_zeros((batch, *size, full))
    parts = blocks[..., :used].unflatten(-1, (rows, columns, channels))
    for row in range(rows):
        for column in range(columns):
            part = pixels[:, row::rows, column::columns]
            parts[:, : part.shape[1], : part.shape[2], row, column] = part
    return blocks.permute(0, 3, 1, 2)


def unfold_pixels(blocks: Tensor, problem: Problem) -> Tensor:
    """The gradient of the pixels, from that of the blocks."""
    (rows, columns), channels = problem.stride, problem.channels
    size = (problem.batch, channels, problem.height, problem.width)
    x = torch.empty(size, device=blocks.device, dtype=blocks.dtype, memory_format=torch.channels_last)
    parts = pixels_last(blocks)[..., : channels * rows * columns].unflatten(-1, (rows, columns, channels))
    for row in range(rows):
        for column in range(columns):
            target = x.permute(0, 2, 3, 1)[:, row::rows, column::columns]
            target.copy_(parts[:, : target.shape[1], : target.shape[2], row, column])
    return x


def fold_weights(weight: Tensor, group: TapGroup, stride: Pair, full: int) -> Tensor:
    """A group's [filters, C, height, width] over blocks of `full` channels."""
    (rows, columns), (filters, channels) = stride, weight.shape[:2]
    height, *high = _padded(group.height, group.top, rows)
    width, *wide = _padded(group.width, group.left, columns)
    taps = functional.pad(weight, (*wide, *high)).reshape(filters, channels, height, rows, width, columns)
    taps = taps.permute(0, 3, 5, 1, 2, 4).reshape(filters, rows * columns * channels, height, width)
    return functional.pad(taps, (0, 0, 0, 0, 0, full - taps.shape[1]))


def unfold_weights(taps: Tensor, group: TapGroup, stride: Pair, channels: int) -> Tensor:
    """The gradient of a group's weights, from that over blocks."""
    (rows, columns), filters = stride, taps.shape[0]
    height, above, _ = _padded(group.height, group.top, rows)
    width, before, _ = _padded(group.width, group.left, columns)
    parts = taps[:, : rows * columns * channels].reshape(filters, rows, columns, channels, height, width)
    whole = parts.permute(0, 3, 4, 1, 5, 2).reshape(filters, channels, height * rows, width * columns)
    return whole[:, :, above : above + group.height, before : before + group.width]


def _side(taps: int, before: int, stride: int) -> tuple[int, int]:
    """Taps over blocks along one side, and how many blocks before the output the first one lies."""
    first, last = -before // stride, (taps - 1 - before) // stride
    return last - first + 1, -first


def _padded(taps: int, before: int, stride: int) -> tuple[int, int, int]:
    """Taps over blocks, and the zeros before and after them that fill whole blocks."""
    count, _ = _side(taps, before, stride)
    front = -before % stride
    return count, front, count * stride - taps - front


def _whole(channels: int, dtype: torch.dtype) -> int:
    """Channels, rounded up so that every pixel begins at a multiple of 16 bytes."""
    step = 16 // dtype.itemsize
    return ceil_div(channels, step) * step
