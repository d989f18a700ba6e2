"""Exact rewritings of linear layers, as functions of tensors alone.

Two convs with nothing between them are one conv wherever, along each axis, at most one of them reaches further
than a pixel: its kernel is the product of theirs. A batch norm in evaluation scales and shifts each channel, which
a conv or a linear layer before it can do by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compose_bias(first: Tensor | None, weight: Tensor, second: Tensor | None, *, groups: int = 1) -> Tensor | None:
    """The bias of two convs: what the second, of this weight, makes of the first's bias, and its own.

    Exact where the second conv sees the first one's bias under every tap: see `merge`.
    """
    if first is None:
        return second
    seen = weight.sum(dim=(2, 3)).reshape(groups, -1, weight.shape[1])
    carried = torch.einsum("gdm,gm->gd", seen, first.reshape(groups, -1)).flatten()
    return carried if second is None else carried + second


def norm_affine(
    mean: Tensor, variance: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A batch norm in evaluation as `scale * x + shift`, per channel."""
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def scale_filters(weight: Tensor, scale: Tensor) -> Tensor:
    """Each filter (the first dimension) times its own factor."""
    return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))


def scale_transposed_filters(weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """Each filter of a transposed conv (the second dimension, group by group) times its own factor."""
    by_group = weight.reshape(groups, -1, *weight.shape[1:])
    return (by_group * scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)


def affine_bias(bias: Tensor | None, scale: Tensor, shift: Tensor) -> Tensor:
    """The bias of a layer once `scale * x + shift` has been folded into it."""
    return shift if bias is None else bias * scale + shift
