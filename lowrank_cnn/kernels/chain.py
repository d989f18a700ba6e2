"""A basis and its 1x1 join while they train: two launches, or one of the dense conv that they are together.

No activation stands between the two, so they are one dense conv, whose weights are a small matrix product away.
Where maps are large and filters few, writing the basis's maps and reading them again costs more than the
multiply-accumulates that the dense conv adds; its gradient goes through the product to both. Which is faster is
measured, as everywhere, or counted where nothing can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.dense import compose
from lowrank_cnn.kernels.dispatch import composite_conv2d
from lowrank_cnn.kernels.mode import asked_for, mode
from lowrank_cnn.kernels.problem import Pair, Problem, Sides, pose

MACS_PER_MS, BYTES_PER_MS = 3e11, 4e9
"""What a large GPU does at least in a millisecond, for where nothing was measured."""
MERGING_MS = 0.05
"""What it takes to make the dense weight, forward and backward: some fifteen small launches in a graph."""


def enclosing(shapes: Sequence[Sequence[int]], padding: Sequence[Sides]) -> tuple[Pair, Sides]:
    """Kernel and padding of the smallest dense conv that holds every group where it reads."""
    kernel, sides = [], []
    for axis in range(2):
        before = max(pads[axis][0] for pads in padding)
        after = max(pads[axis][1] for pads in padding)
        spans = {
            pads[axis][0] + pads[axis][1] - shape[2 + axis] for shape, pads in zip(shapes, padding, strict=True)
        }
        assert len(spans) == 1, "groups of one layer give one output size"
        kernel.append(before + after - spans.pop())
        sides.append((before, after))
    return (kernel[0], kernel[1]), (sides[0], sides[1])


def merged_weight(weights: Sequence[Tensor], padding: Sequence[Sides], join: Tensor) -> Tensor:
    """[filters, channels, height, width]: the join's mixture of the basis, group by group, in full precision."""
    kernel, (rows, columns) = enclosing([weight.shape for weight in weights], padding)
    parts = join.flatten(1).split([weight.shape[0] for weight in weights], dim=1)
    total = None
    with torch.autocast(join.device.type, enabled=False):
        for weight, pads, part in zip(weights, padding, parts, strict=True):
            mixed = compose(weight, part[:, :, None, None])
            top, left = rows[0] - pads[0][0], columns[0] - pads[1][0]
            room = kernel[1] - weight.shape[3] - left, kernel[0] - weight.shape[2] - top
            mixed = F.pad(mixed, (left, room[0], top, room[1]))
            total = mixed if total is None else total + mixed
    assert total is not None
    return total


def merged_bias(basis: Tensor | None, join: Tensor, bias: Tensor | None) -> Tensor | None:
    """What the join makes of the basis's bias, and its own."""
    if basis is None:
        return bias
    with torch.autocast(join.device.type, enabled=False):
        carried = join.flatten(1) @ basis
    return carried if bias is None else carried + bias


class FusedChain(nn.Module):
    """A basis and its join, with the ReLU and the 2x2 max-pool that followed: in one kernel or in two."""

    def __init__(self, basis: nn.Module, join: nn.Module) -> None:
        super().__init__()
        self.basis, self.join = basis, join

    def forward(self, x: Tensor) -> Tensor:
        basis: Any = self.basis
        join: Any = self.join
        if not self.merges(x):
            return join(basis(x))
        weights = list(basis.weights)
        weight = merged_weight(weights, basis.padding, join.weights[0])
        bias = merged_bias(basis.bias, join.weights[0], join.bias)
        _, sides = enclosing([w.shape for w in weights], basis.padding)
        options = {"stride": basis.stride, "activation": join.activation, "pool": join.pool}
        return composite_conv2d(x, [weight], bias, padding=[sides], **options)

    @property
    def pool(self) -> str | None:
        """The rounding of the max-pool at its end, as that of any fused layer."""
        join: Any = self.join
        return join.pool

    def merges(self, x: Tensor) -> bool:
        """Whether one launch is faster for such an input."""
        # First, for torch.compile cannot follow what `mode` reads; it asks once per size, and measures nothing.
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return False
        if mode() == "off" or not (x.is_cuda or asked_for()):
            return False
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return False  # `merge` folds a chain once and for all, not at every call
        apart, whole = self._problems(tuple(x.shape), dtype)
        ours, theirs = (_measured_ms(way, x.device, need_input=x.requires_grad) for way in ([whole], apart))
        if ours is None or theirs is None:
            ours, theirs = _counted_ms([whole]), _counted_ms(apart)
        return ours + MERGING_MS < theirs

    def _problems(self, size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Problem], Problem]:
        basis: Any = self.basis
        join: Any = self.join
        shapes = [tuple(weight.shape) for weight in basis.weights]
        first = pose(size, shapes, dtype, stride=basis.stride, padding=basis.padding)
        between = (size[0], first.filters, first.out_height, first.out_width)
        last = {"activation": join.activation, "pool": join.pool}
        mixture = [tuple(join.weights[0].shape)]
        second = pose(between, mixture, dtype, stride=(1, 1), padding=join.padding, **last)
        kernel, sides = enclosing(shapes, basis.padding)
        dense = [(mixture[0][0], size[1], *kernel)]
        return [first, second], pose(size, dense, dtype, stride=basis.stride, padding=[sides], **last)


def _measured_ms(problems: Sequence[Problem], device: torch.device, *, need_input: bool) -> float | None:
    """Milliseconds of training launches one after the other, or None where one was not measured."""
    needs = [need_input, *[True] * (len(problems) - 1)]
    measured = [
        choice.fastest(problem, device, training=True, need_input=need)
        for problem, need in zip(problems, needs, strict=True)
    ]
    known = [ms for ms in measured if ms is not None]
    return sum(known) if len(known) == len(problems) else None


def _counted_ms(problems: Sequence[Problem]) -> float:
    return sum(max(problem.macs / MACS_PER_MS, problem.bytes / BYTES_PER_MS) for problem in problems)
