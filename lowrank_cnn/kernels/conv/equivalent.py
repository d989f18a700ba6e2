"""Rewrite problems for existing kernels: over blocks of pixels, with zeros around taps, parity by parity.

Blocks: a convolution of stride 2 is one of stride 1, over blocks of 2x2 pixels with 4 times the channels.

Tap t of a filter reads pixel 2 o + t - top for output o. With t - top = 2 q + r, that is part r of block o + q: a
filter over blocks. 7x7 taps over 3 channels become 4x4 over 12, and 3x3 become 2x2 over four times the channels.
The MACs grow by up to 1.8, the added ones with zeros, but they run in kernels that are fast and have gradients.

At stride 1, few channels are padded with zeros in the same way, as blocks of one pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels.conv import hopper_plan, tiled
from lowrank_cnn.kernels.conv.hopper_plan import is_strided, run_length
from lowrank_cnn.kernels.conv.pack import copy_groups, pack_rows, unpack_rows
from lowrank_cnn.kernels.problem import (
    ConvTensors,
    ForwardKernel,
    Layout,
    Pair,
    Problem,
    TapGroup,
    blocks_before,
    empty_maps,
    filters_per_tile,
    pixels_last,
)


def folded(problem: Problem) -> Problem | None:
    """The problem over blocks; None if that is the problem itself, or a stride is above 2."""
    rows, columns = problem.stride
    full = _whole(problem.channels * rows * columns, problem.dtype)
    if not {rows, columns} <= {1, 2} or full == problem.channels:
        return None
    groups = []
    for group in problem.groups:
        (height, *_), (width, *_) = (
            _padded(group.height, group.top, rows),
            _padded(group.width, group.left, columns),
        )
        top, left = ceil_div(group.top, rows), ceil_div(group.left, columns)
        groups.append(TapGroup(height, width, group.filters, top, left))
    size = {"height": ceil_div(problem.height, rows), "width": ceil_div(problem.width, columns)}
    return replace(problem, channels=full, **size, groups=tuple(groups), stride=(1, 1))


def fold_pixels(x: Tensor, stride: Pair) -> Tensor:
    """[N, C, H, W] as blocks, channels-last, with channels padded by zeros to a multiple of 16 bytes."""
    (batch, channels, height, width), (rows, columns) = x.shape, stride
    pixels, used = pixels_last(x), channels * rows * columns
    if height % rows or width % columns:
        pixels = functional.pad(pixels, (0, 0, 0, -width % columns, 0, -height % rows))
    size = (pixels.shape[1] // rows, pixels.shape[2] // columns)
    parts = pixels.view(batch, size[0], rows, size[1], columns, channels).permute(0, 1, 3, 2, 4, 5)
    blocks = functional.pad(parts.reshape(batch, *size, used), (0, _whole(used, x.dtype) - used))
    return blocks.permute(0, 3, 1, 2)


def unfold_pixels(blocks: Tensor, problem: Problem) -> Tensor:
    """The gradient of the pixels, from that of the blocks."""
    (rows, columns), channels = problem.stride, problem.channels
    x = empty_maps((problem.batch, channels, problem.height, problem.width), blocks)
    parts = pixels_last(blocks)[..., : channels * rows * columns].unflatten(-1, (rows, columns, channels))
    for row, column in product(range(rows), range(columns)):
        target = x.permute(0, 2, 3, 1)[:, row::rows, column::columns]
        target.copy_(parts[:, : target.shape[1], : target.shape[2], row, column])
    return x


def unfold_weights(taps: Tensor, group: TapGroup, stride: Pair, channels: int) -> Tensor:
    """The gradient of a group's weights, from that over blocks."""
    (rows, columns), filters = stride, taps.shape[0]
    height, above, _ = _padded(group.height, group.top, rows)
    width, before, _ = _padded(group.width, group.left, columns)
    parts = taps[:, : rows * columns * channels].reshape(filters, rows, columns, channels, height, width)
    whole = parts.permute(0, 3, 4, 1, 5, 2).reshape(filters, channels, height * rows, width * columns)
    return whole[:, :, above : above + group.height, before : before + group.width]


def _padded(taps: int, before: int, stride: int) -> tuple[int, int, int]:
    """Taps over blocks along one side, and the zeros before and after the taps that fill whole blocks."""
    blocks, front = blocks_before(before, stride)
    count = (taps - 1 - before) // stride + blocks + 1
    return count, front, count * stride - taps - front


def _whole(channels: int, dtype: torch.dtype) -> int:
    """Channels, rounded up so that every pixel begins at a multiple of 16 bytes."""
    return round_up(channels, 16 // dtype.itemsize)


def folded_weights(weights: Sequence[Tensor], problem: Problem) -> list[Tensor]:
    """The groups' weights for the folded problem: [filters, C, height, width] over blocks of more channels."""
    (rows, columns), channels, found = problem.stride, problem.channels, []
    used = channels * rows * columns
    for weight, group in zip(weights, problem.groups, strict=True):
        height, *high = _padded(group.height, group.top, rows)
        width, *wide = _padded(group.width, group.left, columns)
        taps = functional.pad(weight, (*wide, *high)).reshape(-1, channels, height, rows, width, columns)
        taps = taps.permute(0, 3, 5, 1, 2, 4).reshape(-1, used, height, width)
        found.append(functional.pad(taps, (0, 0, 0, 0, 0, _whole(used, problem.dtype) - used)))
    return found


def _launch_folded(problem: Problem, given: ConvTensors, tile: tiled.Tile) -> Tensor:
    inner = folded(problem)
    assert inner is not None
    return tiled.launch_tiled(inner, given._replace(x=fold_pixels(given.x, problem.stride)), tile)


FOLDED = ForwardKernel(
    tiled.Tile,
    lambda problem, capability: tiled.tiles(folded(problem) or problem, capability)[:1],
    lambda problem: tiled.unsupported(inner) if (inner := folded(problem)) else "no blocks of pixels",
    Layout("blocks", lambda weights, problem, dtype: pack_rows(folded_weights(weights, problem), dtype)),
    _launch_folded,
)


# Rewrite a problem for the Hopper kernels: groups of one length, or one group, with zeros around the taps.
#
# The Hopper kernels fetch the pixels of a run of taps once, and all runs of a launch have one length. A 3x3 and a
# 1x1 group have none in common. With zeros above and below its tap the 1x1 becomes a 3x1: three products instead
# of one (a 3x3 would take nine). The results do not change. The weight gradient uses this; in the forward it never
# beat the plain kernel.
#
# A tile of filters lies within one group. Narrow groups make narrow tiles, which leave most of the tensor cores
# idle. As one dense group with zeros around all taps, such a layer may be faster.

MOST = 2
"""How many times the products may grow. The plain kernels take less than twice as long per product."""
NARROW, MOST_ENCLOSED = 64, 2.5
"""Filters below which a tile is narrow, and how many times the products of narrow groups may grow."""


@lru_cache(maxsize=4096)
def lengthened(problem: Problem, lengths: tuple[int, ...]) -> Problem | None:
    """The problem with runs of the one of `lengths` that adds the fewest products.

    None if it has such runs already, if every tap is a run of its own, or if the products would grow too much.
    """
    pointwise = all(group.taps == 1 for group in problem.groups)
    if is_strided(problem) or pointwise or run_length(problem) in lengths:
        return None
    found = [tuple(_reaching(group, length) for group in problem.groups) for length in lengths]
    whole = [replace(problem, groups=groups) for groups in found if None not in groups]
    fitting = [longer for longer in whole if run_length(longer) in lengths]
    best = min(fitting, key=lambda longer: longer.macs, default=None)
    return best if best is not None and best.macs <= MOST * problem.macs else None


def is_worth_enclosing(problem: Problem) -> bool:
    """Whether a problem may be faster as one dense group: if others do not run on Hopper, or in narrow tiles."""
    if len(problem.groups) == 1 or problem.as_dense.macs > MOST_ENCLOSED * problem.macs:
        return False
    runs = any(form and hopper_plan.unsupported(form) is None for form in (problem, lengthened(problem, (3, 5))))
    return not runs or filters_per_tile(problem) < NARROW


def _reaching(group: TapGroup, length: int) -> TapGroup | None:
    """A group with zeros along one side, so that it is `length` long; None if both sides are longer."""
    rows, columns = length - group.height, length - group.width
    found = []
    if rows >= 0:
        found.append(replace(group, height=length, top=group.top + rows // 2))
    if columns >= 0:
        found.append(replace(group, width=length, left=group.left + columns // 2))
    return min(found, key=lambda longer: longer.taps, default=None)


def pack_enclosed(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """As `pack.pack_rows`, for the problem as one dense group."""
    dense = problem.as_dense
    rows = weights[0].new_zeros((sum(dense.rows), problem.channels), dtype=dtype)
    (whole,) = unpack_rows(rows, dense.shapes)
    parts = whole.split([group.filters for group in problem.groups])
    copy_groups(weights, own_taps(parts, problem, dense.groups * len(parts)))
    return rows


def _unenclosable(problem: Problem) -> str | None:
    worth = is_worth_enclosing(problem)
    return hopper_plan.unsupported(problem.as_dense) if worth else "groups that need not be enclosed"


ENCLOSED = ForwardKernel(
    hopper_plan.HopperTile,
    lambda problem, capability: hopper_plan.hopper_tiles(problem.as_dense, capability),
    _unenclosable,
    Layout("enclosed", pack_enclosed),
    lambda problem, given, tile: hopper_plan.HOPPER.launch(problem.as_dense, given, tile),
    lambda problem, tile: hopper_plan.part_count(problem.as_dense, tile),
)


def own_taps(weights: Sequence[Tensor], problem: Problem, wider: Sequence[TapGroup]) -> list[Tensor]:
    """Views of the taps that the groups of the problem itself have, in weights of wider groups."""
    return [
        weight[:, :, wide.top - group.top :, wide.left - group.left :][:, :, : group.height, : group.width]
        for weight, group, wide in zip(weights, problem.groups, wider, strict=True)
    ]


# Compute the gradients of a strided conv as those of convs of stride 1, one per parity of pixels, without
# copies.
#
# At stride s, tap t of a filter reads row s o + t - top for output row o. The rows of one parity p (p, p + s, p
# + 2 s, ...) form an image of their own, a view of the same memory. Every s-th tap reads it, and over that image
# these taps are a filter of stride 1. The same holds for columns, so stride 2 gives four images. 3x1 and 1x3
# taps become 2x1 taps of the odd rows, 1x2 taps of the odd columns, and 1x1 taps of the pixels that are even
# both ways.


@dataclass(frozen=True)
class ParityConv:
    """The conv of stride 1 over the pixels of one parity.

    `members` are the groups with taps there, `begins` their first filters among those of all groups, and `taps`
    the first row and column of each member's taps.
    """

    parity: Pair
    problem: Problem
    members: tuple[int, ...]
    begins: tuple[int, ...]
    taps: tuple[Pair, ...]


def parity_convs(problem: Problem) -> list[ParityConv]:
    """One conv for each parity that any tap reads."""
    found = []
    for parity in product(range(problem.stride[0]), range(problem.stride[1])):
        parts = [_part(group, parity, problem.stride) for group in problem.groups]
        placed = [
            (i, begin, *part) for i, (begin, part) in enumerate(zip(problem.begins, parts, strict=True)) if part
        ]
        if placed:
            members, begins, groups, taps = zip(*placed, strict=True)
            sides = zip((problem.height, problem.width), parity, problem.stride, strict=True)
            height, width = (ceil_div(size - first, stride) for size, first, stride in sides)
            linear = replace(problem, groups=groups, stride=(1, 1), activation=None, pool=None)
            found.append(ParityConv(parity, replace(linear, height=height, width=width), members, begins, taps))
    return found


def parity_unsupported(problem: Problem) -> str | None:
    """Why the views cannot be fetched, or None if they can: they must begin at multiples of 16 bytes."""
    whole = 16 // problem.dtype.itemsize
    if problem.channels % whole or any(group.filters % whole for group in problem.groups):
        return "channels or filters that are not whole blocks of 16 bytes"
    if min(problem.height - problem.stride[0], problem.width - problem.stride[1]) < 0:
        return "an image smaller than the stride"
    return None


def pixels_of(pixels: Tensor, conv: ParityConv, stride: Pair) -> Tensor:
    """The pixels of a parity, a view [N, H', W', C]."""
    return pixels[:, conv.parity[0] :: stride[0], conv.parity[1] :: stride[1]]


def neighbours(conv: ParityConv) -> list[Pair]:
    """Ranges of members whose filters are neighbours, as (first, after the last)."""
    stretches: list[list[int]] = []
    for place, (begin, group) in enumerate(zip(conv.begins, conv.problem.groups, strict=True)):
        if stretches and stretches[-1][2] == begin:
            stretches[-1][1:] = [place + 1, begin + group.filters]
        else:
            stretches.append([place, place + 1, begin + group.filters])
    return [(first, last) for first, last, _ in stretches]


def _part(group: TapGroup, parity: Pair, stride: Pair) -> tuple[TapGroup, Pair] | None:
    """The taps of a group that read a parity, as a group of stride 1, and the first of them."""
    rows, top, first = _parity_side(group.height, group.top, parity[0], stride[0])
    columns, left, begin = _parity_side(group.width, group.left, parity[1], stride[1])
    if rows <= 0 or columns <= 0:
        return None
    return TapGroup(rows, columns, group.filters, top, left), (first, begin)


def _parity_side(taps: int, before: int, parity: int, stride: int) -> tuple[int, int, int]:
    """Taps along one side that read a parity, how far before the output they begin, and the first of them."""
    first = (parity + before) % stride
    return ceil_div(taps - first, stride), (before + parity - first) // stride, first
