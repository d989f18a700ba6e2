"""How problems are divided for the Hopper kernels: runs of taps, boxes of pixels, windows, strips, packed weights.

This file needs no Gluon: plans are made on any machine. The kernels are in `hopper`, `hopper_weights`, `window`
and `overlap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels.conv.pack import ROWS, union_taps
from lowrank_cnn.kernels.conv.tiled import Tile, stride_unsupported
from lowrank_cnn.kernels.problem import (
    OVERLAPPING,
    Box,
    ForwardKernel,
    Layout,
    Pair,
    Problem,
    TapGroup,
    blocks_before,
    filters_per_tile,
    first_reason,
    imported,
    starts,
)

HALVES = (torch.bfloat16, torch.float16)
SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor. Each program takes one KiB more than it asks for."""


@dataclass(frozen=True)
class HopperTile:
    """Tuned sizes: pixels and filters of a tile, channels per step, warps, fetches in flight, parts, programs.

    With zero `slabs`, all weights of a tile of filters stay in shared memory.
    """

    pixels: int = 128
    filters: int = 128
    depth: int = 64
    warps: int = 4
    boxes: int = 2
    slabs: int = 3
    parts: int = 2
    residents: int = 2

    @property
    def weights_stay(self) -> bool:
        return self.slabs == 0

    @property
    def warp_grid(self) -> tuple[int, int]:
        """Warps along the pixels and along the filters; four warps take at most 128 filters."""
        return (self.warps, 1) if self.filters <= 128 else (4, self.warps // 4)


def unsupported(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem, or None if it can."""
    # Boxes of results, and of a pool's codes in bytes, must begin at multiples of 16 bytes, or the device faults.
    whole = 8 if problem.pool is None else 16
    uneven = any(group.filters % whole for group in problem.groups)
    checks = {
        f"{problem.dtype} (the Hopper kernel takes 16-bit floats)": problem.dtype not in HALVES,
        f"{problem.channels} input channels, not a multiple of 8": problem.channels % 8,
        f"a group whose number of filters is not a multiple of {whole}": uneven,
        "a group of fewer than 16 filters": filters_per_tile(problem) == 0,
        "groups whose taps do not run 1, 3 or 5 long along one axis": run_length(problem) not in (1, 3, 5),
    }
    return stride_unsupported(problem) or first_reason(checks)


def is_strided(problem: Problem) -> bool:
    return problem.stride != (1, 1)


def run_length(problem: Problem) -> int:
    """The number of taps that every group has along its rows or along its columns; 0 if there is none.

    At a stride, neighbouring taps do not read neighbouring rows: each tap is a run of its own.
    """
    if is_strided(problem):
        return 1
    lengths = set.intersection(*({group.height, group.width} for group in problem.groups))
    return max(lengths, default=0)


def run_box(problem: Problem, tile: HopperTile) -> Box:
    """A tile's pixels as (run, images, cross): few wasted at the borders, then long runs.

    Images x cross fill whole 8-pixel atoms, so that a shift along the run keeps the swizzle's phase. If a pool
    follows, two neighbours along the run must lie in one warp. The matrix instruction assigns pixels to warps in
    sixteens, so neighbours must be one atom apart, or one round of all warps.
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
        return sum(_boxes_per_group(problem, box)) * ceil_div(problem.batch, box[1]), -box[0], box[1]

    return min(boxes, key=cost)


def default_tile(problem: Problem) -> HopperTile:
    """A tile that suits most layers; tuning finds better ones."""
    filters = filters_per_tile(problem)
    depth = step_depth(problem)
    apart = (1, 2) if problem.residual else (2,)  # only a residual's first part is fetched ahead
    apart = apart if problem.pool is None and filters > 16 else (1,)
    rings = ((2, 3), (2, 2)) if run_length(problem) > 1 else ((3, 3), (2, 2))
    tiles = [
        HopperTile(128, filters, depth, 4, boxes, slabs, parts, residents)
        for residents in (2, 1)
        for parts in apart
        for boxes, slabs in rings
    ]
    return next(tile for tile in tiles if fits(problem, tile))


def step_depth(problem: Problem) -> int:
    """Channels per step. At a stride they divide the pixel's channels: a longer box would reach the next pixel."""
    if is_strided(problem):
        return min(64, problem.channels & -problem.channels)
    return 64 if problem.channels > 32 else 32 if problem.channels > 16 else 16


def is_turned(problem: Problem, group: TapGroup) -> bool:
    """Whether the runs of a group go along the columns."""
    return not is_strided(problem) and group.height != run_length(problem)


def box_counts(problem: Problem, box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """Boxes along x and y, for groups whose taps run along the rows and for those along the columns."""
    run, _, cross = box
    height, width = problem.out_height, problem.out_width
    rows = ceil_div(width, cross), ceil_div(height, run)
    return rows, (ceil_div(width, run), ceil_div(height, cross))


def box_total(problem: Problem, box: Box) -> int:
    """Boxes that cover the output for groups of either direction."""
    return max(_boxes_per_group(problem, box)) * ceil_div(problem.batch, box[1])


def part_count(problem: Problem, tile: HopperTile) -> int:
    """The number of boxes, each of which stores a part of the statistics; 0 if a tile is too small for that."""
    if tile.pixels % (16 * tile.warp_grid[0]) or tile.pixels // tile.parts < 16 * tile.warp_grid[0] // 4:
        return 0
    return box_total(problem, run_box(problem, tile))


def _boxes_per_group(problem: Problem, box: Box) -> list[int]:
    rows, turned = box_counts(problem, box)
    return [turned[0] * turned[1] if is_turned(problem, group) else rows[0] * rows[1] for group in problem.groups]


def run_rows(problem: Problem, block: int) -> tuple[tuple[int, ...], ...]:
    """The groups for tiles of `block` filters, with the fields that `hopper.place_of` names.

    A group has a number of runs of taps side by side. The packed weight rows of neighbouring taps are `along`
    apart, those of neighbouring runs `across`. The first tap lies `before` the output pixel along the run and
    `beside` it across. If `turned`, runs go along the columns. At a stride every tap is a run of its own, numbered
    row by row over `width` columns, and `before` and `beside` count blocks (see `tiled.group_rows` for the skips).
    """
    tiles = starts(ceil_div(group.filters, block) for group in problem.groups)
    places = zip(tiles, starts(problem.rows), problem.begins, problem.groups, strict=True)
    return tuple((*place, group.filters, *_geometry(problem, group)) for *place, group in places)


def _geometry(problem: Problem, group: TapGroup) -> tuple[int, ...]:
    """The fields of a group from the number of its runs on."""
    if is_strided(problem):
        top, top_skip = blocks_before(group.top, problem.stride[0])
        left, left_skip = blocks_before(group.left, problem.stride[1])
        return group.taps, 0, group.filters, top, left, 0, group.width, top_skip, left_skip
    down, right = group.width * group.filters, group.filters
    if is_turned(problem, group):
        return group.height, right, down, group.left, group.top, 1, group.width, 0, 0
    return group.width, down, right, group.top, group.left, 0, group.width, 0, 0


def shared_bytes(problem: Problem, tile: HopperTile) -> int:
    """Bytes of shared memory of one program: boxes of pixels, slabs of weights, the staged result, barriers."""
    run, images, cross = run_box(problem, tile)
    boxes = tile.boxes * (run + run_length(problem) - 1) * images * cross * tile.depth
    slabs = slab_count(problem, tile) * tile.filters * tile.depth
    staged = tile.pixels // (1 if problem.pool is None else 4) * tile.filters // tile.parts
    return problem.dtype.itemsize * (boxes + slabs + staged) + 8 * (tile.boxes + slab_count(problem, tile) + 1)


def slab_count(problem: Problem, tile: HopperTile) -> int:
    """Slabs of weights in shared memory: those in flight, or all of the largest group."""
    return tile.slabs or max(group.taps for group in problem.groups) * ceil_div(problem.channels, tile.depth)


def fits(problem: Problem, tile: HopperTile) -> bool:
    """Whether slabs suit the boxes (see `composite_hopper`), and all residents fit on a multiprocessor."""
    if tile.slabs > run_length(problem) * (tile.boxes - 1) + 1 or (tile.parts > 1 and tile.warp_grid[1] > 1):
        return False
    return tile.residents * (shared_bytes(problem, tile) + 1024) <= SHARED


TILES = ((128, 128, 4, 2), (256, 128, 8, 1), (128, 256, 8, 1), (128, 64, 4, 3), (256, 32, 4, 2), (128, 32, 4, 4))
"""Pixels, filters, warps and resident programs of the tiles worth measuring."""
STAYING = ((128, 128, 4, 2), (128, 64, 4, 2), (256, 64, 4, 2), (256, 32, 4, 2), (128, 32, 4, 3))
"""The same if all weights of a tile stay in shared memory: narrow ones, whose weights are few."""


def hopper_tiles(problem: Problem, capability: tuple[int, int]) -> list[HopperTile]:
    """Small tiles that share a multiprocessor and large ones that do not; of each the deepest ring that fits."""
    if capability[0] != 9 or problem.is_small:
        return []
    narrowest = min(group.filters for group in problem.groups)
    rings = ((2, 2), (2, 3), (2, 4), (3, 5)) if run_length(problem) > 1 else ((2, 2), (3, 3), (4, 4))
    found = [default_tile(problem)]
    kinds = [(sizes, rings) for sizes in TILES] + [(sizes, ((2, 0), (3, 0), (4, 0))) for sizes in STAYING]
    for (pixels, filters, warps, residents), flights in kinds:
        if filters > narrowest or filters < 64 <= narrowest:
            continue
        tiles = [
            HopperTile(pixels, filters, found[0].depth, warps, boxes, slabs, parts, residents)
            for parts in ((1, 2) if problem.pool is None else (1,))
            for boxes, slabs in flights
        ]
        fitting = [tile for tile in tiles if fits(problem, tile)]
        # A residual is fetched ahead as a whole: only tiles in one part can do that.
        whole = [tile for tile in fitting if tile.parts == 1] if problem.residual else []
        found += [*whole[-1:], *fitting[-1:]]
    return list(dict.fromkeys(found))


HOPPER = ForwardKernel(
    HopperTile, hopper_tiles, unsupported, ROWS, imported("hopper", "launch_hopper"), part_count
)


# How the weight gradient is divided for the Hopper kernel: tiles of filters and channels, shares of pixels.

RUNS = (1, 2, 3, 5)
"""Taps of a run. The gradients of all its taps stay in registers; a fetch brings 1, 2 or 4 pixels beyond a box."""


def weights_unsupported(problem: Problem) -> str | None:
    """Why the Hopper kernel cannot compute the weight gradient of a problem, or None if it can."""
    # Boxes of pixels and of the gradient must begin at multiples of 16 bytes, or the device faults.
    uneven = problem.channels % 8 or any(group.filters % 8 or group.filters < 16 for group in problem.groups)
    checks = {
        f"stride {problem.stride}": problem.stride != (1, 1),
        f"{problem.dtype} (the Hopper kernel takes 16-bit floats)": problem.dtype not in HALVES,
        "channels or filters that are not a multiple of 8, or a group of fewer than 16 filters": uneven,
        "groups whose taps do not run 1, 2, 3 or 5 long along one axis": run_length(problem) not in RUNS,
    }
    return first_reason(checks)


def weight_tile(problem: Problem) -> Tile:
    """As many filters as fit in the registers beside the taps, and as many stages as let two programs reside."""
    most = 128 if run_length(problem) <= 3 else 64
    widest = max(group.filters for group in problem.groups)
    filters = next(size for size in (16, 32, 64, 128) if size >= min(widest, most))
    depth = 128 if run_length(problem) == 1 and problem.channels > 64 else 64
    tiles = [Tile(64, filters, depth, 4, stages) for stages in (4, 3, 2)]
    return next(
        tile for tile in tiles if tile.stages == 2 or 2 * (weights_shared_bytes(problem, tile) + 1024) <= SHARED
    )


def weight_box(problem: Problem, tile: Tile) -> Box:
    """The pixels of a step as (run, images, cross). A pool is already undone."""
    return run_box(replace(problem, pool=None), HopperTile(pixels=tile.pixels))


def weights_shared_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of one program: pixels, gradients and a barrier for each stage."""
    run, images, cross = weight_box(problem, tile)
    pixels = (run + run_length(problem) - 1) * images * cross * tile.depth
    return tile.stages * (problem.dtype.itemsize * (pixels + tile.pixels * tile.filters) + 8)


def weight_run_rows(problem: Problem, tile: Tile) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The groups for `hopper_weights`, with the fields that its `part_of` names, and the number of tiles.

    A group's gradient begins at a value. It has runs side by side in columns; neighbouring taps of a run are
    `along` taps apart in memory, neighbouring runs `across`. The rest is as in `run_rows`.
    """
    rows, first = [], 0
    for weight_row, channel, group in zip(starts(problem.rows), problem.begins, problem.groups, strict=True):
        turned = is_turned(problem, group)
        columns = group.height if turned else group.width
        along, across = (1, group.width) if turned else (group.width, 1)
        before, beside = (group.left, group.top) if turned else (group.top, group.left)
        place = (columns, along, across, before, beside, int(turned))
        rows.append((first, problem.channels * weight_row, channel, group.filters, *place))
        first += columns * ceil_div(group.filters, tile.filters) * ceil_div(problem.channels, tile.depth)
    return tuple(rows), first


# How a pooled first layer is divided for `window`: tiles of windows, and weights for the places in a window.
#
# The four pixels of a 2x2 pool read one window of 4x4 pixels. With four channels per pixel a row of the window is
# 16 values, the depth of one matrix instruction. Rows of neighbouring windows begin 16 bytes apart.

WINDOWS = 64
"""Windows of a tile: as many as four warps multiply at once."""
PLACES = 4
"""Pixels of a window's row, and channels of a padded pixel."""
ROWS_READ = 3
SHAPES = ((4, 16), (8, 8), (2, 32))
"""Rows and columns of windows in a tile."""


@dataclass(frozen=True)
class WindowTile:
    """Tuned sizes: tiles in flight, and programs of a multiprocessor."""

    stages: int = 3
    residents: int = 3


def window_unsupported(problem: Problem) -> str | None:
    """Why the window kernel cannot run a problem, or None if it can."""
    cut = problem.pool is None or (problem.pool == "ceil" and not problem.even)
    taps = [place for tap in union_taps(problem.groups) for place in tap]
    checks = {
        "no whole 2x2 windows at stride 1": problem.stride != (1, 1) or cut,
        **_first_layer_checks(problem, "window"),
        "taps beyond the neighbouring pixels": max(map(abs, taps)) > 1,
        "no window at all": 0 in problem.result_size,
        "more values than 32 bits count": PLACES * (problem.batch + 1) * prod(padded_size(problem)) >= 1 << 31,
    }
    return first_reason(checks)


def _first_layer_checks(problem: Problem, kernel: str) -> dict[str, object]:
    few = problem.dtype in HALVES and problem.channels <= PLACES
    return {
        f"{problem.channels} channels of {problem.dtype} (the {kernel} kernel takes up to 4 of 16 bits)": not few,
        f"{problem.filters} filters, not a multiple of 16": problem.filters % 16,
    }


def padded_size(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a padded image: one before, one after, and an even number of columns."""
    rows, columns = problem.result_size
    height, width = max(problem.height, 2 * rows) + 2, max(problem.width, 2 * columns) + 2
    return height, width + width % 2


def window_filters(problem: Problem) -> int:
    return next(size for size in (64, 32, 16) if problem.filters % size == 0)


def window_shape(problem: Problem) -> tuple[int, int]:
    """The shape of a tile that wastes the fewest windows at the borders."""
    rows, columns = problem.result_size
    return min(SHAPES, key=lambda shape: ceil_div(rows, shape[0]) * ceil_div(columns, shape[1]))


def tile_counts(problem: Problem) -> tuple[int, int]:
    """Tiles of windows along the rows and the columns of an image."""
    (rows, columns), (height, width) = window_shape(problem), problem.result_size
    return ceil_div(height, rows), ceil_div(width, columns)


def _placed(weights: Sequence[Tensor], problem: Problem, size: Pair, first: Pair, dtype: torch.dtype) -> Tensor:
    """[*size, 4, filters]: the taps of all groups from the row and column `first` on, and zeros between them."""
    around = weights[0].new_zeros((*size, PLACES, problem.filters), dtype=dtype)
    for group, begin, weight in zip(problem.groups, problem.begins, weights, strict=True):
        down, right = -group.top - first[0], -group.left - first[1]
        place = around[down : down + group.height, right : right + group.width, : problem.channels]
        place[..., begin : begin + group.filters] = weight.detach().permute(2, 3, 1, 0)
    return around


def pack_windows(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """[2 * 3 * filters, 16]: for each column of the pool, row of taps and filter, 4 places by 4 channels."""
    rows = _placed(weights, problem, (ROWS_READ, ROWS_READ), (-1, -1), dtype).permute(0, 3, 1, 2)
    packed = rows.new_zeros((2, ROWS_READ, problem.filters, PLACES, PLACES))
    for column in range(2):
        packed[column, :, :, column : column + ROWS_READ] = rows
    return packed.view(-1, PLACES * PLACES)


def unpack_windows(dw: Tensor, problem: Problem) -> tuple[list[Tensor], Tensor]:
    """The groups' [filters, channels, height, width] and the bias gradient, from gradients as in `pack_windows`.

    The bias gradient is that of the channel of ones (see `pad_channels`) at the middle tap.
    """
    packed = dw.view(2, ROWS_READ, problem.filters, PLACES, PLACES)
    around = packed[0, :, :, :ROWS_READ] + packed[1, :, :, 1:]
    parts = around.permute(1, 3, 0, 2).split([group.filters for group in problem.groups])
    found = [
        part[:, : problem.channels, 1 - g.top : 1 - g.top + g.height, 1 - g.left : 1 - g.left + g.width]
        for part, g in zip(parts, problem.groups, strict=True)
    ]
    return found, around[1, :, 1, problem.channels].contiguous()


WINDOW = ForwardKernel(
    WindowTile,
    lambda problem, capability: [WindowTile()] if capability[0] == 9 else [],
    window_unsupported,
    Layout("windows", pack_windows),
    imported("window", "launch_window"),
)


# How a first layer of stride 2 is divided for `overlap`: strips of rows, tiles of columns, slabs of weights.
#
# With four channels per pixel, two pixels are 16 bytes: a *block*. At stride 2 the windows of neighbouring output
# columns begin one block apart. Therefore 64 consecutive blocks of an image's row are a [64, 8] factor of a matrix
# product: the first blocks of 64 windows. The 64 blocks that begin one block later are the second blocks of these
# windows. Nothing is copied.
#
# A product takes 16 values of each window: a block of one row, and the same block of the row below. A *slab* of
# the weights belongs to one such pair of a row offset and a block offset. The last few of the 64 windows lack
# blocks beyond the row.

FETCHED_ROWS = 8
"""Rows of one fetch."""
MOST_SLABS = 40


@dataclass(frozen=True)
class OverlapTile:
    """Tuned sizes: result rows of a strip, strips in flight, and programs of a multiprocessor."""

    rows: int = 4
    stages: int = 2
    residents: int = 2


@dataclass(frozen=True)
class Reach:
    """The rows and blocks that windows read, relative to their output pixel: the first, and how many."""

    top: int
    left: int
    rows: int
    blocks: int


def reach_of(problem: Problem) -> Reach:
    rows, columns = zip(*union_taps(problem.groups), strict=True)
    blocks = [column // 2 for column in columns]
    return Reach(min(rows), min(blocks), max(rows) - min(rows) + 1, max(blocks) - min(blocks) + 1)


def slabs_of(problem: Problem) -> list[tuple[int, int]]:
    """The (row, block) that each product begins at, counted from the first row and block that any tap reads."""
    reach, found = reach_of(problem), []
    used = {(row - reach.top, column // 2 - reach.left) for row, column in union_taps(problem.groups)}
    for block in range(reach.blocks):
        rows = sorted(row for row, other in used if other == block)
        while rows:
            first = max(0, min(rows[0], reach.rows - 2))
            found.append((first, block))
            rows = [row for row in rows if row > first + 1]
    return found


def overlap_unsupported(problem: Problem) -> str | None:
    """Why the overlap kernel cannot run a problem, or None if it can."""
    wide = reach_of(problem).blocks > WINDOWS // 4 or len(slabs_of(problem)) > MOST_SLABS
    read = PLACES * problem.height * round_up(problem.width, 2)
    written = problem.filters * prod(problem.result_size)
    checks = {
        "no stride of 2 along the columns, or a residual": problem.stride[1] != 2 or problem.residual,
        "a pool of 2x2 windows": problem.pool not in (None, OVERLAPPING),
        **_first_layer_checks(problem, "overlap"),
        "taps that span too many columns or rows": wide,
        "no output at all": min(problem.out_height, problem.out_width) < 1,
        "more values than 32 bits count": problem.batch * max(read, written) >= 1 << 31,
    }
    return first_reason(checks)


def overlap_tiles(problem: Problem, capability: tuple[int, int]) -> list[OverlapTile]:
    """Tiles that fit. Short strips fetch and compute more rows twice; long ones leave less memory for others."""
    found = [OverlapTile(4, 2, 2), OverlapTile(8, 2, 2), OverlapTile(4, 2, 3), OverlapTile(2, 2, 4)]
    fitting = [tile for tile in found if tile.residents * (overlap_bytes(problem, tile) + 1024) <= SHARED]
    return fitting if capability[0] == 9 else []


def overlap_bytes(problem: Problem, tile: OverlapTile) -> int:
    """Bytes of shared memory of one program: strips, slabs, and a buffer to exchange results."""
    filters = window_filters(problem)
    strips = 16 * WINDOWS * (tile.stages * fetched_rows(problem, tile) + 1)
    return strips + 32 * len(slabs_of(problem)) * filters + 4 * WINDOWS * filters + 8 * (tile.stages + 1)


def fetched_rows(problem: Problem, tile: OverlapTile) -> int:
    """Rows of the image that a strip reads, in whole fetches; a product reads at least two rows."""
    rows = 2 * tile.rows + 1 if problem.pool else tile.rows  # of the conv: a pool reads one before its first two
    return round_up((rows - 1) * problem.stride[0] + max(2, reach_of(problem).rows), FETCHED_ROWS)


def result_columns(problem: Problem) -> int:
    """Result columns of a tile: a row is divided as evenly as whole windows allow."""
    whole = WINDOWS + 1 - reach_of(problem).blocks
    most, width = (whole - 1) // 2 if problem.pool else whole, problem.result_size[1]
    return ceil_div(width, ceil_div(width, most))


def pack_overlap(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """[slabs * filters, 16]: for each slab and filter 2 rows of a block, of 2 pixels with 4 channels each."""
    reach = reach_of(problem)
    size, first = (reach.rows + 1, 2 * reach.blocks), (reach.top, 2 * reach.left)
    around = _placed(weights, problem, size, first, dtype)
    packed = around.new_zeros((len(slabs_of(problem)), problem.filters, 2, 2 * PLACES))
    for slab, (row, block) in zip(packed, slabs_of(problem), strict=True):
        two = around[row : row + 2, 2 * block : 2 * block + 2].flatten(1, 2)  # [2 rows, 8 values, filters]
        slab.copy_(two.permute(2, 0, 1))
        around[row : row + 2, 2 * block : 2 * block + 2] = 0  # a row that two slabs share counts once
    return packed.view(-1, 4 * PLACES)


OVERLAP = ForwardKernel(
    OverlapTile,
    overlap_tiles,
    overlap_unsupported,
    Layout("overlaps", pack_overlap),
    imported("overlap", "launch_overlap"),
)
