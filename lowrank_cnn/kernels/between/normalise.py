"""Batch norm in training with residual and activation: y = act((x - mean) rstd weight + bias + residual).

With `add_last` the residual is added after the activation: y = act((x - mean) rstd weight + bias) + residual. Its
gradient is then that of y, and the backward is that of a norm without a residual.

Layout: maps are [pixels, channels], channels-last. A program takes a block of pixels by a block of channels; the
values of a channel (mean, rstd, weight, bias) are loaded once per program. The forward is one pass. In the
backward, let z be the activation's input, g = dy act'(z) and n = (x - mean) rstd. Then

    dbias = sum g        dweight = sum g n        dresidual = g
    dx = weight rstd (g - (dbias + n dweight) / pixels)

One pass computes the two sums, a second one dx. Both recompute z, so only the inputs are kept. If g is needed as
the residual's gradient, the first pass stores it and the second reads it. A result with two readers, the next conv
and the skip around it, is returned twice: the passes then add the two gradients as they read them.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.between.batch_statistics import (
    VALUES,
    affine,
    affine_gradients,
    of_channels,
    split_sum,
    times_slope,
)
from lowrank_cnn.kernels.conv.tiled import activated
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import blocks_of, empty_maps, pixels_last


@triton.jit
def normalise(
    x, residual,  # [pixels, TOTAL]
    y,  # [pixels, TOTAL], written
    mean, rstd, weight, bias,  # [TOTAL]
    pixels, slope,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ADD_LAST: tl.constexpr, ACTIVATION: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Normalise, add and activate a block of pixels for a block of channels."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel[:, None] * TOTAL + lane[None, :]
    z = (tl.load(x + place, mask=keep, other=0.0).to(tl.float32) - m) * r * w + b
    if ADD_LAST:
        z = activated(z, ACTIVATION, slope)
    if RESIDUAL:
        z += tl.load(residual + place, mask=keep, other=0.0).to(tl.float32)
    if not ADD_LAST:
        z = activated(z, ACTIVATION, slope)
    tl.store(y + place, z.to(y.dtype.element_ty), mask=keep)


@triton.jit
def before_activation(
    grad, second, x, residual,  # [pixels, TOTAL]
    place, keep, m, r, w, b, slope,
    SECOND: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The normalised values of a block, n, and the gradient before the activation, g."""
    g = tl.load(grad + place, mask=keep, other=0.0).to(tl.float32)
    if SECOND:
        g += tl.load(second + place, mask=keep, other=0.0).to(tl.float32)
    normed = (tl.load(x + place, mask=keep, other=0.0).to(tl.float32) - m) * r
    if ACTIVATION != "":
        z = normed * w + b
        if RESIDUAL:
            z += tl.load(residual + place, mask=keep, other=0.0).to(tl.float32)
        g = times_slope(g, z, slope, ACTIVATION)
    return normed, g


@triton.jit
def gradient_sums(
    grad, second, x, residual,  # [pixels, TOTAL]
    out,  # [pixels, TOTAL], written where `STORE`: the gradient before the activation
    sums,  # [2, shares, TOTAL] float32, written
    mean, rstd, weight, bias,  # [TOTAL]
    pixels, slope,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, SECOND: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, STORE: tl.constexpr, ROUNDS: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The sums of g and of g n over this program's pixels (first pass)."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start = tl.program_id(0) * ROUNDS * PIXELS
    row = tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    plain = tl.zeros((PIXELS, LANES), tl.float32)
    weighted = tl.zeros((PIXELS, LANES), tl.float32)
    for turn in range(ROUNDS):
        pixel = start + turn * PIXELS + row
        keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
        place = pixel[:, None] * TOTAL + lane[None, :]
        normed, g = before_activation(
            grad, second, x, residual, place, keep, m, r, w, b, slope, SECOND, RESIDUAL, ACTIVATION
        )  # fmt: skip
        if STORE:
            # Sum the values as rounded for storage: the second pass subtracts the means from these.
            g = g.to(out.dtype.element_ty)
            tl.store(out + place, g, mask=keep)
            g = g.to(tl.float32)
        plain += g
        weighted += g * normed
    target = tl.program_id(0) * TOTAL + lane
    tl.store(sums + target, tl.sum(plain, 0), mask=lane < TOTAL)
    target += tl.num_programs(0) * TOTAL
    tl.store(sums + target, tl.sum(weighted, 0), mask=lane < TOTAL)


@triton.jit
def norm_gradient(
    grad, x,  # [pixels, TOTAL]
    dx,  # [pixels, TOTAL], written
    sums,  # [2, TOTAL] float32
    mean, rstd, weight, bias,  # [TOTAL]
    pixels, slope,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A block of dx (second pass); `sums` are those of the first pass over all pixels."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    plain = tl.load(sums + lane, mask=lane < TOTAL, other=0.0) / pixels
    weighted = tl.load(sums + TOTAL + lane, mask=lane < TOTAL, other=0.0) / pixels
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel[:, None] * TOTAL + lane[None, :]
    normed, g = before_activation(
        grad, grad, x, x, place, keep, m, r, w, b, slope, False, False, ACTIVATION
    )  # fmt: skip
    out = (g - plain[None, :] - normed * weighted[None, :]) * (w * r)
    tl.store(dx + place, out.to(dx.dtype.element_ty), mask=keep)


@operator("batch_norm_activation", lambda x, *_: empty_maps(x.shape, x))
def batch_norm_activation(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    slope: float,
    add_last: bool,
) -> Tensor:
    """Normalise by the given statistics, scale, shift, add the residual and activate; channels-last.

    With `add_last` the residual is added after the activation.
    """
    y, source, pixels = empty_maps(x.shape, x), pixels_last(x), x.numel() // x.shape[1]
    grid, constants = blocks_of(pixels, x.shape[1], VALUES)
    normalise[grid](
        source, source if residual is None else pixels_last(residual), y.permute(0, 2, 3, 1),
        *affine(mean, rstd, weight, bias), pixels, slope,
        WEIGHT=weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        ADD_LAST=add_last, ACTIVATION=activation, **constants,
    )  # fmt: skip
    return y


def _results(grad: Any, second: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of the backward."""
    residual = rest[4]
    stored = residual is not None or second is not None
    kept = empty_maps(x.shape, x) if stored else x.new_empty(0)
    return empty_maps(x.shape, x), x.new_empty((2, x.shape[1]), dtype=torch.float32), kept


@operator("batch_norm_activation_backward", _results)
def batch_norm_activation_backward(
    grad: Tensor,
    second: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, channels-last, of bias and weight, [2, C] in float32, and before the activation.

    The last is the residual's. It is empty if there is neither a residual nor a `second` reader's gradient.
    """
    channels = x.shape[1]
    pixels, scales = x.numel() // channels, affine(mean, rstd, weight, bias)
    dx, sums, kept = _results(grad, second, x, mean, rstd, weight, bias, residual)
    store = kept.numel() > 0
    share = split_sum(pixels, channels, x.device, VALUES // 2 if store else VALUES)
    tiles = ceil_div(channels, share.lanes)
    g, source = pixels_last(grad), pixels_last(x)
    before = kept.permute(0, 2, 3, 1) if store else kept
    options: dict[str, Any] = {
        "TOTAL": channels, "WEIGHT": weight is not None, "BIAS": bias is not None,
        "PIXELS": share.block, "LANES": share.lanes, "num_warps": 4,
    }  # fmt: skip
    parts = torch.empty((2, share.count, channels), device=x.device, dtype=torch.float32)
    gradient_sums[(share.count, tiles)](
        g, g if second is None else pixels_last(second), source,
        source if residual is None else pixels_last(residual), before,
        parts, *scales, pixels, slope, SECOND=second is not None, RESIDUAL=residual is not None,
        ACTIVATION=activation, STORE=store, ROUNDS=share.rounds, **options,
    )  # fmt: skip
    torch.sum(parts, 1, out=sums)
    norm_gradient[(ceil_div(pixels, share.block), tiles)](
        before if store else g, source, dx.permute(0, 2, 3, 1), sums, *scales, pixels, slope,
        ACTIVATION="" if store else activation, **options,
    )  # fmt: skip
    return dx, sums, kept


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, residual, activation, slope, add_last = inputs
    ctx.options, ctx.added_last = (activation, slope), add_last and residual is not None
    ctx.save_for_backward(*tensors, None if ctx.added_last else residual)


def _backward(ctx: Any, grad: Tensor | None, second: Tensor | None = None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them, then frees them
    *_, weight, bias, residual = saved
    grad, second = (grad, second) if grad is not None else (second, None)
    if ctx.added_last and grad is not None and second is not None:
        grad, second = grad + second, None
    dx, sums, kept = batch_norm_activation_backward(grad, second, *saved, *ctx.options)
    residual_grad = grad if ctx.added_last else None if residual is None else kept
    return dx, None, None, *affine_gradients(sums, weight, bias), residual_grad, None, None, None


batch_norm_activation.register_autograd(_backward, setup_context=_save)


class TwiceRead(torch.autograd.Function):
    """`batch_norm_activation` for two readers: returns the result twice and takes a gradient from each."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        y = batch_norm_activation(*inputs)
        _save(ctx, inputs, y)
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _backward(ctx, *grads)
