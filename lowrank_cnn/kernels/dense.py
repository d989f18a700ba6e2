"""The dense equivalents of smaller filters and of convolutions in a chain, as functions of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def compose(first: Tensor, second: Tensor, *, groups: int = 1) -> Tensor:
    """The weight of `second` after `first`; for example, [m, c, h, 1] and [d, m, 1, w] give [d, c, h, w].

    Along each axis one of the two must have a single tap. Both have the same channel groups.
    """
    if any(a > 1 and b > 1 for a, b in zip(first.shape[2:], second.shape[2:], strict=True)):
        raise ValueError(f"kernels of {tuple(first.shape[2:])} and {tuple(second.shape[2:])} reach along one axis")
    height, width = (max(a, b) for a, b in zip(first.shape[2:], second.shape[2:], strict=True))
    middle, channels = first.shape[0] // groups, first.shape[1]
    left = first.reshape(groups, middle, channels, *first.shape[2:])
    right = second.reshape(groups, -1, middle, *second.shape[2:])
    if second.shape[2:] == (1, 1):  # a join mixes filters as a matrix product
        mixed = right.flatten(2) @ left.flatten(2)
        return mixed.reshape(-1, channels, height, width)
    left = left.expand(-1, -1, -1, height, width)
    right = right.expand(-1, -1, -1, height, width)
    return torch.einsum("gdmhw,gmchw->gdchw", right, left).reshape(-1, channels, height, width)


def placed(weight: Tensor, kernel: Sequence[int], start: Sequence[int]) -> Tensor:
    """The weight in a larger kernel, its first tap at a row and column of it, zeros around."""
    (height, width), (top, left) = kernel, start
    return F.pad(weight, [left, width - weight.shape[3] - left, top, height - weight.shape[2] - top])


def ungrouped(weight: Tensor, groups: int) -> Tensor:
    """The weight [d, c / groups, h, w] of a conv with channel groups as [d, c, h, w], zeros between groups."""
    if groups == 1:
        return weight
    filters, channels = weight.shape[0] // groups, weight.shape[1]
    whole = weight.new_zeros(groups, filters, groups, channels, *weight.shape[2:])
    own = torch.arange(groups, device=weight.device)
    whole[own, :, own] = weight.unflatten(0, (groups, filters))
    return whole.reshape(groups * filters, groups * channels, *weight.shape[2:])
