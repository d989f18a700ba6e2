"""`composite_conv2d`: one composite layer with its epilogue, fused if that is supported and faster, else by torch.

`autotune.choice` decides; in training it may find one dense conv faster. torch.export always records torch's own
convolutions, which run anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels import device as mode
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.problem import OVERLAPPING, CallOptions, Pair, Sides, canonical, describe, is_monotone
from lowrank_cnn.kernels.reference import composite_by_torch, enclosed, followed


def composite_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair = (1, 1),
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    add_last: bool = False,
    packed: Callable[[str, torch.dtype], Tensor] | None = None,
) -> Tensor:
    """One composite layer with its epilogue: fused if that is supported and faster, else by torch.

    The order is conv, bias, residual, activation, pool; with `add_last` the residual follows the activation, as in
    Darknet. `padding` has ((top, bottom), (left, right)) per group.
    `residual` has the size of the conv's result. `activation` is "relu" (`relu=True` for short), "leaky_relu" (or
    with its slope, "leaky_relu:0.1"), "silu", "gelu" or "hardswish". `pool` is "floor" or "ceil" for a 2x2
    max-pool with that rounding, or "3x3/2" for windows of 3x3, stride 2 and padding 1. If weights never change,
    `packed` returns them packed for a kernel and a type; without it they are packed at every call.

        y = composite_conv2d(x, [down, across], bias, padding=[((1, 1), (0, 0)), ((0, 0), (1, 1))],
                             residual=x, activation="silu")
    """
    named = canonical(activation, relu)
    after = add_last and residual is not None and named is not None
    asked = CallOptions(stride, tuple(padding), named, pool, residual is not None, after)
    if not may_fuse(x):
        return _by_torch(x, weights, bias, residual, asked)
    x = under_autocast(x)
    training = needs_gradient(x, *weights, bias, residual)
    inside = _fusable(asked, training=training, same=residual is None or residual.dtype == x.dtype)
    plan = _plan(x, weights, bias, asked, training) if inside == asked else None
    if plan is None and inside.pool == OVERLAPPING:
        inside = asked._replace(pool=None)  # the conv alone may still be fused
    if inside != asked:
        kept, added = (residual, None) if inside.residual else (None, residual)
        y = composite_conv2d(x, weights, bias, **inside.arguments, residual=kept, packed=packed)
        return followed(y, added, None if inside.activation == named else named, pool, add_last=after)
    if plan is None:
        return _by_torch(x, weights, bias, residual, asked)
    if plan == choice.DENSE:
        weight, sides = _ops().enclose(weights, padding)
        return composite_conv2d(x, [weight], bias, **asked._replace(padding=(sides,)).arguments)
    ready = None if packed is None or training else packed(plan.partition("-")[0], x.dtype)
    codes = training and pool is not None
    return _ops().fused_conv2d(x, weights, ready, bias, residual, asked, codes, False, plan)[0]


def composite_conv2d_into(
    y: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    residual: Tensor | None = None,
    activation: str | None = None,
    add_last: bool = False,
) -> None:
    """For inference: the layer's result into `y`, which may be some channels of larger maps."""
    named = canonical(activation)
    after = add_last and residual is not None and named is not None
    asked = CallOptions(stride, tuple(padding), named, None, residual is not None, after)
    alike = x.dtype == y.dtype and (residual is None or residual.dtype == x.dtype)
    plan = _plan(x, weights, bias, asked, False) if alike else None
    if plan is None:
        y.copy_(composite_conv2d(x, weights, bias, **asked.arguments, residual=residual))
    else:
        _ops().fused_conv2d_into(y, x, weights, bias, residual, asked, plan)


def composite_conv2d_with_statistics(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    stride: Pair = (1, 1),
    padding: Sequence[Sides],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One composite layer, with its mean and biased variance per channel for the batch norm after it.

    These are float32, over batch and positions, and have no gradient of their own: the batch norm's backward
    accounts for them. They are None if no kernel of ours runs the layer.
    """
    asked = CallOptions(stride, tuple(padding), None, None, False)
    plan = None
    if may_fuse(x):
        x = under_autocast(x)
        plan = _plan(x, weights, bias, asked, needs_gradient(x, *weights))
    if plan == choice.DENSE:
        weight, sides = _ops().enclose(weights, padding)
        return composite_conv2d_with_statistics(x, [weight], bias, stride=stride, padding=[sides])
    if plan is None:
        return _by_torch(x, weights, bias, None, asked), None, None
    y, _, found = _ops().fused_conv2d(x, weights, None, bias, None, asked, False, True, plan)
    return y, found[0], found[1]


def explain_call(x: Tensor, weights: Sequence[Tensor], *, training: bool = False, **options: Any) -> str:
    """The path that `composite_conv2d` takes for these tensors and the options of `describe`, and why."""
    if not (x.is_cuda or mode.asked_for() or mode.asked_for_dense()):
        return "torch (not on a GPU)"
    return choice.explain(describe(x, weights, **options), x.device, training=training)


def tune(model: torch.nn.Module, example: Tensor, *, training: bool = False) -> None:
    """Measure every plan of every layer a model calls on an example; later runs take the fastest."""
    with mode.tuning(), torch.set_grad_enabled(training):
        choice.prepare(lambda: model(example))
        model(example)


def may_fuse(x: Tensor) -> bool:
    """Whether kernels of ours may run on a tensor: it is on a GPU, and no file is being exported."""
    exporting, asked_for, *_ = _deciders()
    return not exporting() and (x.is_cuda or asked_for())


def under_autocast(x: Tensor) -> Tensor:
    """The tensor in the type that autocast asks for, if it does."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _plan(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, asked: CallOptions, training: bool
) -> str | None:
    """The choice for a call, as `choice.plan_text` gives it."""
    # index() turns symbolic sizes of torch.compile into numbers: the choice is made for one size.
    shapes = tuple(tuple(map(index, tensor.shape)) for tensor in (x, *weights))
    added = None if bias is None else bias.dtype
    return _deciders()[2](shapes, x.dtype, x.device, tuple(asked), training, x.requires_grad, added)


def _ops() -> Any:
    """The operators, registered when they are first used."""
    from lowrank_cnn.kernels import ops

    return ops


def _fusable(asked: CallOptions, *, training: bool, same: bool) -> CallOptions:
    """The part of a layer that one kernel may run; torch does the rest.

    Kernels pool before they activate, which needs a monotone activation and no residual. Gradients exist for bias,
    ReLU and 2x2 pools. A residual of another type would change the type of the sum.
    """
    alone = asked._replace(residual=False, activation=None, pool=None, add_last=False)
    if asked.residual and (training or not same):
        return alone
    if training and asked.activation not in (None, "relu"):
        return alone
    if asked.pool and (
        asked.residual or not is_monotone(asked.activation) or (training and asked.pool == OVERLAPPING)
    ):
        return asked._replace(pool=None)
    return asked


def _by_torch(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, asked: CallOptions
) -> Tensor:
    """The layer by torch; in training as one dense conv if the mode says so. Counts and exports show groups."""
    exporting, _, _, asked_for_dense = _deciders()
    if len(weights) > 1 and not exporting() and needs_gradient(x, *weights) and asked_for_dense():
        weight, sides = enclosed(weights, asked.padding)
        weights, asked = [weight], asked._replace(padding=(sides,))
    return composite_by_torch(x, weights, bias, **asked.arguments, residual=residual)


def _deciders() -> tuple[Any, Any, Any, Any]:
    """The functions that decide, or the constants that replace them while torch.compile traces."""
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels import torch_compile

        chosen = torch_compile.plan_text, torch_compile.asked_for_dense
        return torch_compile.exporting, torch_compile.asked_for, *chosen
    return torch.compiler.is_exporting, mode.asked_for, choice.plan_text, mode.asked_for_dense
