"""How a first layer of stride 2 is divided for `overlap`: strips of rows, tiles of columns, slabs of weights.

With four channels per pixel, two pixels are 16 bytes: a *block*. At stride 2 the windows of neighbouring output
columns begin one block apart. So 64 consecutive blocks of an image's row are a [64, 8] factor of a product: the
first blocks of 64 windows. The 64 blocks that begin one block later are the second blocks of these windows.
Nothing is copied.

A product takes 16 values of each window: a block of one row, and the same block of the row below. A *slab* of the
weights belongs to one such pair of a row offset and a block offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels.conv.hopper_plan import window_filters
from lowrank_cnn.kernels.conv.pack import union_taps
from lowrank_cnn.kernels.problem import OVERLAPPING, Problem

WINDOWS = 64
"""Windows of a product: as many as four warps multiply at once. The last few lack blocks beyond the row."""
PLACES = 4
"""Channels of a padded pixel."""
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


def unsupported(problem: Problem) -> str | None:
    """Why the overlap kernel cannot run a problem, or None if it can."""
    if problem.stride[1] != 2 or problem.residual:
        return "no stride of 2 along the columns, or a residual"
    if problem.pool not in (None, OVERLAPPING):
        return "a pool of 2x2 windows"
    if problem.dtype not in (torch.bfloat16, torch.float16) or problem.channels > PLACES:
        return f"{problem.channels} channels of {problem.dtype} (the overlap kernel takes up to 4 of 16 bits)"
    if problem.filters % 16:
        return f"{problem.filters} filters, no multiple of 16"
    if reach_of(problem).blocks > WINDOWS // 4 or len(slabs_of(problem)) > MOST_SLABS:
        return "taps that span too many columns or rows"
    if problem.out_height < 1 or problem.out_width < 1:
        return "no output at all"
    pixels, results = problem.height * round_up(problem.width, 2), problem.result_size
    if problem.batch * max(PLACES * pixels, problem.filters * results[0] * results[1]) >= 1 << 31:
        return "more values than 32 bits count"
    return None


def tiles_worth_measuring(problem: Problem) -> list[OverlapTile]:
    """Tiles that fit. Short strips fetch and compute more rows twice; long ones leave less memory for others."""
    found = [OverlapTile(4, 2, 2), OverlapTile(8, 2, 2), OverlapTile(4, 2, 3), OverlapTile(2, 2, 4)]
    return [tile for tile in found if tile.residents * (shared_bytes(problem, tile) + 1024) <= 228 * 1024]


def shared_bytes(problem: Problem, tile: OverlapTile) -> int:
    """Bytes of shared memory of one program: strips, slabs, and a buffer to exchange results."""
    filters = window_filters(problem)
    strips = 16 * WINDOWS * (tile.stages * fetched_rows(problem, tile) + 1)
    return strips + 32 * len(slabs_of(problem)) * filters + 4 * WINDOWS * filters + 8 * (tile.stages + 1)


def conv_rows(problem: Problem, tile: OverlapTile) -> int:
    """Rows of the conv that a strip computes; with a pool, two for each result and one before them."""
    return 2 * tile.rows + 1 if problem.pool else tile.rows


def fetched_rows(problem: Problem, tile: OverlapTile) -> int:
    """Rows of the image that a strip reads, in whole fetches; a product reads at least two rows."""
    span = max(2, reach_of(problem).rows)
    return round_up((conv_rows(problem, tile) - 1) * problem.stride[0] + span, FETCHED_ROWS)


def result_columns(problem: Problem) -> int:
    """Result columns of a tile: a row is divided as evenly as whole windows allow."""
    whole = WINDOWS + 1 - reach_of(problem).blocks
    most, width = (whole - 1) // 2 if problem.pool else whole, problem.result_size[1]
    return ceil_div(width, ceil_div(width, most))


def strip_counts(problem: Problem, tile: OverlapTile) -> tuple[int, int]:
    """Strips along the rows of an image, and tiles along its columns."""
    height, width = problem.result_size
    return ceil_div(height, tile.rows), ceil_div(width, result_columns(problem))


def pack_overlap(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """[slabs * filters, 16]: for each slab and filter 2 rows of a block, of 2 pixels with 4 channels each."""
    reach = reach_of(problem)
    size = (reach.rows + 1, 2 * reach.blocks, PLACES, problem.filters)
    around = weights[0].new_zeros(size, dtype=dtype)
    first = 0
    for group, weight in zip(problem.groups, weights, strict=True):
        down, right = -group.top - reach.top, -group.left - 2 * reach.left
        place = around[down : down + group.height, right : right + group.width, : problem.channels]
        place[..., first : first + group.filters] = weight.detach().permute(2, 3, 1, 0)
        first += group.filters
    packed = around.new_zeros((len(slabs_of(problem)), problem.filters, 2, 2 * PLACES))
    for slab, (row, block) in zip(packed, slabs_of(problem), strict=True):
        two = around[row : row + 2, 2 * block : 2 * block + 2].flatten(1, 2)  # [2 rows, 8 values, filters]
        slab.copy_(two.permute(2, 0, 1))
        around[row : row + 2, 2 * block : 2 * block + 2] = 0  # a row that two slabs share counts once
    return packed.view(-1, 4 * PLACES)
