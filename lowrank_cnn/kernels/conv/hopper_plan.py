"""How a problem is cut for the Hopper kernel: runs of taps, boxes of pixels, rows of packed weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.kernels.tiles import Box, filter_tiles

SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor, of which each program takes one KiB besides its own."""


@dataclass(frozen=True)
class HopperTile:
    """What is tuned: pixels and filters of a tile, channels per step, warps, fetches in flight, programs."""

    pixels: int = 128
    filters: int = 128
    depth: int = 64
    warps: int = 4
    boxes: int = 2
    slabs: int = 3
    parts: int = 2
    residents: int = 2

    @property
    def warp_grid(self) -> tuple[int, int]:
        """Warps along the pixels and along the filters: a group of four takes at most 128 filters."""
        return (self.warps, 1) if self.filters <= 128 else (4, self.warps // 4)


def unsupported(problem: Problem) -> str | None:
    """Why this kernel cannot take a problem, or None."""
    if problem.stride != (1, 1):
        return f"stride {problem.stride} (the Hopper kernel takes stride 1)"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"{problem.dtype} (the Hopper kernel takes 16-bit floats)"
    if problem.channels % 8:
        return f"{problem.channels} input channels, no multiple of 8"
    # Boxes of results, and of a pool's codes in bytes, begin at multiples of 16 bytes, or the device stops.
    whole = 8 if problem.pool is None else 16
    if any(group.filters % whole for group in problem.groups):
        return f"a group whose filters are no multiple of {whole}"
    if filters_per_tile(problem) == 0:
        return "a group of fewer than 16 filters"
    if run_length(problem) not in (1, 3, 5):
        return "groups whose taps do not run 1, 3 or 5 long along one axis"
    return None


def run_length(problem: Problem) -> int:
    """The number of taps that every group has along its rows or along its columns; 0 where there is none."""
    lengths = set.intersection(*({group.height, group.width} for group in problem.groups))
    return max(lengths, default=0)


def filters_per_tile(problem: Problem, limit: int = 128) -> int:
    """Filters of a tile: no more than the smallest group has, few computed twice, and wide products preferred."""
    smallest = min(group.filters for group in problem.groups)
    sizes = [size for size in (256, 128, 64, 32, 16) if size <= min(smallest, limit)]

    def cost(size: int) -> float:
        return filter_tiles(problem, size) * size / min(1.0, 0.55 + 0.15 * (size.bit_length() - 6))

    return min(sizes, key=cost, default=0)


def run_box(problem: Problem, tile: HopperTile) -> Box:
    """A tile's pixels as (run, images, cross): few wasted at the borders, then long runs.

    Images x cross fill whole 8-pixel atoms, so that a shift along the run keeps the swizzle's phase. Where a
    pool follows, two neighbours along the run must lie in one warp: the matrix unit deals pixels to warps in
    sixteens, so they do if an atom is all that stands between them, or a round of all warps.
    """
    pool, pixels = problem.pool is not None, tile.pixels
    powers = [2**i for i in range(pixels.bit_length())]
    boxes = [
        (run, pixels // (run * cross), cross)
        for run in powers
        for cross in powers
        if run * cross <= pixels and pixels // run >= 8
        if not pool or (run > 1 and cross > 1 and pixels // run in (8, 16 * tile.warp_grid[0]))
    ]

    def cost(box: Box) -> tuple[int, int, int]:
        return sum(_boxes_per_group(problem, box)) * -(-problem.batch // box[1]), -box[0], box[1]

    return min(boxes, key=cost)


def default_tile(problem: Problem) -> HopperTile:
    """A tile that suits most layers; `dispatch` measures better ones."""
    filters = filters_per_tile(problem)
    depth = 64 if problem.channels > 32 else 32 if problem.channels > 16 else 16
    parts = 2 if problem.pool is None and filters > 16 else 1
    rings = ((2, 3), (2, 2)) if run_length(problem) > 1 else ((3, 3), (2, 2))
    tiles = [HopperTile(128, filters, depth, 4, boxes, slabs, parts, 2) for boxes, slabs in rings]
    tiles += [HopperTile(128, filters, depth, 4, boxes, slabs, parts, 1) for boxes, slabs in rings]
    return next(tile for tile in tiles if fits(problem, tile))


def box_counts(problem: Problem, box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """Boxes along x and y for groups whose taps run down the rows, and for those along the columns."""
    run, _, cross = box
    height, width = problem.out_height, problem.out_width
    return (-(-width // cross), -(-height // run)), (-(-width // run), -(-height // cross))


def box_total(problem: Problem, box: Box) -> int:
    """Boxes that cover the output whichever way a group's taps run."""
    return max(_boxes_per_group(problem, box)) * -(-problem.batch // box[1])


def _boxes_per_group(problem: Problem, box: Box) -> list[int]:
    rows, turned = box_counts(problem, box)
    taps = run_length(problem)
    return [rows[0] * rows[1] if group.height == taps else turned[0] * turned[1] for group in problem.groups]


def run_rows(problem: Problem, block: int, taps: int) -> tuple[tuple[int, ...], ...]:
    """Per group: first tile, packed row, channel, filters, runs side by side, and the geometry of a run.

    That is the steps of packed rows along and across it, its offsets, and whether it runs along the columns.
    """
    rows, tile, weight, channel = [], 0, 0, 0
    for group in problem.groups:
        turned = group.height != taps
        columns = group.height if turned else group.width
        down, right = group.width * group.filters, group.filters
        along, across = (right, down) if turned else (down, right)
        before, beside = (group.left, group.top) if turned else (group.top, group.left)
        rows.append((tile, weight, channel, group.filters, columns, along, across, before, beside, int(turned)))
        tile += -(-group.filters // block)
        weight += group.taps * group.filters
        channel += group.filters
    return tuple(rows)


def shared_bytes(problem: Problem, tile: HopperTile) -> int:
    """Shared memory of one program: boxes of pixels, slabs of weights, the staged result, barriers."""
    run, images, cross = run_box(problem, tile)
    boxes = tile.boxes * (run + run_length(problem) - 1) * images * cross * tile.depth
    slabs = tile.slabs * tile.filters * tile.depth
    staged = tile.pixels // (1 if problem.pool is None else 4) * tile.filters // tile.parts
    return problem.dtype.itemsize * (boxes + slabs + staged) + 8 * (tile.boxes + tile.slabs)


def fits(problem: Problem, tile: HopperTile) -> bool:
    """Whether the rings agree and all residents fit a multiprocessor, each with a reserved KiB besides its own."""
    if tile.slabs > run_length(problem) * (tile.boxes - 1) + 1 or (tile.parts > 1 and tile.warp_grid[1] > 1):
        return False
    return tile.residents * (shared_bytes(problem, tile) + 1024) <= SHARED
