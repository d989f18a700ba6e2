"""How the weights' gradient is divided for the Hopper kernel: tiles of filters and channels, shares of pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lowrank_cnn.kernels.conv.hopper_plan import SHARED, HopperTile, run_box, run_length
from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.kernels.tiles import Box
from lowrank_cnn.system.arithmetic import ceil_div

RUNS = (1, 2, 3, 5)
"""Taps of a run. The gradients of all its taps stay in registers; a fetch brings 1, 2 or 4 pixels beyond a box."""


class WeightRunRow(NamedTuple):
    """One group in `hopper_weights`, which reads the fields by index.

    The group's gradient begins at value `start`. It has `columns` runs side by side; neighbouring taps of a run
    are `along` taps apart in memory, neighbouring runs `across`. The first tap lies `before` the output pixel
    along the run and `beside` it across. If `turned`, runs go along the columns.
    """

    first_tile: int
    start: int
    channel: int
    filters: int
    columns: int
    along: int
    across: int
    before: int
    beside: int
    turned: int


@dataclass(frozen=True)
class WeightTile:
    """Tuned sizes: pixels per step, filters and channels of a tile, warps and stages."""

    pixels: int = 64
    filters: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 4


def unsupported(problem: Problem) -> str | None:
    """Why the Hopper kernel cannot compute the weights' gradient of a problem, or None if it can."""
    if problem.stride != (1, 1):
        return f"stride {problem.stride}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"{problem.dtype} (the Hopper kernel takes 16-bit floats)"
    # Boxes of pixels and of the gradient must begin at multiples of 16 bytes, or the device faults.
    if problem.channels % 8 or any(group.filters % 8 or group.filters < 16 for group in problem.groups):
        return "channels or filters that are no multiple of 8, or a group of fewer than 16 filters"
    if run_length(problem) not in RUNS:
        return "groups whose taps do not run 1, 2, 3 or 5 long along one axis"
    return None


def weight_tile(problem: Problem) -> WeightTile:
    """As many filters as fit in the registers beside the taps, and as many stages as let two programs reside."""
    most = 128 if run_length(problem) <= 3 else 64
    widest = max(group.filters for group in problem.groups)
    filters = next(size for size in (16, 32, 64, 128) if size >= min(widest, most))
    depth = 128 if run_length(problem) == 1 and problem.channels > 64 else 64
    tiles = [WeightTile(filters=filters, depth=depth, stages=stages) for stages in (4, 3, 2)]
    return next(tile for tile in tiles if tile.stages == 2 or 2 * (shared_bytes(problem, tile) + 1024) <= SHARED)


def weight_box(problem: Problem, tile: WeightTile) -> Box:
    """The pixels of a step as (run, images, cross). A pool is already undone."""
    return run_box(replace(problem, pool=None), HopperTile(pixels=tile.pixels))


def shared_bytes(problem: Problem, tile: WeightTile) -> int:
    """Shared memory of one program: pixels, gradients and a barrier for each stage."""
    run, images, cross = weight_box(problem, tile)
    pixels = (run + run_length(problem) - 1) * images * cross * tile.depth
    return tile.stages * (problem.dtype.itemsize * (pixels + tile.pixels * tile.filters) + 8)


def weight_run_rows(problem: Problem, tile: WeightTile) -> tuple[list[WeightRunRow], int]:
    """The groups for `hopper_weights`, and the number of tiles."""
    rows, first, start, channel, taps = [], 0, 0, 0, run_length(problem)
    for group in problem.groups:
        turned = group.height != taps
        columns = group.height if turned else group.width
        along, across = (1, group.width) if turned else (group.width, 1)
        before, beside = (group.left, group.top) if turned else (group.top, group.left)
        place = (along, across, before, beside, int(turned))
        rows.append(WeightRunRow(first, start, channel, group.filters, columns, *place))
        first += columns * ceil_div(group.filters, tile.filters) * ceil_div(problem.channels, tile.depth)
        start += problem.channels * group.taps * group.filters
        channel += group.filters
    return rows, first
