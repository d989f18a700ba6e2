"""The composite forward as one implicit matrix product over boxes of channels-last pixels.

Each program computes one box of output pixels for one tile of filters of one group. The pixels of a tap are a
shifted box of the input, fetched by the tensor memory accelerator, which fills what lies outside the image
with zeros: borders need no masks. Programs of the same box are neighbours, so that the second reads from L2.
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowrank_cnn.kernels.conv.start import start
from lowrank_cnn.kernels.problem import Problem, empty_result, pixels_last
from lowrank_cnn.kernels.tiles import box_count, box_of, filter_tiles, group_rows, power_above


@dataclass(frozen=True)
class Tile:
    """What is tuned: pixels and filters of a tile, channels per step, warps and pipeline stages."""

    pixels: int = 128
    filters: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
def group_of(tile, GROUPS: tl.constexpr, FILTERS: tl.constexpr):
    """The row of `GROUPS` (see `tiles.group_rows`) a tile of filters belongs to, and its offset in the group."""
    first, weight, channel, filters, taps, width, top, left = 0, 0, 0, 0, 0, 1, 0, 0
    for g in tl.static_range(len(GROUPS)):
        if tile >= GROUPS[g][0]:
            first, weight, channel, filters = GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3]
            taps, width, top, left = GROUPS[g][4], GROUPS[g][5], GROUPS[g][6], GROUPS[g][7]
    return (tile - first) * FILTERS, weight, channel, filters, taps, width, top, left


@triton.jit
def pooled(out, row, column, out_height, out_width, WHOLE: tl.constexpr, CODES: tl.constexpr):
    """The maximum of each 2x2 window; pixels outside the image never win (ceil rounding clips windows).

    Where codes are wanted, each value carries its place in the window in its two lowest bits, so that the
    maximum brings the winner's along.
    """
    images: tl.constexpr = out.shape[0]
    rows: tl.constexpr = out.shape[1]
    columns: tl.constexpr = out.shape[2]
    filters: tl.constexpr = out.shape[3]
    down = tl.arange(0, rows)[None, :, None, None]
    right = tl.arange(0, columns)[None, None, :, None]
    if not WHOLE:
        out = tl.where((row + down < out_height) & (column + right < out_width), out, -3.0e38)
    if CODES:
        bits = out.to(tl.int32, bitcast=True) & ~3 | 3 - (down % 2 * 2 + right % 2)
        out = bits.to(tl.float32, bitcast=True)
    quads = out.reshape(images, rows // 2, 2, columns // 2, 2, filters)
    return tl.max(tl.max(quads, 4), 2)


@triton.jit
def store_masked(result, out, image, row, column, channel, left, batch, height, width, total):
    """Write a box whose last filters may lie beyond the group: the next group's channels stay untouched."""
    n = image + tl.arange(0, out.shape[0])[:, None, None, None]
    y = row + tl.arange(0, out.shape[1])[None, :, None, None]
    x = column + tl.arange(0, out.shape[2])[None, None, :, None]
    f = tl.arange(0, out.shape[3])[None, None, None, :]
    inside = (n < batch) & (y < height) & (x < width) & (f < left)
    place = ((n.to(tl.int64) * height + y) * width + x) * total + channel + f
    tl.store(result + place, out, mask=inside)


@triton.jit
def composite_tiled(
    x, w, y, bias, result, codes, batch, row_boxes, column_boxes, out_height, out_width, height, width, total,
    GROUPS: tl.constexpr, TILES: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr,
    HAS_BIAS: tl.constexpr, WHOLE_POOL: tl.constexpr, WHOLE_FILTERS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One box of pixels for one tile of filters; `STEPS` blocks of `DEPTH` channels make up one tap.

    Pixels are the second factor: the first, coming from a block of four axes, would go through registers, where
    Triton 3.6 lets the next step overwrite what a product under way still reads (Hopper).
    """
    tile = tl.program_id(0) % TILES
    box = tl.program_id(0) // TILES
    column = box % column_boxes * COLUMNS
    row = box // column_boxes % row_boxes * ROWS
    image = box // (column_boxes * row_boxes) * IMAGES
    offset, weight, channel, filters, taps, across, top, left = group_of(tile, GROUPS, FILTERS)
    acc = tl.zeros((FILTERS, IMAGES * ROWS * COLUMNS), tl.float32)
    for step in range(taps * STEPS):
        tap = step // STEPS
        depth = step % STEPS * DEPTH
        a = x.load([image, row + tap // across - top, column + tap % across - left, depth])
        b = w.load([weight + tap * filters + offset, depth])
        acc = tl.dot(b, a.reshape(IMAGES * ROWS * COLUMNS, DEPTH).T, acc)
    out = acc.T.reshape(IMAGES, ROWS, COLUMNS, FILTERS)
    if POOL:
        out = pooled(out, row, column, out_height, out_width, WHOLE_POOL, CODES)
        row, column = row // 2, column // 2
    bits = out.to(tl.int32, bitcast=True)
    place = 3 - (bits & 3)
    if CODES:  # with its place left in it, a zero would be above zero
        out = (bits & ~3).to(tl.float32, bitcast=True)
    if HAS_BIAS:
        lane = tl.arange(0, FILTERS)
        added = tl.load(bias + channel + offset + lane, mask=lane < filters - offset, other=0.0)
        out += added.to(tl.float32)[None, None, None, :]
    if RELU:
        out = tl.maximum(out, 0.0)
        place = tl.where(out > 0, place, 4)
    channel, left = channel + offset, filters - offset
    if CODES:
        place = place.to(tl.uint8)
        store_masked(codes, place, image, row, column, channel, left, batch, height, width, total)
    out = out.to(result.dtype.element_ty)
    if WHOLE_FILTERS:
        y.store([image, row, column, channel], out)
    else:
        store_masked(result, out, image, row, column, channel, left, batch, height, width, total)


def launch_tiled(
    problem: Problem,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
    codes: Tensor | None = None,
) -> Tensor:
    """Run the kernel on `pack.pack_rows` weights; the result is channels-last."""
    tile, pixels, maps = tile or Tile(), pixels_last(x), empty_result(problem, x)
    result = maps.permute(0, 2, 3, 1)
    pool = problem.pool is not None
    box = box_of(problem.batch, problem.out_height, problem.out_width, tile.pixels, least=2 if pool else 1)
    depth = min(tile.depth, power_above(problem.channels))
    images, rows, columns = box
    shrink = 2 if pool else 1
    counts, tiles = box_count(problem, box), filter_tiles(problem, tile.filters)
    start(composite_tiled, (tiles * counts[0] * counts[1] * counts[2],))(
        TensorDescriptor.from_tensor(pixels, [images, rows, columns, depth]),
        TensorDescriptor.from_tensor(packed, [tile.filters, depth]),
        TensorDescriptor.from_tensor(result, [images, rows // shrink, columns // shrink, tile.filters]),
        bias if bias is not None else packed, result, codes if codes is not None else result,
        problem.batch, counts[1], counts[2], problem.out_height, problem.out_width, *problem.result_size,
        problem.filters,
        GROUPS=group_rows(problem, tile.filters), TILES=tiles, IMAGES=images, ROWS=rows, COLUMNS=columns,
        FILTERS=tile.filters, DEPTH=depth, STEPS=-(-problem.channels // depth), RELU=problem.relu, POOL=pool,
        HAS_BIAS=bias is not None, WHOLE_POOL=problem.pool != "ceil" or problem.even,
        WHOLE_FILTERS=all(group.filters % tile.filters == 0 for group in problem.groups),
        CODES=codes is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return maps


def unsupported(problem: Problem) -> str | None:
    """Why this kernel cannot take a problem, or None."""
    if problem.stride != (1, 1):
        return f"stride {problem.stride} (the tiled kernel takes stride 1)"
    whole = 16 // problem.dtype.itemsize
    if problem.channels % whole or problem.filters % whole:
        return f"channels in or out are no multiple of {whole}"
    return None
