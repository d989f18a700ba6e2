"""The definition of right: one convolution per group, concatenated, then bias, residual, activation and max-pool.

`composite_by_torch` computes the same by the fastest operations torch itself has: the rival of the fused kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.kernels.activation import activate, canonical
from lowrank_cnn.kernels.mode import survey
from lowrank_cnn.kernels.problem import OVERLAPPING, Pair, Sides


def composite_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """What every fused path must give, by torch's own operations; it runs on any device."""
    parts = [
        _conv(x, weight, part, stride, sides)
        for weight, part, sides in zip(weights, _biases(bias, weights), padding, strict=True)
    ]
    return followed(_joined(parts), residual, canonical(activation, relu), pool)


def composite_by_torch(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The reference in the types of the input, by cuDNN's convolutions with what they can take of the epilogue."""
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    last = canonical(activation, relu)
    alone = residual is None or (len(weights) == 1 and residual.dtype == x.dtype)
    tensors = [t for t in (x, *weights, bias, residual) if t is not None]
    if last != "relu" or not alone or not _cudnn_fuses(x, tensors, padding):
        options = {"stride": stride, "padding": padding, "residual": residual}
        return composite_reference(x, weights, bias, **options, activation=last, pool=pool)
    parts = [
        _conv_relu(x, weight.to(x.dtype), part, residual, stride, (rows[0], columns[0]))
        for weight, part, (rows, columns) in zip(weights, _biases(bias, weights), padding, strict=True)
    ]
    return followed(_joined(parts), None, None, pool)


def followed(y: Tensor, residual: Tensor | None, activation: str | None, pool: str | None) -> Tensor:
    """A conv's result with what follows it, by torch: residual, activation, max-pool."""
    y = activate(y if residual is None else y + residual, activation)
    if pool == OVERLAPPING:
        return F.max_pool2d(y, 3, 2, 1)
    return F.max_pool2d(y, 2, 2, ceil_mode=pool == "ceil") if pool else y


def _conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, stride, padding, (1, 1), 1)


def _cudnn_fuses(x: Tensor, tensors: Sequence[Tensor], padding: Sequence[Sides]) -> bool:
    """Whether cuDNN takes bias and ReLU in: without gradients, in 16 bits, eagerly, equal sides, many channels."""
    eager = not torch.compiler.is_compiling() and survey() is None
    if not x.is_cuda or not eager or not torch.backends.cudnn.is_available():
        return False
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    halves = x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 8 == 0
    even = all(before == after >= 0 for sides in padding for before, after in sides)
    return halves and even and not graded


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]


def _biases(bias: Tensor | None, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return bias.split([weight.shape[0] for weight in weights]) if bias is not None else [None] * len(weights)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, sides: Sides) -> Tensor:
    (top, bottom), (left, right) = sides
    if top == bottom >= 0 and left == right >= 0:
        return F.conv2d(x, weight, bias, stride, (top, left))
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, stride)
