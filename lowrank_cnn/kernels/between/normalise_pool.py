"""Batch norm in training with its ReLU and max-pool in one step, as in a ResNet's stem.

The maps between the first conv and the pool are the largest of such a network. Here only the pooled maps are
written. Layout and blocks are those of `pool` and `normalise`.

- Forward: the places of a window are normalised as they are read. Two values are kept per result: the winner's
  place (a byte, `DEAD` if the ReLU cut it) and its value before the norm.
- Backward: the two sums that a norm's gradient needs (see `normalise`) have terms at winners only, so they are
  sums over the pooled maps. Then each input pixel looks up the few windows that cover it. That is the only pass
  over the large maps.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.between.batch_statistics import affine, affine_gradients, of_channels, split_sum
from lowrank_cnn.kernels.between.pool import UNROLLED, VALUES, covering, pooled_size, window_constants, won_from
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import blocks_of, empty_maps, pixels_last

MOST_PLACES = UNROLLED
"""Places of the largest window: loops over them are always unrolled."""
DEAD = tl.constexpr(255)
"""The code of a window whose maximum the ReLU set to zero."""


@triton.jit
def normalise_pool(
    x,  # [N, height, width, TOTAL]
    y,  # [N, result_height, result_width, TOTAL], written
    codes,  # as y, uint8, written: the winner's place in its window, row by row
    won,  # as y, written: the winner's value in x
    mean, rstd, weight, bias,  # [TOTAL]
    pixels, height, width, result_height, result_width,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, CODES: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Normalise and pool a block of results for a block of channels. Ties go to the first; NaN wins."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    top = pixel // result_width % result_height * STRIDE[0] - PADDING[0]
    left = pixel % result_width * STRIDE[1] - PADDING[1]
    image = pixel // (result_width * result_height)
    base = ((image * height + top) * width + left)[:, None] * TOTAL + lane[None, :]
    best = tl.full((PIXELS, LANES), float("-inf"), tl.float32)
    code = tl.full((PIXELS, LANES), DEAD, tl.int32)
    value = tl.zeros((PIXELS, LANES), tl.float32)
    for place in tl.static_range(KERNEL[0] * KERNEL[1]):
        row, column = top + place // KERNEL[1], left + place % KERNEL[1]
        inside = keep & ((row >= 0) & (row < height) & (column >= 0) & (column < width))[:, None]
        source = base + (place // KERNEL[1] * width + place % KERNEL[1]) * TOTAL
        here = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, (here - m) * r * w + b, float("-inf"))
        better = (z > best) | (z != z)
        best = tl.where(better, z, best)
        code = tl.where(better, place, code)
        value = tl.where(better, here, value)
    # The ReLU is monotone, so it may follow the maximum.
    target = pixel[:, None] * TOTAL + lane[None, :]
    dead = best <= 0
    tl.store(y + target, tl.where(dead, 0.0, best).to(y.dtype.element_ty), mask=keep)
    if CODES:
        tl.store(codes + target, tl.where(dead, DEAD, code).to(tl.uint8), mask=keep)
        tl.store(won + target, value.to(won.dtype.element_ty), mask=keep)


@triton.jit
def pooled_sums(
    grad, codes, won,  # [results, TOTAL]: the gradient, the winners' places and their values
    sums,  # [2, shares, TOTAL] float32, written
    mean, rstd,  # [TOTAL]
    results,
    TOTAL: tl.constexpr, ROUNDS: tl.constexpr, RESULTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The sums of g and of g n over this program's results, where g is zero for dead windows."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start = tl.program_id(0) * ROUNDS * RESULTS
    m, r, _, _ = of_channels(mean, rstd, mean, mean, lane, TOTAL, False, False)
    plain = tl.zeros((RESULTS, LANES), tl.float32)
    weighted = tl.zeros((RESULTS, LANES), tl.float32)
    for turn in range(ROUNDS):
        result = start + turn * RESULTS + tl.arange(0, RESULTS)
        keep = (result < results)[:, None] & (lane < TOTAL)[None, :]
        place = result[:, None] * TOTAL + lane[None, :]
        g = tl.load(grad + place, mask=keep, other=0.0).to(tl.float32)
        code = tl.load(codes + place, mask=keep, other=DEAD)
        normed = (tl.load(won + place, mask=keep, other=0.0).to(tl.float32) - m) * r
        g = tl.where(code == DEAD, 0.0, g)
        plain += g
        weighted += g * normed
    target = tl.program_id(0) * TOTAL + lane
    tl.store(sums + target, tl.sum(plain, 0), mask=lane < TOTAL)
    target += tl.num_programs(0) * TOTAL
    tl.store(sums + target, tl.sum(weighted, 0), mask=lane < TOTAL)


@triton.jit
def unpooled_gradient(
    grad, codes,  # [N, result_height, result_width, TOTAL]
    x,  # [N, height, width, TOTAL]
    dx,  # as x, written
    sums,  # [2, TOTAL] float32
    mean, rstd, weight,  # [TOTAL]
    pixels, height, width, result_height, result_width,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of input pixels; at most `ROWS` x `COLUMNS` windows cover a pixel."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    m, r, w, _ = of_channels(mean, rstd, weight, mean, lane, TOTAL, WEIGHT, False)
    plain = tl.load(sums + lane, mask=lane < TOTAL, other=0.0) / pixels
    weighted = tl.load(sums + TOTAL + lane, mask=lane < TOTAL, other=0.0) / pixels
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel[:, None] * TOTAL + lane[None, :]
    normed = (tl.load(x + place, mask=keep, other=0.0).to(tl.float32) - m) * r
    down = pixel // width % height + PADDING[0]
    right = pixel % width + PADDING[1]
    image = pixel // (width * height)
    g = tl.zeros((PIXELS, LANES), tl.float32)
    for turn in tl.static_range(ROWS * COLUMNS):
        g += won_from(
            grad, codes, turn, down, right, image, lane, keep, result_height, result_width,
            TOTAL, KERNEL, STRIDE, COLUMNS,
        )  # fmt: skip
    out = (g - plain[None, :] - normed * weighted[None, :]) * (w * r)
    tl.store(dx + place, out.to(dx.dtype.element_ty), mask=keep)


def _results(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the result and, with `codes`, for the winners' places and values."""
    *window, codes = rest[-5:]
    size = pooled_size(x.shape, *window)
    kept = (x.shape[0], *size, x.shape[1]) if codes else (0,)
    return empty_maps((*x.shape[:2], *size), x), x.new_empty(kept, dtype=torch.uint8), x.new_empty(kept)


@operator("batch_norm_relu_pool", _results)
def batch_norm_relu_pool(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
    codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise, rectify and pool. Returns the result, channels-last, and the winners' places and values.

    Without `codes` the last two are empty.
    """
    y, seen, won = _results(x, kernel, stride, padding, ceil, codes)
    pixels = y.numel() // x.shape[1]
    grid, constants = blocks_of(pixels, x.shape[1], VALUES)
    normalise_pool[grid](
        pixels_last(x), y.permute(0, 2, 3, 1), seen, won, *affine(mean, rstd, weight, bias), pixels,
        *x.shape[2:], *y.shape[2:], WEIGHT=weight is not None, BIAS=bias is not None, CODES=codes,
        **window_constants(kernel, stride, padding), **constants,
    )  # fmt: skip
    return y, seen, won


@operator(
    "batch_norm_relu_pool_backward",
    lambda grad, seen, won, x, *_: (empty_maps(x.shape, x), x.new_empty((2, x.shape[1]), dtype=torch.float32)),
)
def batch_norm_relu_pool_backward(
    grad: Tensor,
    seen: Tensor,
    won: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The gradient of the input, channels-last, and [2, C]: those of bias and weight, in float32."""
    channels = x.shape[1]
    g, results = pixels_last(grad), grad.numel() // channels
    share = split_sum(results, channels, x.device)
    parts = torch.empty((2, share.count, channels), device=x.device, dtype=torch.float32)
    pooled_sums[(share.count, ceil_div(channels, share.lanes))](
        g, seen, won, parts, mean, rstd, results,
        TOTAL=channels, ROUNDS=share.rounds, RESULTS=share.block, LANES=share.lanes, num_warps=4,
    )  # fmt: skip
    sums, dx, pixels = parts.sum(1), empty_maps(x.shape, x), x.numel() // channels
    grid, constants = blocks_of(pixels, channels, VALUES)
    unpooled_gradient[grid](
        g, seen, pixels_last(x), dx.permute(0, 2, 3, 1), sums, *affine(mean, rstd, weight, None)[:3], pixels,
        *x.shape[2:], *grad.shape[2:], WEIGHT=weight is not None, **covering(kernel, stride),
        **window_constants(kernel, stride, padding), **constants,
    )  # fmt: skip
    return dx, sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, kernel, stride, padding, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.options = (kernel, stride, padding)
    ctx.save_for_backward(*output[1:], *tensors)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    *kept, weight, bias = ctx.saved_tensors
    dx, sums = batch_norm_relu_pool_backward(grad, *kept, weight, *ctx.options)
    return dx, None, None, *affine_gradients(sums, weight, bias), *[None] * 5


batch_norm_relu_pool.register_autograd(_backward, setup_context=_save)
