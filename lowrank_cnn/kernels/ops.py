"""The fused composite convolution as torch operators, with gradients, shapes for tracing and a count.

`lowrank::composite_conv2d` gives the result and, where a pool is fused and gradients are wanted, the codes of
the windows' winners. Being operators, they pass through torch.compile, CUDA graphs, export and DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lowrank_cnn.kernels.problem import Problem, Sides, describe, empty_codes, empty_result


def flat_padding(padding: Sequence[Sides]) -> list[int]:
    """Padding as an operator takes it: top, bottom, left, right of each group in turn."""
    return [value for rows, columns in padding for value in (*rows, *columns)]


def _problem(
    x: Tensor, weights: Sequence[Tensor], stride: Sequence[int], padding: Sequence[int], relu: bool, pool: str
) -> Problem:
    sides = [((t, b), (lt, r)) for t, b, lt, r in zip(*(padding[i::4] for i in range(4)), strict=True)]
    return describe(x, weights, stride=(stride[0], stride[1]), padding=sides, relu=relu, pool=pool or None)


@torch.library.custom_op("lowrank::composite_conv2d", mutates_args=())
def composite_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    relu: bool,
    pool: str,
    codes: bool,
) -> tuple[Tensor, Tensor]:
    """Result and codes. `pool` is "", "floor" or "ceil"; without `codes` the second is empty."""
    from lowrank_cnn.kernels.autotune import choice
    from lowrank_cnn.kernels.conv import launch

    problem = _problem(x, weights, stride, padding, relu, pool)
    seen = empty_codes(problem, x) if codes else None
    y = launch.forward(choice.plan_for(problem, x.device, training=codes), problem, x, weights, bias, seen)
    return y, seen if seen is not None else x.new_empty(0, dtype=torch.uint8)


@composite_conv2d.register_fake
def _(x, weights, bias, stride, padding, relu, pool, codes):
    problem = _problem(x, weights, stride, padding, relu, pool)
    shape = (problem.batch, *problem.result_size, problem.filters)
    seen = x.new_empty(shape if codes and pool else (0,), dtype=torch.uint8)
    return empty_result(problem, x), seen


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
    """Gradients of input and bias (empty where not needed) and of the weights, in this order."""
    from lowrank_cnn.kernels.conv import launch

    problem = _problem(x, weights, stride, padding, relu, pool)
    how = {"need_input": need_input, "need_bias": need_bias}
    dx, dw, db = launch.gradients(problem, grad.to(x.dtype), x, weights, seen, **how)
    # Copies, for what an operator gives must not share memory, and the groups' gradients lie in one.
    parts = [
        part.to(weight.dtype, copy=True, memory_format=torch.contiguous_format)
        for part, weight in zip(dw, weights, strict=True)
    ]
    needed = [(dx, need_input), (db, need_bias)]
    return [*(t if need and t is not None else x.new_empty(0) for t, need in needed), *parts]


@composite_conv2d_backward.register_fake
def _(grad, x, weights, seen, stride, padding, relu, pool, need_input, need_bias):
    dx = torch.empty_like(x, memory_format=torch.channels_last) if need_input else x.new_empty(0)
    filters = sum(weight.shape[0] for weight in weights)
    db = x.new_empty(filters, dtype=torch.float32) if need_bias else x.new_empty(0)
    return [dx, db, *(w.new_empty(w.shape) for w in weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, bias, stride, padding, relu, pool, _ = inputs
    y, codes = output
    ctx.mark_non_differentiable(codes)
    # Without a ReLU the result is not needed again, and what follows may overwrite it.
    ctx.save_for_backward(x, y if relu and not pool else codes, bias, *weights)
    ctx.options = (stride, padding, relu, pool)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    x, seen, bias, *weights = ctx.saved_tensors
    relu, pool = ctx.options[2:]
    seen = seen.permute(0, 2, 3, 1) if relu and not pool else seen
    need_input = ctx.needs_input_grad[0]
    dx, db, *dw = composite_conv2d_backward(grad, x, weights, seen, *ctx.options, need_input, bias is not None)
    bias_grad = None if bias is None else db.to(bias.dtype)
    return (dx if need_input else None, dw, bias_grad, None, None, None, None, None)


composite_conv2d.register_autograd(_backward, setup_context=_save)


def _macs(x: Sequence[int], weights: Sequence[Sequence[int]], out: Sequence[int], pool: str) -> int:
    pixels = out[0] * out[2] * out[3] * (4 if pool else 1)
    return pixels * sum(filters * channels * height * width for filters, channels, height, width in weights)


@register_flop_formula(torch.ops.lowrank.composite_conv2d)
def _forward_flops(x, weights, bias, stride, padding, relu, pool, codes, *, out_shape, **_) -> int:
    """Two operations per MAC, as torch counts; a fused pool's output stands for four pixels."""
    return 2 * _macs(x, weights, out_shape[0], pool)


@register_flop_formula(torch.ops.lowrank.composite_conv2d_backward)
def _backward_flops(
    grad, x, weights, seen, stride, padding, relu, pool, need_input, need_bias, *, out_shape, **_
) -> int:
    return (4 if need_input else 2) * _macs(x, weights, grad, pool)
