"""How the output is cut into tiles: boxes of pixels over batch, rows and columns, all powers of two."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from lowrank_cnn.kernels.problem import Problem

Box = tuple[int, int, int]
OVERHEAD_BOXES = 16
"""What a program's beginning and end take, in boxes of work."""


class GroupRow(NamedTuple):
    """What the tiles of one filter group need; `tiled` reads the fields by index, in this order.

    A tap `r` rows down reads block row `(r + top_skip) // stride - top` at parity `(r + top_skip) % stride`, where
    `stride` rows make a block; columns likewise. At stride 1 the skips are zero.
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

    Among equals, the one whose rows and columns are largest: neighbouring taps then read the same lines.
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
    """Per group, what its tiles of `block` filters need."""
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
    """Into how many shares `boxes` are cut, a program for each of `tiles` in each share, so that all end soonest.

    `programs` run at once; a few more would take as long again for the few.
    """
    most = min(boxes, max(1, 4 * programs // tiles))

    def rounds(count: int) -> int:
        return ceil_div(tiles * count, programs) * (ceil_div(boxes, count) + OVERHEAD_BOXES)

    return min(range(1, most + 1), key=rounds)


def power_above(value: int, least: int = 16) -> int:
    """The smallest power of two that is not below `value` (nor `least`, what a matrix unit takes)."""
    return max(least, 1 << (value - 1).bit_length())


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return ceil_div(value, step) * step


def lanes_of(channels: int) -> int:
    """Channels per program where there is no matrix product: a power of two that divides them, if large enough."""
    whole = min(128, channels & -channels)
    return whole if whole >= 32 else min(128, power_above(channels))


def ceil_div(value: int, step: int) -> int:
    """How many steps cover a value: the quotient, rounded up."""
    return -(-value // step)
