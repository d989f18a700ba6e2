"""How the gradients are cut for the plain kernels: tiles, and per group what its tiles need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import Problem, TapGroup
from lowrank_cnn.kernels.tiles import round_up

INPUT_TILES = (
    Tile(),
    Tile(256, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 64, 32, 4, 4),
)
"""Pixels, channels, filters per step, warps and stages worth measuring for the input's gradient."""
WEIGHT_TILES = (Tile(64, 128, 128, 4, 3), Tile(64, 128, 64, 4, 4))
"""Pixels per step, filters, channels, warps and stages for the weights' gradient."""
NARROW = {128: 1.0, 64: 0.8, 32: 0.65}
"""What a tile so wide makes of the matrix unit, about."""


def turned(problem: Problem) -> Problem | None:
    """The convolution of the gradient that gives the input's, for a single group of stride 1; else None.

    Its weights are the layer's with taps in reverse order, and channels and filters exchanged.
    """
    group, *others = problem.groups
    if others or problem.stride != (1, 1):
        return None
    top, left = group.height - 1 - group.top, group.width - 1 - group.left
    return replace(
        problem,
        channels=problem.filters,
        height=problem.out_height,
        width=problem.out_width,
        groups=(TapGroup(group.height, group.width, problem.channels, top, left),),
        out_height=problem.height,
        out_width=problem.width,
        activation=None,
        pool=None,
        residual=False,
    )


def input_tile(problem: Problem) -> Tile:
    """The default for the input's gradient: wide, unless a narrower tile leaves less of itself empty."""

    def cost(tile: Tile) -> float:
        depth = sum(group.taps * round_up(group.filters, tile.depth) for group in problem.groups)
        return round_up(problem.channels, tile.filters) * depth / (NARROW[tile.filters] * NARROW[2 * tile.depth])

    return min(INPUT_TILES, key=cost)


def weight_tile(problem: Problem) -> Tile:
    """The default for the weights' gradient, likewise."""

    def cost(tile: Tile) -> float:
        filters = sum(group.taps * round_up(group.filters, tile.filters) for group in problem.groups)
        return round_up(problem.channels, tile.depth) * filters / (NARROW[tile.filters] * NARROW[tile.depth])

    return min(WEIGHT_TILES, key=cost)


def leads(problem: Problem) -> list[int]:
    """How many of another group's filters stand before each group's own where fetches begin: every 16 bytes."""
    begins = accumulate((group.filters for group in problem.groups), initial=0)
    return [begin % (16 // problem.dtype.itemsize) for begin, _ in zip(begins, problem.groups, strict=False)]


def gradient_rows(
    problem: Problem, depth: int, begins: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Per group: packed row, where its gradient is fetched from, steps of a tap, taps, width, and offsets.

    `begins` says where the groups' filters stand in the gradient, if not one group's behind the other's.
    """
    rows, weight = [], 0
    channels = begins or list(accumulate((group.filters for group in problem.groups), initial=0))
    for group, channel, lead in zip(problem.groups, channels, leads(problem), strict=False):
        steps = -(-(lead + group.filters) // depth)
        rows.append((weight, channel - lead, steps, group.taps, group.width, group.top, group.left))
        weight += group.taps * problem.channels
    return tuple(rows)


def weight_rows(problem: Problem, filters: int, depth: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Per group: first tile, packed row, gradient channel, filters, width, offsets, lead; and the tiles in all."""
    rows, tile, weight, channel = [], 0, 0, 0
    for group, lead in zip(problem.groups, leads(problem), strict=True):
        rows.append((tile, weight, channel - lead, group.filters, group.width, group.top, group.left, lead))
        tile += group.taps * -(-(lead + group.filters) // filters) * -(-problem.channels // depth)
        weight += group.taps * group.filters
        channel += group.filters
    return tuple(rows), tile
