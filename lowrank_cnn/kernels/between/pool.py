"""Max-pool over channels-last maps, forward and backward.

Layout: maps are [pixels, channels]. A program takes a block of PIXELS x LANES values, so neighbouring threads read
neighbouring channels. The forward loops over the places of the window and keeps one byte per result: the winner's
place in its window.

In the backward each program owns a block of input pixels. A pixel looks up the few windows that cover it, and adds
the gradients of those that it has won. Every value is written once and there are no atomics, so results are
reproducible.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import Pair, blocks_of, empty_maps, pixels_last

VALUES = 1024
"""Values per program: with 128 threads, 16 bytes of bfloat16 per thread and window place."""
UNROLLED = 25
"""Loops over at most this many places or windows are unrolled, so that all their loads run at the same time."""


def pooled_size(size: Sequence[int], kernel: Any, stride: Any, padding: Any, ceil: bool) -> Pair:
    """The number of windows along the rows and columns of [..., height, width] maps.

    Each begins within the image or in the padding before it.
    """
    counts = []
    for side, taps, step, pad in zip(size[-2:], kernel, stride, padding, strict=True):
        count = (side + 2 * pad - taps + (step - 1 if ceil else 0)) // step + 1
        counts.append(count - 1 if ceil and (count - 1) * step >= side + pad else count)
    return counts[0], counts[1]


def window_constants(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> dict[str, Any]:
    return {"KERNEL": tuple(kernel), "STRIDE": tuple(stride), "PADDING": tuple(padding)}


def covering(kernel: Sequence[int], stride: Sequence[int]) -> dict[str, int]:
    """How many windows cover a pixel at most, along the rows and along the columns."""
    return {"ROWS": ceil_div(kernel[0], stride[0]), "COLUMNS": ceil_div(kernel[1], stride[1])}


@triton.jit
def place_in_turn(
    x,  # [N, height, width, TOTAL]
    best, code,  # [PIXELS, LANES]: the largest value so far, and its place in the window
    tap, top, left, base, keep, height, width,
    TOTAL: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
):  # fmt: skip
    """Compare the maximum so far with place `tap` of the window. Ties go to the first; NaN wins."""
    down, right = tap // KERNEL_WIDTH, tap % KERNEL_WIDTH
    row, column = top + down, left + right
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = base + (down * width + right) * TOTAL
    value = tl.load(x + source, mask=keep & inside[:, None], other=float("-inf")).to(tl.float32)
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, tap, code)


@triton.jit
def pool_forward(
    x,  # [N, height, width, TOTAL]
    y,  # [N, result_height, result_width, TOTAL], written
    codes,  # as y, uint8, written: the winner's place in its window, row by row
    pixels, height, width, result_height, result_width,
    TOTAL: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    CODES: tl.constexpr, UNROLL: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Pool a block of result pixels for a block of channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    top = pixel // result_width % result_height * STRIDE[0] - PADDING[0]
    left = pixel % result_width * STRIDE[1] - PADDING[1]
    image = pixel // (result_width * result_height)
    base = ((image * height + top) * width + left)[:, None] * TOTAL + lane[None, :]
    # If all values are minus infinity, the winner is the first place inside the image.
    first = tl.maximum(-top, 0) * KERNEL[1] + tl.maximum(-left, 0)
    code = tl.zeros((PIXELS, LANES), tl.int32) + first[:, None]
    best = tl.full((PIXELS, LANES), float("-inf"), tl.float32)
    if UNROLL:
        for tap in tl.static_range(KERNEL[0] * KERNEL[1]):
            best, code = place_in_turn(
                x, best, code, tap, top, left, base, keep, height, width, TOTAL, KERNEL[1]
            )  # fmt: skip
    else:
        for tap in range(KERNEL[0] * KERNEL[1]):
            best, code = place_in_turn(
                x, best, code, tap, top, left, base, keep, height, width, TOTAL, KERNEL[1]
            )  # fmt: skip
    target = pixel[:, None] * TOTAL + lane[None, :]
    tl.store(y + target, best.to(y.dtype.element_ty), mask=keep)
    if CODES:
        tl.store(codes + target, code.to(tl.uint8), mask=keep)


@triton.jit
def won_from(
    grad, codes,  # [N, result_height, result_width, TOTAL]
    turn, down, right, image, lane, keep, result_height, result_width,
    TOTAL: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient that pixels get from one window that may cover them; `turn` 0 is the last such window.

    `down` and `right` are the pixels' row and column, counted from the border of the padding.
    """
    back, aside = turn // COLUMNS, turn % COLUMNS
    row, column = down // STRIDE[0] - back, right // STRIDE[1] - aside
    from_top, from_left = down % STRIDE[0] + back * STRIDE[0], right % STRIDE[1] + aside * STRIDE[1]
    covers = (row >= 0) & (row < result_height) & (from_top < KERNEL[0])
    covers &= (column >= 0) & (column < result_width) & (from_left < KERNEL[1])
    source = ((image * result_height + row) * result_width + column)[:, None] * TOTAL + lane[None, :]
    seen = keep & covers[:, None]
    code = tl.load(codes + source, mask=seen, other=255).to(tl.int32)
    g = tl.load(grad + source, mask=seen, other=0.0).to(tl.float32)
    return tl.where(code == (from_top * KERNEL[1] + from_left)[:, None], g, 0.0)


@triton.jit
def pool_backward(
    grad, codes,  # [N, result_height, result_width, TOTAL]
    dx,  # [N, height, width, TOTAL], written
    pixels, height, width, result_height, result_width,
    TOTAL: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of input pixels; at most `ROWS` x `COLUMNS` windows cover a pixel."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    down = pixel // width % height + PADDING[0]
    right = pixel % width + PADDING[1]
    image = pixel // (width * height)
    summed = tl.zeros((PIXELS, LANES), tl.float32)
    if UNROLL:
        for turn in tl.static_range(ROWS * COLUMNS):
            summed += won_from(
                grad, codes, turn, down, right, image, lane, keep, result_height, result_width,
                TOTAL, KERNEL, STRIDE, COLUMNS,
            )  # fmt: skip
    else:
        for turn in range(ROWS * COLUMNS):
            summed += won_from(
                grad, codes, turn, down, right, image, lane, keep, result_height, result_width,
                TOTAL, KERNEL, STRIDE, COLUMNS,
            )  # fmt: skip
    target = pixel[:, None] * TOTAL + lane[None, :]
    tl.store(dx + target, summed.to(dx.dtype.element_ty), mask=keep)


def _results(x: Tensor, kernel: Any, stride: Any, padding: Any, ceil: bool, codes: bool) -> tuple[Tensor, Tensor]:
    """Memory for the result and, with `codes`, for the winners' places."""
    size = pooled_size(x.shape, kernel, stride, padding, ceil)
    shape = (x.shape[0], *size, x.shape[1]) if codes else (0,)
    return empty_maps((*x.shape[:2], *size), x), x.new_empty(shape, dtype=torch.uint8)


@operator("max_pool2d", _results)
def max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool, codes: bool
) -> tuple[Tensor, Tensor]:
    """The result, channels-last, and the winners' places [N, H, W, C]; without `codes` the second is empty."""
    y, seen = _results(x, kernel, stride, padding, ceil, codes)
    channels, out = x.shape[1], y.permute(0, 2, 3, 1)
    pixels = y.numel() // channels
    grid, constants = blocks_of(pixels, channels, VALUES)
    pool_forward[grid](
        pixels_last(x), out, seen if codes else out, pixels, *x.shape[2:], *y.shape[2:],
        CODES=codes, UNROLL=kernel[0] * kernel[1] <= UNROLLED, **window_constants(kernel, stride, padding),
        **constants,
    )  # fmt: skip
    return y, seen


@operator("max_pool2d_backward", lambda grad, codes, size, *_: empty_maps((*grad.shape[:2], *size), grad))
def max_pool2d_backward(
    grad: Tensor,
    codes: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The gradient, channels-last, of an input of `size` rows and columns."""
    batch, channels = grad.shape[:2]
    dx = empty_maps((batch, channels, *size), grad)
    pixels, windows = batch * size[0] * size[1], covering(kernel, stride)
    grid, constants = blocks_of(pixels, channels, VALUES)
    pool_backward[grid](
        pixels_last(grad), codes, dx.permute(0, 2, 3, 1), pixels, *size, *grad.shape[2:], **windows,
        UNROLL=windows["ROWS"] * windows["COLUMNS"] <= UNROLLED, **window_constants(kernel, stride, padding),
        **constants,
    )  # fmt: skip
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, kernel, stride, padding, *_ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.options = (list(x.shape[2:]), kernel, stride, padding)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    (codes,) = ctx.saved_tensors
    return (max_pool2d_backward(grad, codes, *ctx.options), None, None, None, None, None)


max_pool2d.register_autograd(_backward, setup_context=_save)
