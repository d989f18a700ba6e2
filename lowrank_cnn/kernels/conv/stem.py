"""First layers, of few input channels: a kernel that gathers pixels tap by tap, and its weight gradient.

Memory and instructions limit such a layer, not the tensor cores. Layout: maps are [N, H, W, C]. All groups share
one matrix [VALUES, filters] over the union of their taps (see `pack.pack_union`), so the neighbourhood of a pixel
is gathered once for all groups, and fits in one matrix instruction. A program takes PIXELS result pixels and all
filters; each thread holds whole pixels, so a neighbour's value costs one addition, one predicate and one load. A
2x2 pool that follows is the maximum of four products in registers; only pooled pixels are written.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.conv import tiled
from lowrank_cnn.kernels.conv.pack import UNION, union_taps, unpack_union
from lowrank_cnn.kernels.conv.tiled import activated, activation_options, without_codes
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import (
    ConvTensors,
    ForwardKernel,
    Problem,
    pixels_last,
    power_above,
    result_and_residual,
)

MOST_VALUES = 64
"""The most gathered values per pixel: they stay in registers."""


@dataclass(frozen=True)
class StemTile:
    """Tuned sizes: result pixels per program, and warps."""

    pixels: int
    warps: int = 4


def _stem_tiles(problem: Problem, capability: tuple[int, int]) -> list[StemTile]:
    """Tiles whose results fit in the registers beside the gathered values.

    With two warps per program more programs run at once, which hide each other's loads. There is no tile if a
    pixel has enough channels for a matrix product, for which `tiled` is better.
    """
    if problem.channels >= 16 and tiled.unsupported(problem) is None:
        return []
    filters = power_above(problem.filters)
    results = 4096 if len(union_taps(problem.groups)) * problem.channels <= 16 else 2048
    small = [StemTile(min(128, results // filters), 2)] if filters <= 128 else []
    return [*small, StemTile(min(128, 2 * results // filters), 4)]


@triton.jit
def gathered(
    x,  # [N, height, width, CHANNELS]
    base, in_y, in_x, height, width, TAPS: tl.constexpr, CHANNELS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """[pixels, VALUES]: the taps of the union by channels around each pixel; zeros outside the image."""
    values = ()
    for t in tl.static_range(len(TAPS)):
        y, across = in_y + TAPS[t][0], in_x + TAPS[t][1]
        inside = (y >= 0) & (y < height) & (across >= 0) & (across < width)
        away = base + (TAPS[t][0] * width + TAPS[t][1]) * CHANNELS
        for c in tl.static_range(CHANNELS):
            values = values + (tl.load(x + away + c, mask=inside, other=0.0),)
    for _ in tl.static_range(VALUES - len(TAPS) * CHANNELS):
        values = values + (tl.zeros(base.shape, x.dtype.element_ty),)
    # Join the values pairwise until one tensor is left, in an order that ends sorted.
    for _ in tl.static_range(8):
        if len(values) > 1:
            halves = ()
            for i in tl.static_range(len(values) // 2):
                halves = halves + (tl.join(values[i], values[i + len(values) // 2]),)
            values = halves
    return values[0].reshape(base.shape[0], VALUES)


@triton.jit
def composite_stem(
    x,  # [N, H, W, CHANNELS]
    w,  # [VALUES, TOTAL], as `pack.pack_union` lays it
    bias,  # [TOTAL]
    residual,  # [N, H', W', TOTAL]
    y,  # [N, H', W', TOTAL], whose pixels lie STEP apart, as those of the residual
    codes,  # [N, H', W', TOTAL], bytes: the winners of a pool
    pixels, height, width, out_height, out_width, result_height, result_width,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, TOTAL: tl.constexpr, VALUES: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, POOL: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ADD_LAST: tl.constexpr,
    PIXELS: tl.constexpr, FILTERS: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr, WHOLE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """One block of result pixels for all filters; with `CODES` also the winners, as in `tiled.pooled`."""
    lane = tl.arange(0, FILTERS)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    column = pixel % result_width
    row = pixel // result_width % result_height
    image = pixel // (result_width * result_height)
    if WIDE:
        image = image.to(tl.int64)
    k = tl.arange(0, VALUES)
    b = tl.load(w + k[:, None] * TOTAL + lane[None, :], mask=(lane < TOTAL)[None, :], other=0.0)
    for quad in tl.static_range(4 if POOL else 1):
        down = row * 2 + quad // 2 if POOL else row
        right = column * 2 + quad % 2 if POOL else column
        in_y = tl.where(pixel < pixels, down * STRIDE_Y, -1000000)
        base = ((image * height + down * STRIDE_Y) * width + right * STRIDE_X) * CHANNELS
        a = gathered(x, base, in_y, right * STRIDE_X, height, width, TAPS, CHANNELS, VALUES)
        acc = tl.dot(a, b)
        if CODES:
            acc = (acc.to(tl.int32, bitcast=True) & ~3 | 3 - quad).to(tl.float32, bitcast=True)
        if quad == 0:  # the first pixel of every window lies in the image
            best = acc
        else:
            if not WHOLE:
                acc = tl.where(((down < out_height) & (right < out_width))[:, None], acc, -3.0e38)
            best = tl.maximum(best, acc)
    best, code = without_codes(best, CODES)
    if HAS_BIAS:
        best += tl.load(bias + lane, mask=lane < TOTAL, other=0.0).to(tl.float32)[None, :]
    inside = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel.to(tl.int64)[:, None] * STEP + lane[None, :]
    if ADD_LAST:
        best = activated(best, ACTIVATION, SLOPE)
    if HAS_RESIDUAL:
        best += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if not ADD_LAST:
        best = activated(best, ACTIVATION, SLOPE)
    if CODES:
        if ACTIVATION == "relu":
            code = tl.where(best > 0, code, 4)
        tl.store(codes + place, code.to(tl.uint8), mask=inside)
    tl.store(y + place, best.to(y.dtype.element_ty), mask=inside)


@triton.jit
def stem_gradient(
    x,  # [N, height, width, CHANNELS]
    grad, seen,  # [N, result_height, result_width, TOTAL]: the gradient, and codes of a pool or results of a ReLU
    dw,  # [TOTAL, VALUES] float32, added to
    pixels, height, width, result_height, result_width,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, TOTAL: tl.constexpr, VALUES: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, POOL: tl.constexpr, RELU: tl.constexpr,
    PIXELS: tl.constexpr, FILTERS: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Weight and bias gradients: gathers the neighbourhoods again and undoes pool and ReLU on the way.

    The value behind a neighbourhood's last is one, so that its column of the product is the bias gradient.
    """
    lane = tl.arange(0, FILTERS)
    k = tl.arange(0, VALUES)
    acc = tl.zeros((FILTERS, VALUES), tl.float32)
    for turn in range(ROUNDS):
        pixel = (tl.program_id(0) + turn * tl.num_programs(0)) * PIXELS + tl.arange(0, PIXELS)
        column = pixel % result_width
        row = pixel // result_width % result_height
        image = pixel // (result_width * result_height)
        if WIDE:
            image = image.to(tl.int64)
        inside = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
        place = pixel.to(tl.int64)[:, None] * TOTAL + lane[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0)
        if POOL or RELU:
            kept = tl.load(seen + place, mask=inside, other=0)
        for quad in tl.static_range(4 if POOL else 1):
            down = row * 2 + quad // 2 if POOL else row
            right = column * 2 + quad % 2 if POOL else column
            in_y = tl.where(pixel < pixels, down * STRIDE_Y, -1000000)
            base = ((image * height + down * STRIDE_Y) * width + right * STRIDE_X) * CHANNELS
            a = gathered(x, base, in_y, right * STRIDE_X, height, width, TAPS, CHANNELS, VALUES)
            a = tl.where((k == len(TAPS) * CHANNELS)[None, :], 1.0, a)
            part = g
            if POOL:
                part = tl.where(kept == quad, g, 0.0)
            elif RELU:
                part = tl.where(kept > 0, g, 0.0)
            acc = tl.dot(part.T, a.to(g.dtype), acc)
    place = lane[:, None] * VALUES + k[None, :]
    tl.atomic_add(dw + place, acc, mask=(lane < TOTAL)[:, None], sem="relaxed")


def launch_stem(problem: Problem, given: ConvTensors, tile: StemTile) -> Tensor:
    """Run the kernel on `pack.pack_union` weights; the result is channels-last."""
    x, packed, bias, codes, residual, *_ = given
    pixels, (maps, added) = pixels_last(x), result_and_residual(problem, given)
    result = maps.permute(0, 2, 3, 1)
    count = problem.batch * problem.result_size[0] * problem.result_size[1]
    start(composite_stem, (ceil_div(count, tile.pixels),))(
        pixels, packed, bias if bias is not None else packed,
        added, result, codes if codes is not None else result,
        count, problem.height, problem.width, problem.out_height, problem.out_width, *problem.result_size,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ADD_LAST=problem.add_last,
        CODES=codes is not None, WHOLE=problem.pool != "ceil" or problem.even, STEP=result.stride(2),
        **activation_options(problem), num_warps=tile.warps, **_constants(problem, pixels, packed.shape[0], tile),
    )  # fmt: skip
    return maps


def launch_stem_gradient(
    problem: Problem, x: Tensor, grad: Tensor, seen: Tensor, programs: int
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the groups' weights and of the bias, in float32, from [N, H, W, filters] `grad` and `seen`."""
    # With this many filters, the gradients of more pixels would not stay in registers.
    tile, pixels = StemTile(16 if problem.filters > 128 else 32), pixels_last(x)
    count = problem.batch * problem.result_size[0] * problem.result_size[1]
    blocks = ceil_div(count, tile.pixels)
    programs = min(2 * programs, blocks)  # these are small: four share a multiprocessor
    gathered_values = len(union_taps(problem.groups)) * problem.channels
    values = max(16, power_above(gathered_values + 1))
    dw = torch.zeros((problem.filters, values), device=x.device)
    start(stem_gradient, (programs,))(
        pixels, grad, seen, dw, count, problem.height, problem.width, *problem.result_size,
        ROUNDS=ceil_div(blocks, programs), RELU=problem.relu, num_warps=tile.warps,
        **_constants(problem, pixels, values, tile),
    )  # fmt: skip
    return unpack_union(dw, problem), dw[:, gathered_values].contiguous()


def _constants(problem: Problem, pixels: Tensor, values: int, tile: StemTile) -> dict[str, Any]:
    """The constants of both kernels."""
    return {
        "TAPS": tuple(union_taps(problem.groups)),
        "CHANNELS": problem.channels,
        "TOTAL": problem.filters,
        "VALUES": values,
        "STRIDE_Y": problem.stride[0],
        "STRIDE_X": problem.stride[1],
        "POOL": problem.pool is not None,
        "PIXELS": tile.pixels,
        "FILTERS": power_above(problem.filters),
        "WIDE": pixels.numel() >= 1 << 31,
    }


def _stem_unsupported(problem: Problem) -> str | None:
    values = len(union_taps(problem.groups)) * problem.channels
    if values > MOST_VALUES:
        return f"{values} values around a pixel, more than {MOST_VALUES}"
    if problem.filters > 256:
        return f"{problem.filters} filters, more than one program holds"
    return None


STEM = ForwardKernel(StemTile, _stem_tiles, _stem_unsupported, UNION, launch_stem, decides=True)
