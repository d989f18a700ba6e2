"""Composite convs over volumes [N, C, T, H, W] by the kernels for images.

A k x 1 x 1 filter is a k x 1 filter over [N, C, T, H*W], and a 1 x k x k filter is a k x k filter over
[N*T, C, H, W]. In channels_last_3d both are views of the volume's memory. Consecutive groups with one view run in
one launch. For inference each launch writes its channels of one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.kernels.dispatch import (
    composite_conv2d,
    composite_conv2d_into,
    explain_call,
    may_fuse,
    needs_gradient,
    under_autocast,
)
from lowrank_cnn.kernels.problem import Sides
from lowrank_cnn.kernels.reference import composite_by_torch, followed, pad_on_sides

Padding3d = Sequence[Sequence[tuple[int, int]]]


def is_flat(kernel: Sequence[int]) -> bool:
    """Whether a filter reaches along time alone, or within frames alone."""
    return kernel[0] == 1 or tuple(kernel[1:]) == (1, 1)


def composite_conv3d(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Sequence[int],
    padding: Padding3d,
    residual: Tensor | None = None,
    activation: str | None = None,
    add_last: bool = False,
) -> Tensor:
    """A composite layer over volumes, as `composite_conv2d` over images; by torch unless every filter is flat."""
    if not (may_fuse(x) and all(is_flat(weight.shape[2:]) for weight in weights)):
        options: Any = {"residual": residual, "activation": activation, "add_last": add_last}
        return composite_by_torch(x, weights, bias, stride=stride, padding=padding, **options)  # type: ignore[arg-type]
    calls = _calls(under_autocast(x), weights, stride, padding)
    alone, parts = len(calls) == 1, _split(bias, calls)
    if not alone and not needs_gradient(x, *weights, bias, residual):
        how: Any = {"activation": activation, "add_last": add_last}
        return _in_one_memory(calls, parts, residual, **how)
    inside = activation if alone or residual is None else None
    results = []
    for own, part in zip(calls, parts, strict=True):
        added = None if residual is None or not alone else own.maps(residual)
        how = {"activation": inside, "residual": added, "add_last": add_last}
        y = composite_conv2d(own.x, own.weights, part, stride=own.stride, padding=own.padding, **how)
        results.append(own.volume(y))
    if alone:
        return results[0]
    return followed(torch.cat(results, 1), residual, None if inside else activation, None, add_last=add_last)


def _in_one_memory(
    calls: Sequence[_Call], biases: Sequence[Tensor | None], residual: Tensor | None, **how: Any
) -> Tensor:
    """The result of calls that write their channels side by side."""
    x, filters = calls[0].x, [call.filters for call in calls]
    size = (calls[0].batch, sum(filters), *calls[0].size)
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
    added = [None] * len(calls) if residual is None else residual.split(filters, 1)
    for call, bias, part, over in zip(calls, biases, added, y.split(filters, 1), strict=True):
        how |= {"residual": None if part is None else call.maps(part)}
        composite_conv2d_into(
            call.maps(over), call.x, call.weights, bias, stride=call.stride, padding=call.padding, **how
        )
    return y


def explain_volume(x: Tensor, weights: Sequence[Tensor], *, training: bool = False, **options: Any) -> str:
    """The path that `composite_conv3d` takes for these tensors, and why."""
    if not all(is_flat(weight.shape[2:]) for weight in weights):
        return "torch (filters that reach along time and within frames)"
    calls = _calls(x, weights, **options)
    told = [explain_call(c.x, c.weights, training=training, stride=c.stride, padding=c.padding) for c in calls]
    return ", ".join(dict.fromkeys(told))


class _Call:
    """Consecutive filter groups over one view of a volume, as arguments of `composite_conv2d`."""

    def __init__(
        self, x: Tensor, weights: Sequence[Tensor], stride: Sequence[int], padding: Padding3d, *, time: bool
    ) -> None:
        # Where a filter has a single tap, padding and stride are a crop and every n-th slice.
        (before, after), *around = padding[0]
        axes = zip(x.shape[2:], padding[0], weights[0].shape[2:], stride, strict=True)
        self.batch, self.filters = x.shape[0], sum(len(weight) for weight in weights)
        self.size = [(size + sum(sides) - taps) // step + 1 for size, sides, taps, step in axes]
        if time:
            x = pad_on_sides(x, [(0, 0), *around], "constant")[..., :: stride[1], :: stride[2]]
        else:
            x = pad_on_sides(x, [(before, after), (0, 0), (0, 0)], "constant")[:, :, :: stride[0]]
        self.time = time
        self.apart = (3, x.shape[3:]) if time else (0, (x.shape[0], x.shape[2]))
        self.x = self.maps(x)
        self.weights = [weight.flatten(3) if time else weight.squeeze(2) for weight in weights]
        self.stride = (stride[0], 1) if time else (stride[1], stride[2])
        self.padding: list[Sides] = [(own[0], (0, 0)) if time else (own[1], own[2]) for own in padding]

    def maps(self, x: Tensor) -> Tensor:
        """A volume as maps."""
        return x.flatten(3) if self.time else x.transpose(1, 2).flatten(0, 1)

    def volume(self, y: Tensor) -> Tensor:
        """A result as a volume."""
        axis, sizes = self.apart
        y = y.unflatten(axis, sizes)
        return y if axis else y.transpose(1, 2)


def _calls(x: Tensor, weights: Sequence[Tensor], stride: Sequence[int], padding: Padding3d) -> list[_Call]:
    found: list[tuple[Any, list[Tensor], list[Any]]] = []
    for weight, sides in zip(weights, padding, strict=True):
        time = weight.shape[2] > 1
        view = time, (sides[1:] if time else sides[0])  # filters of one launch crop and pad the volume alike
        if not found or found[-1][0] != view:
            found.append((view, [], []))
        found[-1][1].append(weight)
        found[-1][2].append(sides)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    return [_Call(x, own, stride, sides, time=time) for (time, _), own, sides in found]


def _split(bias: Tensor | None, calls: Sequence[_Call]) -> Sequence[Tensor | None]:
    return [None] * len(calls) if bias is None else bias.split([call.filters for call in calls])
