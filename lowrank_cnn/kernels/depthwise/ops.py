"""Depthwise composites as torch operators, with gradients, fake results for tracing and FLOP counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lowrank_cnn.kernels.conv.copies import launch_copy
from lowrank_cnn.kernels.depthwise import forward, weights
from lowrank_cnn.kernels.depthwise.plan import described
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import empty_maps, pixels_last


def _packed(filters: Sequence[Tensor]) -> Tensor:
    """The weights of all bands as the kernels read them: [taps, channels] of each, in float32."""
    sizes = [own.numel() for own in filters]
    packed = torch.empty(sum(sizes), device=filters[0].device, dtype=torch.float32)
    parts = zip(packed.split(sizes), filters, strict=True)
    views = [part.view(*own.shape[2:], own.shape[0], 1).permute(2, 3, 0, 1) for part, own in parts]
    launch_copy(*filters, targets=views)
    return packed


@operator(
    "depthwise_conv2d",
    lambda x, filters, bias, bands, stride, dilation, size, *_: empty_maps((*x.shape[:2], *size), x),
)
def depthwise_conv2d(
    x: Tensor,
    filters: Sequence[Tensor],
    bias: Tensor | None,
    bands: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
    scale: Tensor | None,
    residual: Tensor | None,
    activation: str,
    slope: float,
) -> Tensor:
    """Filter bands of channels: activation(conv * scale + bias) + residual, channels-last.

    `bands` has five numbers for each band: channels, height, width (0 and 0: passed on), padding above and to the
    left. `filters` are those of the other bands, [channels, 1, height, width]. `size` is that of the result.
    """
    layer = described(x.shape, bands, stride, dilation, size)
    y = empty_maps((*x.shape[:2], *size), x)
    forward.launch(
        pixels_last(x), y.permute(0, 2, 3, 1), _packed(filters) if filters else x, layer, scale=scale, shift=bias,
        residual=None if residual is None else pixels_last(residual), activation=activation, slope=slope,
    )  # fmt: skip
    return y


def _gradients(grad: Any, x: Tensor, filters: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    need_input, need_bias = rest[-2:]
    dx = empty_maps(x.shape, x) if need_input else x.new_empty(0)
    kind = filters[0].dtype if filters else torch.float32
    db = torch.empty(x.shape[1] if need_bias else 0, device=x.device, dtype=kind)
    return [dx, db, *(torch.empty_like(own, memory_format=torch.contiguous_format) for own in filters)]


@operator("depthwise_conv2d_backward", _gradients)
def depthwise_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    filters: Sequence[Tensor],
    bands: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    need_input: bool,
    need_bias: bool,
) -> list[Tensor]:
    """Gradients of the input, the bias and the filters; the first two are empty if not needed."""
    layer = described(x.shape, bands, stride, dilation, grad.shape[2:])
    dx, db, *dw = _gradients(grad, x, filters, need_input, need_bias)
    g = pixels_last(grad)
    if need_input:
        forward.launch(g, dx.permute(0, 2, 3, 1), _packed(filters) if filters else g, layer, back=True)
    if filters or need_bias:
        weights.launch(pixels_last(x), g, layer, dw, db if need_bias else None)
    return [dx, db, *dw]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, filters, bias, *options, _, scale, residual, activation, _ = inputs
    if scale is not None or residual is not None or activation:
        raise NotImplementedError("a depthwise layer has gradients with a bias alone")
    ctx.save_for_backward(x, bias, *filters)
    ctx.options = options


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, bias, *filters = ctx.saved_tensors
    need_input = ctx.needs_input_grad[0]
    dx, db, *dw = depthwise_conv2d_backward(grad, x, filters, *ctx.options, need_input, bias is not None)
    return dx if need_input else None, dw, None if bias is None else db.to(bias.dtype), *[None] * 8


depthwise_conv2d.register_autograd(_backward, setup_context=_save)


def _macs(filters: Sequence[Sequence[int]], out: Sequence[int]) -> int:
    return out[0] * out[2] * out[3] * sum(own[0] * own[2] * own[3] for own in filters)


@register_flop_formula(torch.ops.lowrank.depthwise_conv2d)
def _forward_flops(x, filters, *_, out_shape, **__) -> int:
    """Two operations per MAC, as torch counts."""
    return 2 * _macs(filters, out_shape)


@register_flop_formula(torch.ops.lowrank.depthwise_conv2d_backward)
def _backward_flops(grad, x, filters, bands, stride, dilation, need_input, *_, **__) -> int:
    return (4 if need_input else 2) * _macs(filters, grad)
