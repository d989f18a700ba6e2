"""Divide the output into tiles: boxes of pixels over batch, rows and columns, all powers of two."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.system.arithmetic import ceil_div, round_up

Box = tuple[int, int, int]
OVERHEAD_BOXES = 16
"""The cost of a program's beginning and end, in boxes of work."""


class GroupRow(NamedTuple):
    """One filter group in `tiled`, which reads the fields by index.

    A tap `r` rows down reads block row `(r + top_skip) // stride - top` at parity `(r + top_skip) % stride`, where
    `stride` rows make a block. The same holds for columns. At stride 1 the skips are zero.
    """

    first_tile: int
    weight_row: int
    channel: int
    filters: int
    taps: int
    width: int
    top: int
    top_skip: int
    left: int
    left_skip: int


@lru_cache(maxsize=4096)
def box_of(batch: int, height: int, width: int, pixels: int, least: int = 1) -> Box:
    """The box (images, rows, columns) of `pixels` output pixels that wastes the fewest at the borders.

    Of equal ones, that with the fewest images, then the squarest: neighbouring taps then read the same lines.
    """
    powers = [2**i for i in range(pixels.bit_length())]
    boxes = [
        (pixels // (rows * columns), rows, columns)
        for rows, columns in product(powers, powers)
        if rows * columns <= pixels and rows >= least and columns >= least
    ]

    def cost(box: Box) -> tuple[int, int, int]:
        covered = prod(round_up(size, part) for size, part in zip((batch, height, width), box, strict=True))
        return covered, box[0], abs(box[1] - box[2])

    return min(boxes, key=cost)


def box_count(problem: Problem, box: Box) -> tuple[int, int, int]:
    """How many boxes cover the (unpooled) output: over images, rows and columns."""
    images, rows, columns = box
    return (
        ceil_div(problem.batch, images),
        ceil_div(problem.out_height, rows),
        ceil_div(problem.out_width, columns),
    )


def filter_tiles(problem: Problem, block: int) -> int:
    """Tiles of `block` output channels; none spans two groups."""
    return sum(ceil_div(group.filters, block) for group in problem.groups)


def group_rows(problem: Problem, block: int) -> tuple[GroupRow, ...]:
    """The groups for tiles of `block` filters."""
    rows, tile, weight, channel = [], 0, 0, 0
    for group in problem.groups:
        top, left = ceil_div(group.top, problem.stride[0]), ceil_div(group.left, problem.stride[1])
        skips = top * problem.stride[0] - group.top, left * problem.stride[1] - group.left
        shape = (group.filters, group.taps, group.width)
        rows.append(GroupRow(tile, weight, channel, *shape, top, skips[0], left, skips[1]))
        tile += ceil_div(group.filters, block)
        weight += group.taps * group.filters
        channel += group.filters
    return tuple(rows)


@lru_cache(maxsize=4096)
def shares(tiles: int, boxes: int, programs: int) -> int:
    """Into how many shares to divide `boxes` so that the work ends soonest, with a program per tile and share.

    `programs` run at once. A few more than that would take another full round.
    """
    most = min(boxes, max(1, 4 * programs // tiles))

    def rounds(count: int) -> int:
        return ceil_div(tiles * count, programs) * (ceil_div(boxes, count) + OVERHEAD_BOXES)

    return min(range(1, most + 1), key=rounds)


def power_above(value: int, least: int = 16) -> int:
    """The smallest power of two that is at least `value` and `least`, the smallest side of a matrix product."""
    return max(least, 1 << (value - 1).bit_length())


def lanes_of(channels: int) -> int:
    """Channels per program of a kernel without matrix products: a power of two, if possible a divisor."""
    whole = min(128, channels & -channels)
    return whole if whole >= 32 else min(128, power_above(channels))
