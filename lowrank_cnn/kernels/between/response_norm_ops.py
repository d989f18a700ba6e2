"""Local response norm as a torch operator, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels.between import response_norm
from lowrank_cnn.kernels.problem import empty_maps


@torch.library.custom_op("lowrank::local_response_norm", mutates_args=())
def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """What torch's function of this name gives, channels-last and in the input's type."""
    return response_norm.launch_forward(x, size, alpha, beta, k)


@local_response_norm.register_fake
def _(x, size, alpha, beta, k):
    return empty_maps(x.shape, x)


@torch.library.custom_op("lowrank::local_response_norm_backward", mutates_args=())
def local_response_norm_backward(
    grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float
) -> Tensor:
    """The gradient of the input."""
    return response_norm.launch_backward(grad, x, size, alpha, beta, k)


@local_response_norm_backward.register_fake
def _(grad, x, size, alpha, beta, k):
    return empty_maps(x.shape, x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return local_response_norm_backward(grad, x, *ctx.options), None, None, None, None


local_response_norm.register_autograd(_backward, setup_context=_save)
