"""How the output is cut into tiles: boxes of pixels over batch, rows and columns, all powers of two."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from lowrank_cnn.kernels.problem import Problem

Box = tuple[int, int, int]
BESIDES = 16


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
        covered = box[0] * _up(batch, box[0]) * box[1] * _up(height, box[1]) * box[2] * _up(width, box[2])
        return covered, box[0], abs(box[1] - box[2])

    return min(boxes, key=cost)


def box_count(problem: Problem, box: Box) -> tuple[int, int, int]:
    """How many boxes cover the (unpooled) output: over images, rows and columns."""
    images, rows, columns = box
    return (
        _up(problem.batch, images),
        _up(problem.out_height, rows),
        _up(problem.out_width, columns),
    )


def filter_tiles(problem: Problem, block: int) -> int:
    """Tiles of `block` output channels; none spans two groups."""
    return sum(_up(group.filters, block) for group in problem.groups)


def group_rows(problem: Problem, block: int) -> tuple[tuple[int, ...], ...]:
    """Per group, what its tiles need: first tile, packed weight row, output channel, and its geometry."""
    rows, tile, weight, channel = [], 0, 0, 0
    for group in problem.groups:
        rows.append((tile, weight, channel, group.filters, group.taps, group.width, group.top, group.left))
        tile += _up(group.filters, block)
        weight += group.taps * group.filters
        channel += group.filters
    return tuple(rows)


@lru_cache(maxsize=4096)
def shares(tiles: int, boxes: int, programs: int) -> int:
    """Into how many shares `boxes` are cut, a program for each of `tiles` in each share, so that all end soonest.

    `programs` run at once; a few more would take as long again for the few. To begin, and to add up what was found
    at the end, takes a program about as long as `BESIDES` boxes.
    """
    most = min(boxes, max(1, 4 * programs // tiles))
    return min(range(1, most + 1), key=lambda count: _up(tiles * count, programs) * (_up(boxes, count) + BESIDES))


def power_above(value: int, least: int = 16) -> int:
    """The smallest power of two that is not below `value` (nor `least`, what a matrix unit takes)."""
    return max(least, 1 << (value - 1).bit_length())


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return _up(value, step) * step


def lanes_of(channels: int) -> int:
    """Channels per program where there is no matrix product: a power of two that divides them, if large enough."""
    whole = min(128, channels & -channels)
    return whole if whole >= 32 else min(128, power_above(channels))


def _up(value: int, step: int) -> int:
    return -(-value // step)
