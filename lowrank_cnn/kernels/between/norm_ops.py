"""Batch norm with ReLU as torch operators: the statistics, which update the running ones, and the result.

Two operators, since one that changes its arguments cannot have a gradient in torch. The gradient of the result
counts the statistics as functions of the input, which they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels.between import norm
from lowrank_cnn.kernels.problem import empty_maps


@torch.library.custom_op("lowrank::batch_norm_statistics", mutates_args=("running_mean", "running_var", "tracked"))
def batch_norm_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of a batch per channel; the running ones and their count are brought up."""
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    return norm.launch_statistics(x, running, tracked, momentum, eps)


@batch_norm_statistics.register_fake
def _(x, running_mean, running_var, tracked, momentum, eps):
    return tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("lowrank::batch_norm_relu", mutates_args=())
def batch_norm_relu(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    """The normalised input times weight plus bias, rectified where asked for."""
    return norm.launch_normalise(x, mean, rstd, weight, bias, relu)


@batch_norm_relu.register_fake
def _(x, mean, rstd, weight, bias, relu):
    return empty_maps(x.shape, x)


@torch.library.custom_op("lowrank::batch_norm_relu_backward", mutates_args=())
def batch_norm_relu_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of the input, and [2, C]: those of bias and weight, in float32."""
    return norm.launch_gradients(grad, x, mean, rstd, weight, bias, relu)


@batch_norm_relu_backward.register_fake
def _(grad, x, mean, rstd, weight, bias, relu):
    return empty_maps(x.shape, x), x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.relu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # asked for once: activation checkpointing computes them then, and lets them go
    *_, weight, bias = saved
    dx, (db, dw) = batch_norm_relu_backward(grad, *saved, ctx.relu)
    weight_grad = None if weight is None else dw.to(weight.dtype)
    return dx, None, None, weight_grad, None if bias is None else db.to(bias.dtype), None


batch_norm_relu.register_autograd(_backward, setup_context=_save)
