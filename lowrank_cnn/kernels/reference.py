"""The definition of right: one convolution per group, concatenated, then bias, ReLU and max-pool.

`composite_by_torch` is the same by the fastest operations torch itself has: what the fused kernels must beat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.kernels.mode import survey
from lowrank_cnn.kernels.problem import Pair, Sides


def composite_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
) -> Tensor:
    """What every fused path must give, by torch's own operations; it runs on any device."""
    parts = [
        _conv(x, weight, part, stride, sides)
        for weight, part, sides in zip(weights, _biases(bias, weights), padding, strict=True)
    ]
    y = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    y = F.relu(y) if relu else y
    return F.max_pool2d(y, 2, 2, ceil_mode=pool == "ceil") if pool else y


def composite_by_torch(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
) -> Tensor:
    """The reference in the types of the input, by cuDNN's convolutions with bias and ReLU inside where it can."""
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    options = {"stride": stride, "padding": padding}
    if not (relu and _cudnn_fuses(x, weights, padding)):
        return composite_reference(x, weights, bias, **options, relu=relu, pool=pool)
    parts = [
        torch.cudnn_convolution_relu(x, weight.to(x.dtype), part, stride, (rows[0], columns[0]), (1, 1), 1)
        for weight, part, (rows, columns) in zip(weights, _biases(bias, weights), padding, strict=True)
    ]
    y = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    return F.max_pool2d(y, 2, 2, ceil_mode=pool == "ceil") if pool else y


def _cudnn_fuses(x: Tensor, weights: Sequence[Tensor], padding: Sequence[Sides]) -> bool:
    """Whether cuDNN takes bias and ReLU in: without gradients, in 16 bits, eagerly, equal sides, many channels."""
    eager = not torch.compiler.is_compiling() and survey() is None
    if not x.is_cuda or not eager or not torch.backends.cudnn.is_available():
        return False
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    halves = x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % 8 == 0
    even = all(before == after >= 0 for sides in padding for before, after in sides)
    return halves and even and not graded


def _biases(bias: Tensor | None, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return bias.split([weight.shape[0] for weight in weights]) if bias is not None else [None] * len(weights)


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, sides: Sides) -> Tensor:
    (top, bottom), (left, right) = sides
    if top == bottom >= 0 and left == right >= 0:
        return F.conv2d(x, weight, bias, stride, (top, left))
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, stride)
