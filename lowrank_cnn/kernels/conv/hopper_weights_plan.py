"""How the weights' gradient is cut for the Hopper kernel: tiles of filters and channels, shares of the pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lowrank_cnn.kernels.conv.hopper_plan import SHARED, HopperTile, run_box, run_length
from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.kernels.tiles import Box

MOST_TAPS = 5
"""Taps of the longest run: the gradients of all its taps stay in registers."""


@dataclass(frozen=True)
class WeightTile:
    """What is tuned: pixels per step, filters and channels of a tile, warps and stages."""

    pixels: int = 64
    filters: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 4


def unsupported(problem: Problem) -> str | None:
    """Why the Hopper kernel cannot compute the weights' gradient of a problem, or None."""
    if problem.stride != (1, 1):
        return f"stride {problem.stride}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"{problem.dtype} (the Hopper kernel takes 16-bit floats)"
    # Boxes of pixels and of the gradient begin at multiples of 16 bytes, or the device stops.
    if problem.channels % 8 or any(group.filters % 8 or group.filters < 16 for group in problem.groups):
        return "channels or filters that are no multiple of 8, or a group of fewer than 16 filters"
    if run_length(problem) not in range(1, MOST_TAPS + 1):
        return f"groups whose taps do not run 1 to {MOST_TAPS} long along one axis"
    return None


def weight_tile(problem: Problem) -> WeightTile:
    """As many filters as the taps leave registers for, and as many stages as let two programs reside together."""
    most = 128 if run_length(problem) <= 3 else 64
    widest = max(group.filters for group in problem.groups)
    filters = next(size for size in (16, 32, 64, 128) if size >= min(widest, most))
    depth = 128 if run_length(problem) == 1 and problem.channels > 64 else 64
    tiles = [WeightTile(filters=filters, depth=depth, stages=stages) for stages in (4, 3, 2)]
    return next(tile for tile in tiles if tile.stages == 2 or 2 * (shared_bytes(problem, tile) + 1024) <= SHARED)


def weight_box(problem: Problem, tile: WeightTile) -> Box:
    """The pixels of a step as (run, images, cross); a pool that followed is undone before."""
    return run_box(replace(problem, pool=None), HopperTile(pixels=tile.pixels))


def shared_bytes(problem: Problem, tile: WeightTile) -> int:
    """Shared memory of one program: pixels, gradients and a barrier for each stage."""
    run, images, cross = weight_box(problem, tile)
    pixels = (run + run_length(problem) - 1) * images * cross * tile.depth
    return tile.stages * (problem.dtype.itemsize * (pixels + tile.pixels * tile.filters) + 8)


def weight_rows(problem: Problem, tile: WeightTile) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Per group what `run_rows` gives, for tiles of the weights' gradient; and how many tiles there are.

    Rows begin with the first tile and where the group's gradient begins; steps along and across a run count taps.
    """
    rows, first, start, channel, taps = [], 0, 0, 0, run_length(problem)
    for group in problem.groups:
        turned = group.height != taps
        columns = group.height if turned else group.width
        along, across = (1, group.width) if turned else (group.width, 1)
        before, beside = (group.left, group.top) if turned else (group.top, group.left)
        rows.append((first, start, channel, group.filters, columns, along, across, before, beside, int(turned)))
        first += columns * -(-group.filters // tile.filters) * -(-problem.channels // tile.depth)
        start += problem.channels * group.taps * group.filters
        channel += group.filters
    return tuple(rows), first
