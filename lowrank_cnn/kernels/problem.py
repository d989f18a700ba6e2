"""`Problem`: what one fused launch computes, as data. Kernels, reference and dispatch all work on it.

A problem is hashable: choices and plans are stored per problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.kernels.activation import canonical, is_monotone
from lowrank_cnn.system.errors import LowRankError

Pair = tuple[int, int]
Sides = tuple[Pair, Pair]
OVERLAPPING = "3x3/2"
"""The pool of a ResNet's stem: 3x3 windows, stride 2, padding 1."""
POOLS = (None, "floor", "ceil", OVERLAPPING)
"""No pool, 2x2 windows of stride 2 that round down or up at the border, and overlapping windows."""


@dataclass(frozen=True)
class TapGroup:
    """`filters` filters of `height` x `width` taps; the first reads `top` rows above and `left` columns before."""

    height: int
    width: int
    filters: int
    top: int
    left: int

    @property
    def taps(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Problem:
    """A composite conv of one input size, with its epilogue: bias, residual, activation, pool, in this order.

    With `add_last` the residual is added after the activation.
    """

    batch: int
    channels: int
    height: int
    width: int
    groups: tuple[TapGroup, ...]
    stride: Pair
    out_height: int
    out_width: int
    activation: str | None
    pool: str | None
    dtype: torch.dtype
    residual: bool = False
    add_last: bool = False

    @property
    def relu(self) -> bool:
        """Whether the activation is a ReLU."""
        return self.activation == "relu"

    @property
    def can_pool_first(self) -> bool:
        """Whether a kernel may pool before bias and activation: if these keep the order of values in a window."""
        return self.pool is None or (not self.residual and is_monotone(self.activation))

    @property
    def filters(self) -> int:
        """Filters of all groups."""
        return sum(group.filters for group in self.groups)

    @property
    def as_dense(self) -> Problem:
        """The same layer as one dense conv: one group that encloses the taps of all, see `reference.enclosed`."""
        top, left = (max(getattr(group, side) for group in self.groups) for side in ("top", "left"))
        height = max(top - group.top + group.height for group in self.groups)
        width = max(left - group.left + group.width for group in self.groups)
        return replace(self, groups=(TapGroup(height, width, self.filters, top, left),))

    @property
    def result_size(self) -> Pair:
        """Height and width of the result, after the pool."""
        if self.pool is None:
            return self.out_height, self.out_width
        spare = 0 if self.pool == "floor" else 1
        return (self.out_height + spare) // 2, (self.out_width + spare) // 2

    @property
    def padding(self) -> list[Sides]:
        """((top, bottom), (left, right)) per group."""
        rows, columns = self.stride
        return [
            (
                (g.top, (self.out_height - 1) * rows + g.height - self.height - g.top),
                (g.left, (self.out_width - 1) * columns + g.width - self.width - g.left),
            )
            for g in self.groups
        ]

    @property
    def even(self) -> bool:
        """Whether 2x2 windows tile the output."""
        return self.out_height % 2 == 0 and self.out_width % 2 == 0

    @property
    def macs(self) -> int:
        """Multiply-accumulates for the whole batch."""
        depth = sum(group.taps * group.filters for group in self.groups)
        return self.batch * self.out_height * self.out_width * self.channels * depth

    @property
    def bytes(self) -> int:
        """The fewest bytes of memory traffic: inputs and weights read once, the result written once."""
        result = self.result_size[0] * self.result_size[1] * self.filters * (2 if self.residual else 1)
        pixels = self.height * self.width * self.channels
        weights = self.channels * sum(group.taps * group.filters for group in self.groups)
        return self.dtype.itemsize * (self.batch * (pixels + result) + weights)

    def __str__(self) -> str:
        groups = "+".join(f"{g.height}x{g.width},{g.filters}" for g in self.groups)
        sums = ["residual"] if self.residual else []
        order = [self.activation, *sums] if self.add_last else [*sums, self.activation]
        steps = (*order, f"pool-{self.pool}" if self.pool else "")
        tail = "".join(f",{step}" for step in steps if step)
        size = f"{self.batch}x{self.channels}x{self.height}x{self.width}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{size} {groups} /{self.stride[0]}x{self.stride[1]}{tail} {dtype}"


class CallOptions(NamedTuple):
    """The arguments of a call that are not tensors: hashable plain values, which torch.compile can store."""

    stride: Pair
    padding: tuple[Sides, ...]
    activation: str | None
    pool: str | None
    residual: bool
    add_last: bool = False


class ConvTensors(NamedTuple):
    """The tensors of one forward launch; `packed` are the weights in the layout of its kernel.

    If given, `codes` (see `empty_codes`) and `parts` (see `conv.result_statistics`) are written.
    """

    x: Tensor
    packed: Tensor
    bias: Tensor | None = None
    codes: Tensor | None = None
    residual: Tensor | None = None
    parts: Tensor | None = None


def describe(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: bool = False,
    activation: str | None = None,
    add_last: bool = False,
) -> Problem:
    """The problem of these tensors; every group must give the same output size."""
    shapes = [tuple(weight.shape) for weight in weights]
    epilogue = {
        "activation": canonical(activation, relu),
        "pool": pool,
        "residual": residual,
        "add_last": add_last,
    }
    return pose(tuple(x.shape), shapes, x.dtype, stride=stride, padding=padding, **epilogue)


def pose(
    size: Sequence[int],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: bool = False,
    activation: str | None = None,
    add_last: bool = False,
) -> Problem:
    """The problem of an input of size [N, C, H, W] and weights of shapes [filters, C, height, width]."""
    if pool not in POOLS:
        raise LowRankError(f'pool is None, "floor", "ceil" or "{OVERLAPPING}", not {pool!r}.')
    if len(padding) != len(shapes):
        raise LowRankError(f"{len(shapes)} filter groups need as many paddings, not {len(padding)}.")
    batch, channels, height, width = size
    sizes = {
        ((height + sum(rows) - shape[2]) // stride[0] + 1, (width + sum(columns) - shape[3]) // stride[1] + 1)
        for shape, (rows, columns) in zip(shapes, padding, strict=True)
    }
    if len(sizes) != 1:
        found = " and ".join(f"{rows}x{columns}" for rows, columns in sorted(sizes))
        raise LowRankError(f"all filter groups must give one output size, not {found}.")
    out_height, out_width = sizes.pop()
    groups = tuple(
        TapGroup(shape[2], shape[3], shape[0], rows[0], columns[0])
        for shape, (rows, columns) in zip(shapes, padding, strict=True)
    )
    strides, last = (stride[0], stride[1]), canonical(activation, relu)
    after = add_last and residual and last is not None  # without an activation both orders are one
    outputs = (out_height, out_width)
    return Problem(batch, channels, height, width, groups, strides, *outputs, last, pool, dtype, residual, after)


def pixels_last(x: Tensor) -> Tensor:
    """A batch as contiguous [N, H, W, C]; copied only if it is not channels-last already."""
    pixels = x.permute(0, 2, 3, 1).contiguous()
    # A side of size 1 may have any stride in torch, but tensor descriptors need aligned strides.
    return pixels.view(-1).view(pixels.shape) if 1 in pixels.shape else pixels


def empty_codes(problem: Problem, x: Tensor) -> Tensor | None:
    """Memory for the codes of a 2x2 pool, which the backward reads: each window's winner, or 4 if ReLU cut it."""
    if problem.pool not in ("floor", "ceil"):
        return None
    return torch.empty((problem.batch, *problem.result_size, problem.filters), device=x.device, dtype=torch.uint8)


def empty_result(problem: Problem, x: Tensor) -> Tensor:
    """Memory for the result, [N, filters, H, W] in channels-last order.

    Kernels write to its `permute(0, 2, 3, 1)` and return the memory itself: autograd would refuse an in-place ReLU
    on a view.
    """
    return empty_maps((problem.batch, problem.filters, *problem.result_size), x)


def empty_maps(size: Sequence[int], like: Tensor) -> Tensor:
    """Memory for [N, C, H, W] in channels-last order, of a tensor's type and device."""
    return torch.empty(tuple(size), device=like.device, dtype=like.dtype, memory_format=torch.channels_last)
