"""Batch norm in training with what follows it: y = act((x - mean) rstd weight + bias + residual), channels-last.

Forward: one pass. Backward, with g = dy act'(z), z what the activation is applied to, and n = (x - mean) rstd:

    dbias = sum g        dweight = sum g n        dresidual = g
    dx = weight rstd (g - (dbias + n dweight) / pixels)

is one pass for the two sums and one for dx. z is computed again, so nothing but the inputs is kept. Where g is
needed anyway, as the residual's gradient, the first pass writes it and the second reads it. Results with two
readers (the next conv and the skip around it) come as two, so that the passes add their gradients up on the way.
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.between.affine import activated, affine, of_channels, times_slope
from lowrank_cnn.kernels.between.batch_statistics import VALUES, share_out
from lowrank_cnn.kernels.gpu import on_its_device
from lowrank_cnn.kernels.problem import empty_maps, pixels_last
from lowrank_cnn.kernels.tiles import lanes_of


@triton.jit
def normalise(
    x, residual,  # [pixels, TOTAL]
    y,  # [pixels, TOTAL], written
    mean, rstd, weight, bias,  # [TOTAL]
    pixels, slope,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A block of results for a block of channels."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel[:, None] * TOTAL + lane[None, :]
    z = (tl.load(x + place, mask=keep, other=0.0).to(tl.float32) - m) * r * w + b
    if RESIDUAL:
        z += tl.load(residual + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + place, activated(z, slope, ACTIVATION).to(y.dtype.element_ty), mask=keep)


@triton.jit
def before_activation(
    grad, second, x, residual, place, keep, m, r, w, b, slope,
    SECOND: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Normalised values of a block, and the gradient before the activation."""
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
    """Over a share of the pixels: the gradient's sum, and that of the gradient times the normalised value."""
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
            # The sums are of what is stored, rounded: the second pass takes their means off it.
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
def input_gradient(
    grad, x,  # [pixels, TOTAL]
    dx,  # [pixels, TOTAL], written
    sums,  # [2, TOTAL] float32
    mean, rstd, weight, bias,  # [TOTAL]
    pixels, slope,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A block of the input's gradient: what mean and deviation take away is in `sums`, over all pixels."""
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


@on_its_device
def launch_normalise(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    slope: float,
) -> Tensor:
    """The result, channels-last."""
    y, channels = empty_maps(x.shape, x), x.shape[1]
    pixels, lanes = x.numel() // channels, lanes_of(channels)
    block = VALUES // lanes
    source = pixels_last(x)
    normalise[(-(-pixels // block), -(-channels // lanes))](
        source, source if residual is None else pixels_last(residual), y.permute(0, 2, 3, 1),
        *affine(mean, rstd, weight, bias), pixels, slope,
        TOTAL=channels, WEIGHT=weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        ACTIVATION=activation, PIXELS=block, LANES=lanes, num_warps=4,
    )  # fmt: skip
    return y


@on_its_device
def launch_gradients(
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

    The last is the residual's; it is empty where there is neither a residual nor a second gradient.
    """
    channels = x.shape[1]
    pixels = x.numel() // channels
    store = residual is not None or second is not None
    lanes, block, rounds, shares = share_out(pixels, channels, x.device, VALUES // 2 if store else VALUES)
    tiles = -(-channels // lanes)
    g, source, scales = pixels_last(grad), pixels_last(x), affine(mean, rstd, weight, bias)
    kept = empty_maps(x.shape, x) if store else x.new_empty(0)
    options: dict[str, Any] = {
        "TOTAL": channels, "WEIGHT": weight is not None, "BIAS": bias is not None,
        "PIXELS": block, "LANES": lanes, "num_warps": 4,
    }  # fmt: skip
    parts = torch.empty((2, shares, channels), device=x.device, dtype=torch.float32)
    gradient_sums[(shares, tiles)](
        g, g if second is None else pixels_last(second), source,
        source if residual is None else pixels_last(residual), kept.permute(0, 2, 3, 1) if store else kept,
        parts, *scales, pixels, slope, SECOND=second is not None, RESIDUAL=residual is not None,
        ACTIVATION=activation, STORE=store, ROUNDS=rounds, **options,
    )  # fmt: skip
    sums, dx = parts.sum(1), empty_maps(x.shape, x)
    input_gradient[(-(-pixels // block), tiles)](
        kept.permute(0, 2, 3, 1) if store else g, source, dx.permute(0, 2, 3, 1), sums, *scales, pixels, slope,
        ACTIVATION="" if store else activation, **options,
    )  # fmt: skip
    return dx, sums, kept


@torch.library.custom_op("lowrank::batch_norm_activation", mutates_args=())
def batch_norm_activation(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    slope: float,
) -> Tensor:
    """The input normalised by its statistics, times weight plus bias, plus the residual, activated."""
    return launch_normalise(x, mean, rstd, weight, bias, residual, activation, slope)


@batch_norm_activation.register_fake
def _(x, mean, rstd, weight, bias, residual, activation, slope):
    return empty_maps(x.shape, x)


@torch.library.custom_op("lowrank::batch_norm_activation_backward", mutates_args=())
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
    """Gradients of the input, of bias and weight as [2, C] in float32, and of the residual (see the launcher)."""
    return launch_gradients(grad, second, x, mean, rstd, weight, bias, residual, activation, slope)


@batch_norm_activation_backward.register_fake
def _(grad, second, x, mean, rstd, weight, bias, residual, activation, slope):
    store = residual is not None or second is not None
    kept = empty_maps(x.shape, x) if store else x.new_empty(0)
    return empty_maps(x.shape, x), x.new_empty((2, x.shape[1]), dtype=torch.float32), kept


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, activation, slope = inputs
    ctx.options = (activation, slope)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor | None, second: Tensor | None = None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # asked for once: activation checkpointing computes them then, and lets them go
    *_, weight, bias, residual = saved
    grad, second = (grad, second) if grad is not None else (second, None)
    dx, (db, dw), kept = batch_norm_activation_backward(grad, second, *saved, *ctx.options)
    weight_grad = None if weight is None else dw.to(weight.dtype)
    bias_grad = None if bias is None else db.to(bias.dtype)
    return dx, None, None, weight_grad, bias_grad, None if residual is None else kept, None, None


batch_norm_activation.register_autograd(_backward, setup_context=_save)


class TwiceRead(torch.autograd.Function):
    """`batch_norm_activation` for two readers: it gives the result twice, and takes a gradient from each."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        y = batch_norm_activation(*inputs)
        _save(ctx, inputs, y)
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _backward(ctx, *grads)
