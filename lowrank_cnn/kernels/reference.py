"""The definition of right: one convolution per group, concatenated, then bias, ReLU and max-pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

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
    biases = bias.split([weight.shape[0] for weight in weights]) if bias is not None else [None] * len(weights)
    parts = [
        _conv(x, weight, part, stride, sides) for weight, part, sides in zip(weights, biases, padding, strict=True)
    ]
    y = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    y = F.relu(y) if relu else y
    return F.max_pool2d(y, 2, 2, ceil_mode=pool == "ceil") if pool else y


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, sides: Sides) -> Tensor:
    (top, bottom), (left, right) = sides
    if top == bottom >= 0 and left == right >= 0:
        return F.conv2d(x, weight, bias, stride, (top, left))
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, stride)
