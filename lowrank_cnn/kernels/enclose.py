"""Place the weights of all groups in one dense weight, as an operator with a gradient.

A layer that trains as one dense conv does this in every step. For four groups `reference.enclosed` takes a dozen
small launches, forward and backward; this takes three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels.conv.pack import copy_groups
from lowrank_cnn.kernels.problem import Sides
from lowrank_cnn.kernels.reference import enclosure


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, ctx.starts, _ = inputs
    ctx.save_for_backward(*weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return take_groups(grad, list(ctx.saved_tensors), ctx.starts), None, None


place_groups.register_autograd(_backward, setup_context=_save)
