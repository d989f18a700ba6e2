"""How the gradients are divided for the kernels of `backward`: tiles, and per group what its tiles need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import Problem, TapGroup
from lowrank_cnn.system.arithmetic import ceil_div, round_up

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
"""The share of the matrix unit's peak that a tile of this width reaches, roughly."""


class InputRow(NamedTuple):
    """One group in `backward.input_gradient`, which reads the fields by index.

    Its packed weights begin at `weight_row`, its gradient is fetched from `channel` on, and each of its `taps`
    takes `steps` steps. `top` and `left` are the offsets of the first tap, `width` the taps of a row.
    """

    weight_row: int
    channel: int
    steps: int
    taps: int
    width: int
    top: int
    left: int


class WeightRow(NamedTuple):
    """One group in `backward.weight_gradient`, which reads the fields by index.

    As `InputRow`. Fetches begin at multiples of 16 bytes, `lead` filters before the group's own.
    """

    first_tile: int
    weight_row: int
    channel: int
    filters: int
    width: int
    top: int
    left: int
    lead: int


def turned(problem: Problem) -> Problem | None:
    """The convolution of the output's gradient that gives the input's; None unless one group of stride 1.

    Its weights are the layer's with the taps reversed and channels and filters exchanged.
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
    """The default for the input's gradient: the widest tile, unless a narrower one wastes less."""

    def cost(tile: Tile) -> float:
        depth = sum(group.taps * round_up(group.filters, tile.depth) for group in problem.groups)
        return round_up(problem.channels, tile.filters) * depth / (NARROW[tile.filters] * NARROW[2 * tile.depth])

    return min(INPUT_TILES, key=cost)


def weight_tile(problem: Problem) -> Tile:
    """The default for the weights' gradient, chosen in the same way."""

    def cost(tile: Tile) -> float:
        filters = sum(group.taps * round_up(group.filters, tile.filters) for group in problem.groups)
        return round_up(problem.channels, tile.depth) * filters / (NARROW[tile.filters] * NARROW[tile.depth])

    return min(WEIGHT_TILES, key=cost)


def leads(problem: Problem) -> list[int]:
    """Per group, how many filters of the group before it a fetch includes, since fetches begin every 16 bytes."""
    begins = accumulate((group.filters for group in problem.groups), initial=0)
    return [begin % (16 // problem.dtype.itemsize) for begin, _ in zip(begins, problem.groups, strict=False)]


def input_rows(problem: Problem, depth: int, begins: Sequence[int] | None = None) -> list[InputRow]:
    """The groups for `backward.input_gradient`.

    `begins` are the first channels of the groups in the gradient, if they do not follow each other.
    """
    rows, weight = [], 0
    channels = begins or list(accumulate((group.filters for group in problem.groups), initial=0))
    for group, channel, lead in zip(problem.groups, channels, leads(problem), strict=False):
        steps = ceil_div(lead + group.filters, depth)
        rows.append(InputRow(weight, channel - lead, steps, group.taps, group.width, group.top, group.left))
        weight += group.taps * problem.channels
    return rows


def weight_rows(problem: Problem, filters: int, depth: int) -> tuple[list[WeightRow], int]:
    """The groups for `backward.weight_gradient`, and the number of tiles."""
    rows, tile, weight, channel = [], 0, 0, 0
    for group, lead in zip(problem.groups, leads(problem), strict=True):
        taps = (group.width, group.top, group.left)
        rows.append(WeightRow(tile, weight, channel - lead, group.filters, *taps, lead))
        tile += group.taps * ceil_div(lead + group.filters, filters) * ceil_div(problem.channels, depth)
        weight += group.taps * group.filters
        channel += group.filters
    return rows, tile
