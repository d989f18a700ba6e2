"""Layers of few channels on large maps: neighbouring results of a row share one window, read where it lies.

In [N, H, W, C] memory the pixels of a row that a filter reads are consecutive: 7 taps over 3 channels are 21
values. Four neighbouring results together read hardly more: 30 values. Therefore a *block* of neighbouring
results is one row of the matrix product. The depth of the product is the block's window for every row of taps, and
its width is the results times the filters. The weights form a Toeplitz matrix: a filter appears once per result,
each time shifted by the stride, with zeros around it. The zeros are multiplied as well, but memory limits such
layers, not the tensor cores.

Nothing is gathered, padded or copied. Blocks begin at multiples of a vector, which one instruction loads. A
program is persistent over boxes of blocks, and the weights stay in shared memory. A pixel is read from device
memory about once, and from L1 for the other rows of taps. The weight gradient reads the same windows.
More filters than a product is wide are divided into *pieces*, which other programs compute.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from operator import index
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.conv.equivalent import own_taps
from lowrank_cnn.kernels.conv.tiled import activated, activation_options
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import (
    ConvTensors,
    ForwardKernel,
    Layout,
    Problem,
    TapGroup,
    box_of,
    pixels_last,
    power_above,
    result_and_residual,
)
from lowrank_cnn.kernels.reference import enclosed

MOST_CHANNELS, MOST_LANES = 32, 128
MOST_SHARED = 48 * 1024
"""The most values of the weights and of one box's windows together: 96 KiB of shared memory in 16 bits."""
MOST_SUMS = 28 * 1024
"""The most values of a weight gradient: they stay in registers."""
PROGRAMS = 16
"""Programs of a multiprocessor: more than fit at once, so that all multiprocessors end at about the same time."""


@dataclass(frozen=True)
class ToeplitzTile:
    """Tuned sizes: blocks of a box, warps, and pipeline stages."""

    blocks: int = 64
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Window:
    """A block of `results` results, and `depth` values of each row that it reads, from `before` its begin on.

    Blocks begin `step` values apart. `lanes` is the width of the product: results times the filters of a piece.
    """

    filters: int
    results: int
    step: int
    before: int
    depth: int
    lanes: int

    @property
    def part(self) -> int:
        """Values of one load: a power of two."""
        return min(64, self.depth & -self.depth)


def window_of(problem: Problem) -> Window | None:
    """The window with the least work per result, or None if none fits. It does not depend on the image's size."""
    # Tracers have symbolic sizes, which a cache cannot hold.
    return _window(index(problem.channels), problem.as_dense.groups[0], problem.stride[1])


@lru_cache(maxsize=4096)
def _window(channels: int, group: TapGroup, stride: int) -> Window | None:
    """Work counts the products of a value, its way through shared memory, and its share of a vector's load."""
    best, least = None, float("inf")
    pieces = (group.filters,) if group.filters <= MOST_LANES else (MOST_LANES, MOST_LANES // 2, MOST_LANES // 4)
    for filters, results, vector in product(pieces, (1, 2, 4, 8), (8, 4, 2, 1)):
        step, lanes = results * stride * channels, power_above(results * filters)
        before = round_up(group.left * channels, vector)
        used = step + (group.width - stride - group.left) * channels + before
        depth = round_up(max(used, 1), 16)
        fits = lanes <= MOST_LANES and group.height * depth * (lanes + ToeplitzTile.blocks) <= MOST_SHARED
        work = depth * (lanes + 96 + 256 // vector) / results * ceil_div(group.filters, filters)
        if fits and step % vector == 0 and work < least:
            best, least = Window(filters, results, step, before, depth, lanes), work
    return best


def _parts_of(problem: Problem) -> tuple[Window, TapGroup]:
    """The window, and all groups as one."""
    window, groups = window_of(problem), problem.as_dense.groups
    assert window is not None, "the kernel does not support this problem"
    return window, groups[0]


def _pieces(problem: Problem) -> int:
    return ceil_div(problem.filters, _parts_of(problem)[0].filters)


def _bands(matrix: Tensor, problem: Problem) -> Tensor:
    """A view [pieces, rows of taps, results, values, filters] of the filters in a `pack_toeplitz` matrix."""
    window, group = _parts_of(problem)
    first, step = window.before - group.left * problem.channels, problem.stride[1] * problem.channels
    size = (len(matrix), group.height, window.results, group.width * problem.channels, window.filters)
    row, across = window.depth * window.lanes, step * window.lanes + window.filters
    return matrix.as_strided(size, (group.height * row, row, across, window.lanes, 1), first * window.lanes)


def pack_toeplitz(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """[pieces, rows of taps * depth, lanes]: all groups as one dense filter, once for each result of a block."""
    (window, group), pieces = _parts_of(problem), _pieces(problem)
    matrix = weights[0].new_zeros((pieces, group.height * window.depth, window.lanes), dtype=dtype)
    whole = enclosed(weights, problem.padding)[0].detach().permute(2, 3, 1, 0).flatten(1, 2)
    whole = F.pad(whole, (0, pieces * window.filters - problem.filters)).unflatten(2, (pieces, -1))
    _bands(matrix, problem).copy_(whole.permute(2, 0, 1, 3)[:, :, None])
    return matrix


@triton.jit
def places_of(box, row_boxes, column_boxes, BOX: tl.constexpr, WIDE: tl.constexpr):
    """Image, row and block of every block of a box."""
    m = tl.arange(0, BOX[0] * BOX[1] * BOX[2])
    block = box % column_boxes * BOX[2] + m % BOX[2]
    row = box // column_boxes % row_boxes * BOX[1] + m // BOX[2] % BOX[1]
    image = box // (column_boxes * row_boxes) * BOX[0] + m // (BOX[1] * BOX[2])
    if WIDE:
        image = image.to(tl.int64)
    return image, row, block


@triton.jit
def windows(
    x,  # [batch, height, PITCH]: the channels of a row's pixels
    image, row, block, batch, height,
    TAPS: tl.constexpr, TOP: tl.constexpr, STRIDE: tl.constexpr, PITCH: tl.constexpr, STEP: tl.constexpr,
    BEFORE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """For each row of taps and part of the depth the values [blocks, PART]; zeros outside the image."""
    values = ()
    for tap in tl.static_range(TAPS):
        y = row * STRIDE + (tap - TOP)
        inside = (image < batch) & (y >= 0) & (y < height)
        begin = (image * height + y) * PITCH
        for part in tl.static_range(PARTS):
            along = (block * STEP)[:, None] + (part * PART - BEFORE + tl.arange(0, PART))[None, :]
            keep = inside[:, None] & (along >= 0) & (along < PITCH)
            values = values + (tl.load(x + begin[:, None] + along, mask=keep, other=0.0),)
    return values


@triton.jit
def filters_of(TOTAL: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr):
    """The filter that each lane computes; it may lie beyond the last one."""
    return tl.program_id(1) * PIECE + tl.arange(0, LANES) % PIECE


@triton.jit
def results_of(
    image, row, block, batch, height, width,
    RESULTS: tl.constexpr, TOTAL: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Offsets of the blocks' results [blocks, LANES] in maps whose pixels lie STEP apart, and which exist."""
    lane = tl.arange(0, LANES)
    column = (block * RESULTS)[:, None] + (lane // PIECE)[None, :]
    exists, offset = lane < RESULTS * PIECE, lane
    if PIECE < STEP:
        number = filters_of(TOTAL, LANES, PIECE)
        exists, offset = exists & (number < TOTAL), lane // PIECE * STEP + number
    inside = ((image < batch) & (row < height))[:, None] & (column < width) & exists[None, :]
    return ((image * height + row) * width + block * RESULTS)[:, None] * STEP + offset[None, :], inside


@triton.jit
def composite_toeplitz(
    x,  # [batch, height, values of a row]
    w,  # [pieces, SLABS * PART, lanes], as `pack_toeplitz` lays it
    bias,  # [filters]
    residual,  # [batch, out_height, out_width, filters]
    y,  # [batch, out_height, out_width, filters], written
    batch, height, out_height, out_width, row_boxes, column_boxes,
    SHAPES: tl.constexpr, SLABS: tl.constexpr, BOX: tl.constexpr, ROUNDS: tl.constexpr,
    WIDE: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ADD_LAST: tl.constexpr,
):  # fmt: skip
    """Persistent over boxes. All loads of a box are issued before its first product.

    `SHAPES` are the constants of `windows` and those of `results_of`.
    """
    PART: tl.constexpr = SHAPES[0][7]
    TOTAL: tl.constexpr = SHAPES[1][1]
    LANES: tl.constexpr = SHAPES[1][2]
    lane, k = tl.arange(0, LANES), tl.program_id(1) * SLABS * PART + tl.arange(0, PART)
    slabs = ()
    for slab in tl.static_range(SLABS):
        slabs = slabs + (tl.load(w + (slab * PART + k)[:, None] * LANES + lane[None, :]),)
    if HAS_BIAS:
        number = filters_of(TOTAL, LANES, SHAPES[1][3])
        added = tl.load(bias + number, mask=number < TOTAL, other=0.0).to(tl.float32)
    for turn in range(ROUNDS):
        box = tl.program_id(0) + turn * tl.num_programs(0)
        image, row, block = places_of(box, row_boxes, column_boxes, BOX, WIDE)
        values = windows(x, image, row, block, batch, height, *SHAPES[0])
        out = tl.zeros((BOX[0] * BOX[1] * BOX[2], LANES), tl.float32)
        for slab in tl.static_range(SLABS):
            out = tl.dot(values[slab], slabs[slab], out)
        if HAS_BIAS:
            out += added[None, :]
        place, inside = results_of(image, row, block, batch, out_height, out_width, *SHAPES[1])
        if ADD_LAST:
            out = activated(out, ACTIVATION, SLOPE)
        if HAS_RESIDUAL:
            out += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        if not ADD_LAST:
            out = activated(out, ACTIVATION, SLOPE)
        tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def gradient_and_windows(
    x, grad, seen, box, batch, height, out_height, out_width, row_boxes, column_boxes,
    SHAPES: tl.constexpr, BOX: tl.constexpr, WIDE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """The gradient [blocks, lanes] behind the ReLU, and the windows; zeros beyond the last box."""
    image, row, block = places_of(box, row_boxes, column_boxes, BOX, WIDE)
    place, inside = results_of(image, row, block, batch, out_height, out_width, *SHAPES[1])
    g = tl.load(grad + place, mask=inside, other=0.0)
    if RELU:
        g = tl.where(tl.load(seen + place, mask=inside, other=0.0) > 0, g, 0.0)
    return (g,) + windows(x, image, row, block, batch, height, *SHAPES[0])


@triton.jit
def toeplitz_gradient(
    x,  # [batch, height, values of a row]
    grad, seen,  # [batch, out_height, out_width, filters]: the gradient, and the results of a ReLU
    dw,  # [pieces, SLABS * PART, lanes] float32, added to
    db,  # [pieces, lanes] float32, added to
    batch, height, out_height, out_width, row_boxes, column_boxes,
    SHAPES: tl.constexpr, SLABS: tl.constexpr, BOX: tl.constexpr, ROUNDS: tl.constexpr,
    WIDE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Weight and bias gradients of all results of a block; the next box is loaded while one is multiplied."""
    PART: tl.constexpr = SHAPES[0][7]
    LANES: tl.constexpr = SHAPES[1][2]
    lane, k = tl.arange(0, LANES), tl.program_id(1) * SLABS * PART + tl.arange(0, PART)
    summed = tl.zeros((BOX[0] * BOX[1] * BOX[2], LANES), tl.float32)
    sums = ()
    for _ in tl.static_range(SLABS):
        sums = sums + (tl.zeros((LANES, PART), tl.float32),)
    loaded = gradient_and_windows(
        x, grad, seen, tl.program_id(0), batch, height, out_height, out_width, row_boxes, column_boxes,
        SHAPES, BOX, WIDE, RELU,
    )  # fmt: skip
    for turn in range(ROUNDS):
        ahead = gradient_and_windows(
            x, grad, seen, tl.program_id(0) + (turn + 1) * tl.num_programs(0), batch, height, out_height,
            out_width, row_boxes, column_boxes, SHAPES, BOX, WIDE, RELU,
        )  # fmt: skip
        more = ()
        for slab in tl.static_range(SLABS):
            more = more + (tl.dot(loaded[0].T, loaded[slab + 1], sums[slab]),)
        summed += loaded[0].to(tl.float32)
        loaded, sums = ahead, more
    for slab in tl.static_range(SLABS):
        place = (slab * PART + k)[None, :] * LANES + lane[:, None]
        tl.atomic_add(dw + place, sums[slab], sem="relaxed")
    tl.atomic_add(db + tl.program_id(1) * LANES + lane, tl.sum(summed, 0), sem="relaxed")


def launch_toeplitz(problem: Problem, given: ConvTensors, tile: ToeplitzTile) -> Tensor:
    """Run the kernel on `pack_toeplitz` weights; the result is channels-last."""
    x, packed, bias, _, residual, *_ = given
    pixels, (maps, added) = pixels_last(x), result_and_residual(problem, given)
    result = maps.permute(0, 2, 3, 1)
    grid, sizes, constants = _division(problem, x, tile, PROGRAMS, result.stride(2))
    start(composite_toeplitz, grid)(
        pixels, packed, bias if bias is not None else packed,
        added, result, *sizes, **constants,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ADD_LAST=problem.add_last,
        **activation_options(problem),
    )  # fmt: skip
    return maps


def launch_toeplitz_gradient(
    problem: Problem, pixels: Tensor, grad: Tensor, seen: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the groups' weights and of the bias, in float32, from [N, H, W, filters] `grad` and `seen`."""
    (window, group), pieces = _parts_of(problem), _pieces(problem)
    dw = torch.zeros((pieces, group.height * window.depth, window.lanes), device=pixels.device)
    db = torch.zeros((pieces, window.lanes), device=pixels.device)
    # One stage: the transposed gradient reaches the tensor cores through registers, see `gradients._weight_tile`.
    older = (0, 0) < gpu.capability_of(pixels.device) < (9, 0)  # where larger boxes would spill
    grid, sizes, constants = _division(problem, pixels, ToeplitzTile(16 if older else 32, 8), 2, problem.filters)
    start(toeplitz_gradient, grid)(pixels, grad, seen, dw, db, *sizes, **constants, RELU=problem.relu)
    whole = _bands(dw, problem).sum(2).unflatten(2, (group.width, -1)).permute(0, 4, 3, 1, 2).flatten(0, 1)
    parts = whole[: problem.filters].split([own.filters for own in problem.groups])
    db = db[:, : window.results * window.filters].unflatten(1, (window.results, -1)).sum(1).flatten()
    return own_taps(parts, problem, [group] * len(parts)), db[: problem.filters]


def _division(
    problem: Problem, x: Tensor, tile: ToeplitzTile, programs: int, step: int
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid, the sizes and the constants of both kernels, for so many programs per multiprocessor.

    The pixels of the result lie `step` values apart.
    """
    window, group = _parts_of(problem)
    high, wide = problem.out_height, ceil_div(problem.out_width, window.results)
    box = box_of(problem.batch, high, wide, tile.blocks)
    counts = [ceil_div(size, part) for size, part in zip((problem.batch, high, wide), box, strict=True)]
    boxes, parts, pieces = prod(counts), window.depth // window.part, _pieces(problem)
    grid = min(boxes, ceil_div(programs * gpu.multiprocessors(x.device), pieces))
    largest = problem.batch * max(x[0].numel(), high * problem.out_width * step)
    pitch = problem.width * problem.channels
    read = (group.height, group.top, problem.stride[0], pitch, window.step, window.before, parts, window.part)
    written = (window.results, problem.filters, window.lanes, window.filters, step)
    constants = {
        "SHAPES": (read, written), "SLABS": group.height * parts,
        "BOX": box, "ROUNDS": ceil_div(boxes, grid), "WIDE": largest >= 1 << 31, "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
    return (grid, pieces), (problem.batch, problem.height, high, problem.out_width, *counts[1:]), constants


def _unsupported(problem: Problem) -> str | None:
    if problem.pool is not None:
        return "a pool"
    if problem.channels > MOST_CHANNELS:
        return f"{problem.channels} channels, more than {MOST_CHANNELS}"
    if problem.as_dense.groups[0].taps == 1:
        return "no taps that neighbouring results share"
    return None if window_of(problem) else "windows and weights that do not fit in shared memory"


def gradient_unsupported(problem: Problem) -> str | None:
    """Why `toeplitz_gradient` cannot run a problem, or None if it can."""
    if (reason := _unsupported(problem)) is not None:
        return reason
    window, group = _parts_of(problem)
    many = group.height * window.depth * window.lanes > MOST_SUMS
    return "more sums than the registers hold" if many else None


TILES = (ToeplitzTile(), ToeplitzTile(128), ToeplitzTile(128, 8), ToeplitzTile(stages=2))
TOEPLITZ = ForwardKernel(
    ToeplitzTile,
    lambda problem, capability: TILES,
    _unsupported,
    Layout("toeplitz", pack_toeplitz),
    launch_toeplitz,
)
