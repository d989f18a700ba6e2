"""The fused composite convolution as torch operators, with gradients, fake results for tracing and FLOP counts.

`lowrank::composite_conv2d` returns the result and, for the gradient of a fused pool, the codes of the windows'
winners. `lowrank::packed_conv2d` is for inference and takes packed weights. Both run the plan that they are given
as text. As operators they work with torch.compile, CUDA graphs, export and DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lowrank_cnn.kernels.conv.pack import copy_groups
from lowrank_cnn.kernels.problem import ConvTensors, Problem, Sides, empty_codes, empty_result, pose
from lowrank_cnn.kernels.reference import enclosure


def flat_padding(padding: Sequence[Sides]) -> list[int]:
    """Padding as an argument of an operator: top, bottom, left, right of each group in turn."""
    return [value for rows, columns in padding for value in (*rows, *columns)]


def _problem(
    x: Tensor,
    shapes: Sequence[Sequence[int]],
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
    return pose(tuple(x.shape), shapes, x.dtype, **how, **epilogue)


def _shapes(weights: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


@torch.library.custom_op("lowrank::composite_conv2d", mutates_args=())
def composite_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    activation: str,
    pool: str,
    codes: bool,
    plan: str,
    add_last: bool,
) -> tuple[Tensor, Tensor]:
    """The result and the codes. `activation` and `pool` are "" for none; without `codes` the second is empty.

    With `add_last` the residual is added after the activation.
    """
    from lowrank_cnn.kernels.conv import forward
    from lowrank_cnn.kernels.conv.plans import KernelPlan

    problem = _problem(x, _shapes(weights), stride, padding, activation, pool, residual, add_last)
    seen = empty_codes(problem, x) if codes else None
    y = forward.run_plan(KernelPlan.parse(plan), problem, x, weights, bias, seen, residual)
    return y, seen if seen is not None else x.new_empty(0, dtype=torch.uint8)


@composite_conv2d.register_fake
def _(x, weights, bias, residual, stride, padding, activation, pool, codes, plan, add_last):
    problem = _problem(x, _shapes(weights), stride, padding, activation, pool, residual, add_last)
    shape = (problem.batch, *problem.result_size, problem.filters)
    seen = x.new_empty(shape if codes and pool else (0,), dtype=torch.uint8)
    return empty_result(problem, x), seen


@torch.library.custom_op("lowrank::packed_conv2d", mutates_args=())
def packed_conv2d(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    shapes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    activation: str,
    pool: str,
    plan: str,
    add_last: bool,
) -> Tensor:
    """The result without gradients, from weights that `pack_weights` packed for the kernel of `plan`.

    `shapes` are the sizes of each group's weights, [filters, channels, height, width], in turn.
    """
    from lowrank_cnn.kernels.conv import forward
    from lowrank_cnn.kernels.conv.plans import KernelPlan

    problem = _problem(x, _unflattened(shapes), stride, padding, activation, pool, residual, add_last)
    return forward.run_packed(KernelPlan.parse(plan), problem, ConvTensors(x, packed, bias, residual=residual))


@packed_conv2d.register_fake
def _(x, packed, bias, residual, shapes, stride, padding, activation, pool, plan, add_last):
    return empty_result(
        _problem(x, _unflattened(shapes), stride, padding, activation, pool, residual, add_last), x
    )


@torch.library.custom_op("lowrank::pack_weights", mutates_args=())
def pack_weights(
    weights: Sequence[Tensor], size: Sequence[int], stride: Sequence[int], padding: Sequence[int], layout: str
) -> Tensor:
    """Weights in the layout of a kernel, for inputs of a size. A compiler that freezes weights runs it once."""
    from lowrank_cnn.kernels.conv import forward

    x = torch.empty(tuple(size), dtype=weights[0].dtype, device="meta")
    problem = _problem(x, _shapes(weights), stride, padding, "", "")
    packed = forward.pack_weights(layout, problem, weights, x.dtype)
    # The result of an operator must not share memory with its arguments.
    shared = packed.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr()
    return packed.clone() if shared else packed


@pack_weights.register_fake
def _(weights, size, stride, padding, layout):
    from lowrank_cnn.kernels.conv import forward

    x = torch.empty(tuple(size), dtype=weights[0].dtype, device="meta")
    problem = _problem(x, _shapes(weights), stride, padding, "", "")
    return weights[0].new_empty(forward.packed_shape(layout, problem))


@torch.library.custom_op("lowrank::composite_conv2d_statistics", mutates_args=())
def composite_conv2d_statistics(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The conv's result with its mean and biased variance per channel in float32."""
    from lowrank_cnn.kernels.conv import forward
    from lowrank_cnn.kernels.conv.plans import KernelPlan

    problem = _problem(x, _shapes(weights), stride, padding, "", "")
    return forward.run_with_statistics(KernelPlan.parse(plan), problem, x, weights, bias)


@composite_conv2d_statistics.register_fake
def _(x, weights, bias, stride, padding, plan):
    problem = _problem(x, _shapes(weights), stride, padding, "", "")
    mean, variance = (x.new_empty(problem.filters, dtype=torch.float32) for _ in range(2))
    return empty_result(problem, x), mean, variance


def _save_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, bias, stride, padding, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, x.new_empty(0, dtype=torch.uint8), bias, *weights)
    ctx.options = (stride, padding, False, "")


def _backward_plain(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    return (*_gradients(ctx, grad), None, None, None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    """The gradients of input, weights and bias, from what an operator has saved."""
    x, seen, bias, *weights = ctx.saved_tensors
    relu, pool = ctx.options[2:]
    seen = seen.permute(0, 2, 3, 1) if relu and not pool else seen
    need_input = ctx.needs_input_grad[0]
    dx, db, *dw = composite_conv2d_backward(grad, x, weights, seen, *ctx.options, need_input, bias is not None)
    return dx if need_input else None, dw, None if bias is None else db.to(bias.dtype)


composite_conv2d_statistics.register_autograd(_backward_plain, setup_context=_save_plain)


def _unflattened(shapes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(shapes[i : i + 4]) for i in range(0, len(shapes), 4)]


@torch.library.custom_op("lowrank::composite_conv2d_backward", mutates_args=())
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
    from lowrank_cnn.kernels.conv.pack import copy_groups

    problem = _problem(x, _shapes(weights), stride, padding, "relu" if relu else "", pool)
    how = {"need_input": need_input, "need_bias": need_bias}
    dx, dw, db = gradients.compute_gradients(problem, grad.to(x.dtype), x, weights, seen, **how)
    # Copies: results of an operator must not share memory, as the groups' gradients do. They get the weights'
    # layout, so that autograd does not copy them again.
    parts = [torch.empty_like(weight) for weight in weights]
    copy_groups(dw, parts)
    needed = [(dx, need_input), (db, need_bias)]
    return [*(t if need and t is not None else x.new_empty(0) for t, need in needed), *parts]


@composite_conv2d_backward.register_fake
def _(grad, x, weights, seen, stride, padding, relu, pool, need_input, need_bias):
    dx = torch.empty_like(x, memory_format=torch.channels_last) if need_input else x.new_empty(0)
    filters = sum(weight.shape[0] for weight in weights)
    db = x.new_empty(filters, dtype=torch.float32) if need_bias else x.new_empty(0)
    return [dx, db, *(torch.empty_like(w) for w in weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, bias, _, stride, padding, activation, pool, *_ = inputs
    y, codes = output
    ctx.mark_non_differentiable(codes)
    # Without a ReLU the result is not kept, and later layers may overwrite it.
    relu = activation == "relu"
    ctx.save_for_backward(x, y if relu and not pool else codes, bias, *weights)
    ctx.options = (stride, padding, relu, pool)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    return (*_gradients(ctx, grad), *[None] * 8)


composite_conv2d.register_autograd(_backward, setup_context=_save)


def _macs(x: Sequence[int], weights: Sequence[Sequence[int]], out: Sequence[int], pool: str) -> int:
    pixels = out[0] * out[2] * out[3] * (4 if pool else 1)
    return pixels * sum(filters * channels * height * width for filters, channels, height, width in weights)


@register_flop_formula(torch.ops.lowrank.composite_conv2d)
def _forward_flops(
    x, weights, bias, residual, stride, padding, activation, pool, codes, plan, add_last, *, out_shape, **_
) -> int:
    """Two operations per MAC, as torch counts; with a fused pool each result takes four pixels."""
    return 2 * _macs(x, weights, out_shape[0], pool)


@register_flop_formula(torch.ops.lowrank.composite_conv2d_statistics)
def _statistics_flops(x, weights, bias, stride, padding, plan, *, out_shape, **_) -> int:
    return 2 * _macs(x, weights, out_shape[0], "")


@register_flop_formula(torch.ops.lowrank.packed_conv2d)
def _packed_flops(
    x, packed, bias, residual, shapes, stride, padding, activation, pool, plan, add_last, *, out_shape, **_
) -> int:
    return 2 * _macs(x, _unflattened(shapes), out_shape, pool)


@register_flop_formula(torch.ops.lowrank.composite_conv2d_backward)
def _backward_flops(
    grad, x, weights, seen, stride, padding, relu, pool, need_input, need_bias, *, out_shape, **_
) -> int:
    return (4 if need_input else 2) * _macs(x, weights, grad, pool)


# Place the weights of all groups in one dense weight, as an operator with a gradient.
#
# A layer that trains as one dense conv does this in every step. For four groups `reference.enclosed` takes a
# dozen small launches, forward and backward; this takes three.


def enclose(weights: Sequence[Tensor], padding: Sequence[Sides]) -> tuple[Tensor, Sides]:
    """As `reference.enclosed`: one dense weight that computes what all filter groups do, and its padding."""
    starts, kernel, sides = enclosure([weight.shape for weight in weights], padding)
    return place_groups(list(weights), [value for start in starts for value in start], list(kernel)), sides


@torch.library.custom_op("lowrank::place_groups", mutates_args=())
def place_groups(weights: Sequence[Tensor], starts: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """[all filters, channels, *kernel]: each group's taps from its (row, column) of `starts` on, zeros around."""
    whole = _empty_whole(weights, kernel).zero_()
    copy_groups(weights, _places(whole, [weight.shape for weight in weights], starts))
    return whole


@place_groups.register_fake
def _(weights, starts, kernel):
    return _empty_whole(weights, kernel)


@torch.library.custom_op("lowrank::take_groups", mutates_args=())
def take_groups(whole: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Each group's part of a dense weight's gradient, with the layout of the tensors in `like`."""
    parts = [torch.empty_like(weight) for weight in like]
    copy_groups(_places(whole, [weight.shape for weight in like], starts), parts)
    return parts


@take_groups.register_fake
def _(whole, like, starts):
    return [torch.empty_like(weight) for weight in like]


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
