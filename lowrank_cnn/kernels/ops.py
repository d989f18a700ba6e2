"""The fused composite convolution as torch operators, with gradients, fake results for tracing and FLOP counts.

`lowrank::composite_conv2d` returns the result and, if asked, the codes of the windows' winners for the gradient of
a fused pool, and statistics for a batch norm. It runs the plan that it is given as text. As an operator it works
with torch.compile, CUDA graphs, export and DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lowrank_cnn.kernels.conv.pack import copy_groups
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import (
    CallOptions,
    ConvTensors,
    Problem,
    Sides,
    describe,
    empty_codes,
    empty_result,
)
from lowrank_cnn.kernels.reference import enclosure


def flat_padding(padding: Sequence[Sides]) -> list[int]:
    """Padding as an argument of an operator: top, bottom, left, right of each group in turn."""
    return [value for rows, columns in padding for value in (*rows, *columns)]


def _problem(
    x: Tensor,
    weights: Sequence[Tensor],
    stride: Sequence[int],
    padding: Sequence[int],
    activation: str,
    pool: str,
    residual: Tensor | None = None,
    add_last: bool = False,
) -> Problem:
    sides = [((t, b), (lt, r)) for t, b, lt, r in zip(*(padding[i::4] for i in range(4)), strict=True)]
    epilogue = {"activation": activation or None, "pool": pool or None, "residual": residual is not None}
    how = {"stride": (stride[0], stride[1]), "padding": sides, "add_last": add_last}
    return describe(x, weights, **how, **epilogue)


def _results(x, weights, packed, bias, residual, stride, padding, activation, pool, add_last, *how):
    codes, statistics, _ = how
    problem = _problem(x, weights, stride, padding, activation, pool, residual, add_last)
    shape = (problem.batch, *problem.result_size, problem.filters) if codes and pool else (0,)
    found = x.new_empty((2, problem.filters) if statistics else (0,), dtype=torch.float32)
    return empty_result(problem, x), x.new_empty(shape, dtype=torch.uint8), found


@operator("composite_conv2d", _results)
def composite_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    packed: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    activation: str,
    pool: str,
    add_last: bool,
    codes: bool,
    statistics: bool,
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, with `codes` those of the pool, and with `statistics` mean and biased variance per channel.

    The last two are empty if they are not asked for; statistics are [2, filters] in float32. `activation` and
    `pool` are "" for none. With `add_last` the residual is added after the activation. `packed`, if given, are the
    weights as `pack_weights` packs them for the kernel of the plan. It is for inference: it gets no gradient.
    """
    from lowrank_cnn.kernels.conv import forward
    from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan

    how = KernelPlan.parse(plan)
    problem = _problem(x, weights, stride, padding, activation, pool, residual, add_last)
    if packed is None:
        packed = KERNELS[how.kernel].layout.pack(weights, problem, x.dtype)
    seen = empty_codes(problem, x) if codes else None
    given = ConvTensors(x, packed, bias, seen, residual)
    found = x.new_empty(0, dtype=torch.float32)
    if statistics:
        y, found = forward.run_with_statistics(how, problem, given)
    else:
        y = forward.run_packed(how, problem, given)
    return y, x.new_empty(0, dtype=torch.uint8) if seen is None else seen, found


def fused_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    packed: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    asked: CallOptions,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator with the options of a call; `how` are `codes`, `statistics` and the plan."""
    sides = flat_padding(asked.padding)
    epilogue = (asked.activation or "", asked.pool or "", asked.add_last)
    return composite_conv2d(x, list(weights), packed, bias, residual, list(asked.stride), sides, *epilogue, *how)


@operator("composite_conv2d_into", lambda *_: None, mutates=("y",))
def composite_conv2d_into(
    y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    activation: str,
    add_last: bool,
    plan: str,
) -> None:
    """Write the result into memory that may be some channels of larger maps."""
    from lowrank_cnn.kernels.conv import forward
    from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan

    how = KernelPlan.parse(plan)
    problem = _problem(x, weights, stride, padding, activation, "", residual, add_last)
    packed = KERNELS[how.kernel].layout.pack(weights, problem, x.dtype)
    forward.run_packed(how, problem, ConvTensors(x, packed, bias, residual=residual, result=y))


def fused_conv2d_into(
    y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    asked: CallOptions,
    plan: str,
) -> None:
    """The operator with the options of a call."""
    how = (list(asked.stride), flat_padding(asked.padding), asked.activation or "", asked.add_last, plan)
    composite_conv2d_into(y, x, list(weights), bias, residual, *how)


def _empty_packed(weights, size, stride, padding, kernel):
    alike = [torch.empty(weight.shape, dtype=weight.dtype, device="meta") for weight in weights]
    return weights[0].new_empty(_packed(alike, size, stride, padding, kernel).shape)


@operator("pack_weights", _empty_packed)
def pack_weights(
    weights: Sequence[Tensor], size: Sequence[int], stride: Sequence[int], padding: Sequence[int], kernel: str
) -> Tensor:
    """Weights in the layout of a kernel, for inputs of a size. A compiler that freezes weights runs it once."""
    packed = _packed(weights, size, stride, padding, kernel)
    # The result of an operator must not share memory with its arguments.
    shared = packed.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
    return packed.clone() if shared else packed


def _packed(
    weights: Sequence[Tensor], size: Sequence[int], stride: Sequence[int], padding: Sequence[int], kernel: str
) -> Tensor:
    from lowrank_cnn.kernels.conv.plans import KERNELS

    x = torch.empty(tuple(size), dtype=weights[0].dtype, device="meta")
    return KERNELS[kernel].layout.pack(weights, _problem(x, weights, stride, padding, "", ""), x.dtype)


def _empty_gradients(grad, x, weights, seen, stride, padding, relu, pool, need_input, need_bias):
    dx = torch.empty_like(x, memory_format=torch.channels_last) if need_input else x.new_empty(0)
    filters = sum(weight.shape[0] for weight in weights)
    db = x.new_empty(filters, dtype=torch.float32) if need_bias else x.new_empty(0)
    return [dx, db, *(torch.empty_like(weight) for weight in weights)]


@operator("composite_conv2d_backward", _empty_gradients)
def composite_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    seen: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
    pool: str,
    need_input: bool,
    need_bias: bool,
) -> list[Tensor]:
    """Gradients of input and bias (empty if not needed) and of the weights, in this order."""
    from lowrank_cnn.kernels.conv import gradients

    problem = _problem(x, weights, stride, padding, "relu" if relu else "", pool)
    how = {"need_input": need_input, "need_bias": need_bias}
    dx, dw, db = gradients.compute_gradients(problem, grad.to(x.dtype), x, weights, seen, **how)
    # Copies: results of an operator must not share memory, as the groups' gradients do. They get the weights'
    # layout, so that autograd does not copy them again.
    parts = [torch.empty_like(weight) for weight in weights]
    copy_groups(dw, parts)
    needed = [(dx, need_input), (db, need_bias)]
    return [*(t if need and t is not None else x.new_empty(0) for t, need in needed), *parts]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weights, _, bias, _, stride, padding, activation, pool, *_ = inputs
    y, codes, _ = output
    ctx.mark_non_differentiable(*output[1:])
    # Without a ReLU the result is not kept, and later layers may overwrite it.
    relu = activation == "relu"
    ctx.save_for_backward(x, y if relu and not pool else codes, bias, *weights)
    ctx.options = (stride, padding, relu, pool)


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    x, seen, bias, *weights = ctx.saved_tensors
    relu, pool = ctx.options[2:]
    seen = seen.permute(0, 2, 3, 1) if relu and not pool else seen
    need_input = ctx.needs_input_grad[0]
    dx, db, *dw = composite_conv2d_backward(grad, x, weights, seen, *ctx.options, need_input, bias is not None)
    return dx if need_input else None, dw, None, None if bias is None else db.to(bias.dtype), *[None] * 9


composite_conv2d.register_autograd(_backward, setup_context=_save)


def _macs(weights: Sequence[Sequence[int]], out: Sequence[int], pool: str) -> int:
    """With a fused pool each result takes four pixels."""
    pixels = out[0] * out[2] * out[3] * (4 if pool else 1)
    return pixels * sum(filters * channels * height * width for filters, channels, height, width in weights)


@register_flop_formula(torch.ops.lowrank.composite_conv2d)
def _forward_flops(
    x, weights, packed, bias, residual, stride, padding, activation, pool, *_, out_shape, **__
) -> int:
    """Two operations per MAC, as torch counts."""
    return 2 * _macs(weights, out_shape[0], pool)


@register_flop_formula(torch.ops.lowrank.composite_conv2d_backward)
def _backward_flops(grad, x, weights, seen, stride, padding, relu, pool, need_input, *_, out_shape, **__) -> int:
    return (4 if need_input else 2) * _macs(weights, grad, pool)


# Place the weights of all groups in one dense weight, as an operator with a gradient.
#
# A layer that trains as one dense conv does this in every step. For four groups `reference.enclosed` takes a
# dozen small launches, forward and backward; this takes three.


def enclose(weights: Sequence[Tensor], padding: Sequence[Sides]) -> tuple[Tensor, Sides]:
    """As `reference.enclosed`: one dense weight equivalent to all filter groups, and its padding."""
    starts, kernel, sides = enclosure([weight.shape for weight in weights], padding)
    return place_groups(list(weights), [value for start in starts for value in start], list(kernel)), sides


@operator("place_groups", lambda weights, starts, kernel: _empty_whole(weights, kernel))
def place_groups(weights: Sequence[Tensor], starts: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """[all filters, channels, *kernel]: each group's taps from its (row, column) of `starts` on, zeros around."""
    whole = _empty_whole(weights, kernel).zero_()
    copy_groups(weights, _places(whole, [weight.shape for weight in weights], starts))
    return whole


@operator("take_groups", lambda whole, like, starts: [torch.empty_like(weight) for weight in like])
def take_groups(whole: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Each group's part of a dense weight's gradient, in the memory layout of `like`."""
    parts = [torch.empty_like(weight) for weight in like]
    copy_groups(_places(whole, [weight.shape for weight in like], starts), parts)
    return parts


def _empty_whole(weights: Sequence[Tensor], kernel: Sequence[int]) -> Tensor:
    """Channels-last, which torch's convs take without a copy."""
    filters = sum(weight.shape[0] for weight in weights)
    shape, kind = (filters, weights[0].shape[1], *kernel), {"dtype": weights[0].dtype, "device": weights[0].device}
    return torch.empty(shape, **kind, memory_format=torch.channels_last)


def _places(whole: Tensor, shapes: Sequence[torch.Size], starts: Sequence[int]) -> list[Tensor]:
    """Views of the groups' taps in a dense weight."""
    parts = whole.split([shape[0] for shape in shapes])
    return [
        part[:, :, top : top + shape[2], left : left + shape[3]]
        for part, shape, top, left in zip(parts, shapes, starts[::2], starts[1::2], strict=True)
    ]


def _save_groups(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, ctx.starts, _ = inputs
    ctx.save_for_backward(*weights)


def _groups_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return take_groups(grad, list(ctx.saved_tensors), ctx.starts), None, None


place_groups.register_autograd(_groups_backward, setup_context=_save_groups)
