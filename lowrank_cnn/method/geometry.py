"""Kernels, offsets and padding per axis, for filters of several sizes on one output grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import computes_as
from lowrank_cnn.method.spec import Kernel, Pair

Sides = tuple[Pair, ...]
"""Padding as ((top, bottom), (left, right)), before these in time over volumes; a negative side crops."""

Padding = str | int | Sequence[int] | Sides


def per_axis(value: int | Sequence[int], label: str, axes: int = 2) -> Kernel:
    """A size given once or per axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(sizes) != axes or any(not isinstance(v, int) or v < 1 for v in sizes):
        several = "a pair" if axes == 2 else "three"
        raise LowRankError(f"{label} is a positive number or {several} of them, not {value!r}.")
    return sizes


def enclosing_padding(padding: Padding, kernel: Kernel, dilation: Kernel) -> Sides:
    """Any way of writing the padding, as sides. "same" splits an odd total as torch does: less before."""
    if padding == "same":
        totals = (step * (size - 1) for size, step in zip(kernel, dilation, strict=True))
        return tuple((total // 2, total - total // 2) for total in totals)
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    several = isinstance(padding, Sequence) and not isinstance(padding, str)
    axes: tuple[Any, ...] = tuple(padding) if several else (padding,) * len(kernel)  # type: ignore[arg-type]
    if any(isinstance(v, int) and v < 0 for v in axes):
        raise LowRankError(f"padding cannot be negative: {padding!r}.")
    sides = tuple(tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else (v, v) for v in axes)
    twos = [len(side) for side in sides] == [2] * len(kernel)
    if not twos or not all(isinstance(v, int) for side in sides for v in side):
        numbers = "a pair" if len(kernel) == 2 else "three"
        raise LowRankError(f'padding is "same", "valid", a number or {numbers}, not {padding!r}.')
    return sides  # type: ignore[return-value]


def offsets(own: Kernel, kernel: Kernel) -> Kernel:
    """Taps of the enclosing kernel before the own one's first, per axis: centre taps (k-1)//2 coincide."""
    return tuple((k - 1) // 2 - (n - 1) // 2 for n, k in zip(own, kernel, strict=True))


def recentred(sides: Sides, kernel: Kernel, enclosing: Kernel, dilation: Kernel) -> Sides:
    """The padding of the dense kernel, for an enclosing kernel of another size on the same output grid."""
    shift = offsets(kernel, enclosing)
    return tuple(
        (before + step * first, after + step * (new - old - first))
        for (before, after), old, new, step, first in zip(sides, kernel, enclosing, dilation, shift, strict=True)
    )


def symmetric(sides: Sides) -> bool:
    return all(before == after >= 0 for before, after in sides)


@dataclass(frozen=True)
class ConvForm:
    """The options of a conv, its padding on each side in pixels."""

    in_channels: int
    out_channels: int
    kernel: Kernel
    stride: Kernel
    padding: Sides
    dilation: Kernel
    groups: int
    padding_mode: str
    bias: bool


def form_of(conv: nn.Conv2d | nn.Conv3d) -> ConvForm | None:
    """The options of the conv that a layer computes; None for a subclass that computes something else."""
    if not computes_as(conv, nn.Conv3d if isinstance(conv, nn.Conv3d) else nn.Conv2d):
        return None
    sides = enclosing_padding(conv.padding, conv.kernel_size, conv.dilation)
    return ConvForm(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, sides,
        conv.dilation, conv.groups, conv.padding_mode, conv.bias is not None,
    )  # fmt: skip
