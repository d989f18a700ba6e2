"""The composite forward as one implicit matrix product over boxes of pixels, in plain Triton.

Layout: maps are [N, H, W, C] in memory, packed weights [taps * filters, C]. A program computes one box of output
pixels (images x rows x columns) for one tile of FILTERS filters of one group. It loops over the group's taps and
over blocks of DEPTH channels. A tap's pixels are a shifted box of the input, fetched by the tensor memory
accelerator, which fills zeros outside the image: borders need no masks. Programs of one box are neighbours, so
that all but the first read it from L2.

At stride 2 the image [N, H, W, C] is viewed as [N, H/2, 2, W/2, 2C]. A tap then reads a dense box of one row
parity, and its column parity is an offset of C channels: nothing is gathered, and nothing is multiplied by zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.conv.pack import ROWS
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import (
    ConvTensors,
    ForwardKernel,
    Problem,
    blocks_before,
    box_count,
    box_of,
    filter_tiles,
    filters_per_tile,
    first_reason,
    parsed,
    pixels_last,
    power_above,
    result_and_residual,
    starts,
)

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

# Steps after the matrix product, also of the Gluon kernels in `hopper`: activations, and the codes of a pool.


@triton.jit
def gelu(x):
    """x times the normal distribution function at x, to 2e-7, in 11 instructions; erf or a division take as many.

    Below zero the function is two to a power that a polynomial gives; from 6 on it is 0 or 1 in float32.
    """
    far = tl.minimum(tl.abs(x), 6.0, propagate_nan=tl.PropagateNan.ALL)
    power = (-1.51996278e-6 * far + 5.61944325e-5) * far - 0.000896001817
    power = ((power * far + 0.00840691663) * far - 0.053827811) * far - 0.458521515
    power = (power * far - 1.15126014) * far - 0.999990106
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - far * tl.exp2(power)


@triton.jit
def activated(out, ACTIVATION: tl.constexpr, slope):
    """The activation of float32 values; `ACTIVATION` is a name of `kernels.problem.ACTIVATIONS`, "" for none.

    NaN stays NaN. A sigmoid is the square of 1 / sqrt here: an exact division takes ten more instructions.
    """
    if ACTIVATION == "relu":
        out = tl.maximum(out, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "leaky_relu":
        out = tl.where(out < 0, out * slope, out)
    elif ACTIVATION == "silu":
        root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * out))
        out = out * root * root
    elif ACTIVATION == "gelu":
        out = gelu(out)
    elif ACTIVATION == "hardswish":
        out = out * tl.minimum(tl.maximum(out + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return out


@triton.jit
def without_codes(best, CODES: tl.constexpr):
    """Split pooled values from their winners: with `CODES`, the two lowest bits are 3 minus the winner's place.

    The bits are cleared: a zero that kept them would compare as greater than zero.
    """
    bits = best.to(tl.int32, bitcast=True)
    code = 3 - (bits & 3)
    if CODES:
        best = (bits & ~3).to(tl.float32, bitcast=True)
    return best, code


def activation_options(problem: Problem) -> dict[str, Any]:
    """The activation of a problem as constants of a kernel."""
    name, slope = parsed(problem.activation)
    return {"ACTIVATION": name, "SLOPE": slope}


@dataclass(frozen=True)
class Tile:
    """Tuned sizes: pixels and filters of a tile, channels per step, warps and pipeline stages."""

    pixels: int = 128
    filters: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3


@triton.jit
def group_of(tile, GROUPS: tl.constexpr, FILTERS: tl.constexpr):
    """The tile's first filter within its group, and that group's row of `GROUPS`."""
    first, weight, channel, filters, taps, width = 0, 0, 0, 0, 0, 1
    top, top_skip, left, left_skip = 0, 0, 0, 0
    for g in tl.static_range(len(GROUPS)):
        if tile >= GROUPS[g][0]:
            first, weight, channel, filters, taps, width, top, top_skip, left, left_skip = GROUPS[g]
    return (tile - first) * FILTERS, weight, channel, filters, taps, width, top, top_skip, left, left_skip


@triton.jit
def pooled(out, row, column, out_height, out_width, WHOLE: tl.constexpr, CODES: tl.constexpr):
    """The maximum of each 2x2 window; pixels outside the image never win (ceil rounding cuts windows).

    With `CODES`, the two lowest bits of a value hold its place in the window: the maximum then carries the
    winner's.
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
def masked_places(out, image, row, column, channel, left, batch, height, width, total):
    """Offsets of a box in [N, H, W, total], and a mask: inside the image, and one of the group's `left` filters.

    The last filters of a box may belong to the next group, which must not be overwritten.
    """
    n = image + tl.arange(0, out.shape[0])[:, None, None, None]
    y = row + tl.arange(0, out.shape[1])[None, :, None, None]
    x = column + tl.arange(0, out.shape[2])[None, None, :, None]
    f = tl.arange(0, out.shape[3])[None, None, None, :]
    inside = (n < batch) & (y < height) & (x < width) & (f < left)
    return ((n.to(tl.int64) * height + y) * width + x) * total + channel + f, inside


@triton.jit
def store_parts(
    parts,  # [3, boxes, total] float32, written at this box and tile
    plane, out, rest, image, row, column, batch, height, width,
):  # fmt: skip
    """Store count, mean and squared distances of a box's pixels in the image, as in `forward`."""
    n = image + tl.arange(0, out.shape[0])[:, None, None, None]
    y = row + tl.arange(0, out.shape[1])[None, :, None, None]
    x = column + tl.arange(0, out.shape[2])[None, None, :, None]
    inside = (n < batch) & (y < height) & (x < width)
    rows, columns = tl.minimum(height - row, out.shape[1]), tl.minimum(width - column, out.shape[2])
    count = (tl.minimum(batch - image, out.shape[0]) * rows * columns).to(tl.float32)
    values = tl.where(inside, out, 0.0)
    mean = tl.sum(tl.sum(tl.sum(values, 0), 0), 0) / count
    away = tl.where(inside, out - mean[None, None, None, :], 0.0)
    squares = tl.sum(tl.sum(tl.sum(away * away, 0), 0), 0)
    lane = tl.arange(0, out.shape[3])
    tl.store(parts + lane, mean * 0.0 + count, mask=lane < rest)
    tl.store(parts + plane + lane, mean, mask=lane < rest)
    tl.store(parts + 2 * plane + lane, squares, mask=lane < rest)


@triton.jit
def composite_tiled(
    x,  # descriptor of [N, H, W, C], or of [N, H/s, s, W/s, s*C] where STRIDE is not 1
    w,  # descriptor of [taps * filters of all groups, C]
    y,  # descriptor of the result [N, H', W', total]
    r,  # descriptor of the residual [N, H', W', total]
    bias,  # [total]
    residual,  # [N, H', W', total], where boxes are masked
    result,  # [N, H', W', total], where boxes are masked
    codes,  # [N, H', W', total], bytes: the winners of a pool
    parts,  # [3, boxes, total], float32: statistics of the results, see `forward`
    batch, row_boxes, column_boxes, out_height, out_width, height, width,
    total,  # the step from pixel to pixel
    GROUPS: tl.constexpr, TILES: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, POOL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ADD_LAST: tl.constexpr, WHOLE_POOL: tl.constexpr,
    WHOLE_FILTERS: tl.constexpr, CODES: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One box of pixels for one tile of filters; a tap takes `STEPS` steps of `DEPTH` channels.

    Pixels are the second factor of the product. As the first they would go through registers, and on Hopper Triton
    3.6 overwrites registers that a running product still reads.
    """
    # Tiles of one box are neighbours: all but the first find its pixels in L2.
    tile = tl.program_id(0) % TILES
    box = tl.program_id(0) // TILES
    column = box % column_boxes * COLUMNS
    row = box // column_boxes % row_boxes * ROWS
    image = box // (column_boxes * row_boxes) * IMAGES
    offset, weight, channel, filters, taps, across, top, top_skip, left, left_skip = group_of(
        tile, GROUPS, FILTERS
    )
    acc = tl.zeros((FILTERS, IMAGES * ROWS * COLUMNS), tl.float32)
    for step in range(taps * STEPS):
        tap = step // STEPS
        depth = step % STEPS * DEPTH
        down, right = tap // across + top_skip, tap % across + left_skip
        if STRIDE[0] * STRIDE[1] == 1:
            a = x.load([image, row + down - top, column + right - left, depth])
        else:
            y_block, x_block = row + down // STRIDE[0] - top, column + right // STRIDE[1] - left
            a = x.load([image, y_block, down % STRIDE[0], x_block, right % STRIDE[1] * CHANNELS + depth])
        b = w.load([weight + tap * filters + offset, depth])
        acc = tl.dot(b, a.reshape(IMAGES * ROWS * COLUMNS, DEPTH).T, acc)
    out = acc.T.reshape(IMAGES, ROWS, COLUMNS, FILTERS)
    # Bias and a monotone activation keep the order of values. Pooling first leaves them a quarter of the work.
    if POOL:
        out = pooled(out, row, column, out_height, out_width, WHOLE_POOL, CODES)
        row, column = row // 2, column // 2
    out, code = without_codes(out, CODES)
    if HAS_BIAS:
        lane = tl.arange(0, FILTERS)
        added = tl.load(bias + channel + offset + lane, mask=lane < filters - offset, other=0.0)
        out += added.to(tl.float32)[None, None, None, :]
    channel, rest = channel + offset, filters - offset
    if HAS_RESIDUAL:
        # Loaded before the activation and widened after it: the other way round registers spill.
        if WHOLE_FILTERS:
            addend = r.load([image, row, column, channel])
        else:
            place, inside = masked_places(out, image, row, column, channel, rest, batch, height, width, total)
            addend = tl.load(residual + place, mask=inside, other=0.0)
        if ADD_LAST:
            out = activated(out, ACTIVATION, SLOPE) + addend.to(tl.float32)
        else:
            out = activated(out + addend.to(tl.float32), ACTIVATION, SLOPE)
    else:
        out = activated(out, ACTIVATION, SLOPE)
    if CODES:
        if ACTIVATION == "relu":
            code = tl.where(out > 0, code, 4)
        place, inside = masked_places(out, image, row, column, channel, rest, batch, height, width, total)
        tl.store(codes + place, code.to(tl.uint8), mask=inside)
    out = out.to(result.dtype.element_ty)
    if STATISTICS:
        boxes = tl.num_programs(0) // TILES
        store_parts(
            parts + box * total + channel, boxes * total, out.to(tl.float32), rest,
            image, row, column, batch, out_height, out_width,
        )  # fmt: skip
    if WHOLE_FILTERS:
        y.store([image, row, column, channel], out)
    else:
        place, inside = masked_places(out, image, row, column, channel, rest, batch, height, width, total)
        tl.store(result + place, out, mask=inside)


def launch_tiled(problem: Problem, given: ConvTensors, tile: Tile) -> Tensor:
    """Run the kernel on `pack.pack_rows` weights; the result is channels-last."""
    x, packed, bias, codes, residual, parts, _ = given
    pixels, (maps, added) = pixels_last(x), result_and_residual(problem, given)
    result = maps.permute(0, 2, 3, 1)
    pool = problem.pool is not None
    box = box_of(problem.batch, problem.out_height, problem.out_width, tile.pixels, least=2 if pool else 1)
    depth = depth_of(problem, tile)
    images, rows, columns = box
    shrink = 2 if pool else 1
    block = [images, rows // shrink, columns // shrink, tile.filters]
    counts, tiles = box_count(problem, box), filter_tiles(problem, tile.filters)
    start(composite_tiled, (tiles * counts[0] * counts[1] * counts[2],))(
        described_blocks(pixels, problem, box, depth),
        TensorDescriptor.from_tensor(packed, [tile.filters, depth]),
        TensorDescriptor.from_tensor(result, block), TensorDescriptor.from_tensor(added, block),
        bias if bias is not None else packed, added, result, codes if codes is not None else result,
        parts if parts is not None else result, problem.batch, counts[1], counts[2], problem.out_height,
        problem.out_width, *problem.result_size, result.stride(2),
        GROUPS=group_rows(problem, tile.filters), TILES=tiles, IMAGES=images, ROWS=rows,
        COLUMNS=columns, FILTERS=tile.filters, DEPTH=depth, STEPS=ceil_div(problem.channels, depth),
        STRIDE=problem.stride, CHANNELS=problem.channels, POOL=pool, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, ADD_LAST=problem.add_last,
        WHOLE_POOL=problem.pool != "ceil" or problem.even,
        WHOLE_FILTERS=all(group.filters % tile.filters == 0 for group in problem.groups),
        CODES=codes is not None, STATISTICS=parts is not None, **activation_options(problem),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return maps


def group_rows(problem: Problem, block: int) -> tuple[tuple[int, ...], ...]:
    """The groups for tiles of `block` filters, with the fields that `group_of` names.

    A tap `r` rows down reads block row `(r + top_skip) // stride - top` at parity `(r + top_skip) % stride`, where
    `stride` rows make a block. The same holds for columns. At stride 1 the skips are zero.
    """
    tiles = starts(ceil_div(group.filters, block) for group in problem.groups)
    down, across = problem.stride
    return tuple(
        (*place, g.filters, g.taps, g.width, *blocks_before(g.top, down), *blocks_before(g.left, across))
        for *place, g in zip(tiles, starts(problem.rows), problem.begins, problem.groups, strict=True)
    )


def part_count(problem: Problem, tile: Tile) -> int:
    """The number of boxes: each stores one part of the statistics."""
    return prod(box_count(problem, box_of(problem.batch, problem.out_height, problem.out_width, tile.pixels)))


def described_blocks(pixels: Tensor, problem: Problem, box: tuple[int, int, int], depth: int) -> TensorDescriptor:
    """A descriptor of [N, H, W, C] with boxes of output pixels by `depth` channels; see above for strides."""
    (down, across), (images, rows, columns) = problem.stride, box
    if problem.stride == (1, 1):
        return TensorDescriptor.from_tensor(pixels, [images, rows, columns, depth])
    batch, height, width, channels = pixels.shape
    blocks = pixels.view(batch, height // down, down, width // across, across * channels)
    return TensorDescriptor.from_tensor(blocks, [images, rows, 1, columns, depth])


def depth_of(problem: Problem, tile: Tile) -> int:
    """Channels per step. At a stride they divide the pixel's channels: a longer box would reach the next pixel."""
    if problem.stride == (1, 1):
        return min(tile.depth, power_above(problem.channels))
    return min(tile.depth, problem.channels & -problem.channels)


def unsupported(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem, or None if it can."""
    whole = 16 // problem.dtype.itemsize
    uneven = problem.channels % whole or problem.filters % whole
    return f"channels in or out are not a multiple of {whole}" if uneven else stride_unsupported(problem)


def stride_unsupported(problem: Problem) -> str | None:
    """Why the image cannot be viewed as blocks of pixels, or None if it can; also for `hopper`."""
    (down, across), size = problem.stride, f"{problem.height}x{problem.width}"
    checks = {
        f"{problem.channels} channels at stride {problem.stride}, not a multiple of 16": problem.channels % 16,
        f"stride {problem.stride} does not divide {size} pixels": problem.height % down or problem.width % across,
    }
    return first_reason(checks) if problem.stride != (1, 1) else None


OLDER = Tile(64, 64, 32, 4, 3)
"""The tile for GPUs without a tensor memory accelerator: offsets take registers, and larger tiles spill."""
SMALL = (Tile(64, 64, 64, 4, 4), Tile(64, 32, 128, 4, 4), Tile(32, 32, 128, 4, 4))
"""Tiles for problems with too few pixels to fill a GPU with large tiles."""


def tiles(problem: Problem, capability: tuple[int, int]) -> list[Tile]:
    """Tiles no wider than the groups; small ones if large ones would leave most of a GPU idle."""
    older, widest = (0, 0) < capability < (9, 0), max(16, filters_per_tile(problem, 256))
    shapes = (OLDER,) if older else SMALL if problem.is_small else (Tile(),)
    return list(dict.fromkeys(replace(tile, filters=min(tile.filters, widest)) for tile in shapes))


KERNEL = ForwardKernel(Tile, tiles, unsupported, ROWS, launch_tiled, part_count, decides=True)
