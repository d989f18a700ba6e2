"""Train a basis and its 1x1 join as two convs, or as the one dense conv that both make up.

There is no activation between basis and join, so a small matrix product of their weights gives one dense conv.
With large maps and few filters, writing and reading the basis's maps costs more than the MACs that the dense conv
adds. Its gradient flows through the matrix product to both. Measured times decide, or counts if there are none.
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
from lowrank_cnn.kernels.mode import asked_for, by_torch
from lowrank_cnn.kernels.problem import Pair, Problem, Sides, pose

MACS_PER_MS, BYTES_PER_MS = 3e11, 4e9
"""A large GPU's rates, assumed if nothing was measured."""
MERGING_MS = 0.05
"""Time to compute the dense weight, forward and backward: about fifteen small launches in a graph."""


def enclosing(shapes: Sequence[Sequence[int]], padding: Sequence[Sides]) -> tuple[Pair, Sides]:
    """Kernel size and padding of the smallest dense conv that covers the taps of every group."""
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
    """The bias of the dense conv: the join of the basis's bias, plus the join's own."""
    if basis is None:
        return bias
    with torch.autocast(join.device.type, enabled=False):
        carried = join.flatten(1) @ basis
    return carried if bias is None else carried + bias


class FusedChain(nn.Module):
    """Convs in a row, with the last one's activation and max-pool; basis and join may run as one dense conv."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None and self.merges(x):
            return self._merged(x)
        *front, last = self.stages
        for stage in front:
            x = stage(x)
        return last(x, residual)

    def _merged(self, x: Tensor) -> Tensor:
        basis, join = self._basis_and_join()
        weights = list(basis.weights)
        weight = merged_weight(weights, basis.padding, join.weights[0])
        bias = merged_bias(basis.bias, join.weights[0], join.bias)
        _, sides = enclosing([w.shape for w in weights], basis.padding)
        options = {"stride": basis.stride, "activation": join.activation, "pool": join.pool}
        return composite_conv2d(x, [weight], bias, padding=[sides], **options)

    @property
    def pool(self) -> str | None:
        """The max-pool at the end of the chain, as `composite_conv2d` names it."""
        last: Any = self.stages[-1]
        return last.pool

    @property
    def is_joined(self) -> bool:
        """Whether the chain is a basis and its join: one conv with 1x1 filters, stride 1 and no padding."""
        if len(self.stages) != 2:
            return False
        _, join = self._basis_and_join()
        pointwise = [tuple(w.shape[2:]) for w in join.weights] == [(1, 1)] and tuple(join.stride) == (1, 1)
        return pointwise and not any(sum(join.padding[0], ()))

    def merges(self, x: Tensor) -> bool:
        """Whether the dense conv is faster than the two stages on such an input."""
        # First, because torch.compile cannot trace what `by_torch` reads.
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return False
        if by_torch() or not (x.is_cuda or asked_for()) or not self.is_joined:
            return False
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return False  # for inference `merge` folds a chain once, not at every call
        apart, whole = self._problems(tuple(x.shape), dtype)
        ours, theirs = (_measured_ms(way, x.device, need_input=x.requires_grad) for way in ([whole], apart))
        if ours is None or theirs is None:
            ours, theirs = _counted_ms([whole]), _counted_ms(apart)
        return ours + MERGING_MS < theirs

    def _problems(self, size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Problem], Problem]:
        """The problems of basis and join, and that of the dense conv."""
        basis, join = self._basis_and_join()
        shapes = [tuple(weight.shape) for weight in basis.weights]
        first = pose(size, shapes, dtype, stride=basis.stride, padding=basis.padding)
        between = (size[0], first.filters, first.out_height, first.out_width)
        last = {"activation": join.activation, "pool": join.pool}
        mixture = [tuple(join.weights[0].shape)]
        second = pose(between, mixture, dtype, stride=(1, 1), padding=join.padding, **last)
        kernel, sides = enclosing(shapes, basis.padding)
        dense = [(mixture[0][0], size[1], *kernel)]
        return [first, second], pose(size, dense, dtype, stride=basis.stride, padding=[sides], **last)

    def _basis_and_join(self) -> tuple[Any, Any]:
        return self.stages[0], self.stages[1]


def _measured_ms(problems: Sequence[Problem], device: torch.device, *, need_input: bool) -> float | None:
    """The summed training times of problems that run in turn; None if one of them was not measured."""
    needs = [need_input, *[True] * (len(problems) - 1)]
    measured = [
        choice.fastest(problem, device, training=True, need_input=need)
        for problem, need in zip(problems, needs, strict=True)
    ]
    known = [ms for ms in measured if ms is not None]
    return sum(known) if len(known) == len(problems) else None


def _counted_ms(problems: Sequence[Problem]) -> float:
    return sum(max(problem.macs / MACS_PER_MS, problem.bytes / BYTES_PER_MS) for problem in problems)
