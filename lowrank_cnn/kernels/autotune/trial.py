"""A problem with random numbers, to try its paths on: a fused plan, and torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowrank_cnn.kernels.problem import Problem, Sides, empty_codes
from lowrank_cnn.kernels.reference import composite_by_torch

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan


@dataclass(frozen=True)
class Trial:
    """A problem with random numbers to try its paths on: one forward, and its backward where training."""

    problem: Problem
    x: Tensor
    weights: list[Tensor]
    bias: Tensor | None
    training: bool
    residual: Tensor | None = None

    @classmethod
    def random(
        cls, problem: Problem, device: torch.device, training: bool, bias: torch.dtype | None = torch.float32
    ) -> Trial:
        """With a bias of this type, or None: kernels are compiled for what they are given."""
        # A generator of its own: what training draws must not hang on what was measured before.
        numbers = torch.Generator(device).manual_seed(0)

        def draw(*size: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype, generator=numbers)

        x = draw(problem.batch, problem.channels, problem.height, problem.width)
        weights = [draw(g.filters, problem.channels, g.height, g.width) for g in problem.groups]
        added = None if bias is None else draw(problem.filters, dtype=bias)
        maps = draw(problem.batch, problem.filters, *problem.result_size) if problem.residual else None
        residual = None if maps is None else maps.contiguous(memory_format=torch.channels_last)
        return cls(problem, x.contiguous(memory_format=torch.channels_last), weights, added, training, residual)

    @property
    def need_input(self) -> bool:
        """The first layer's input, of few channels, needs no gradient."""
        return self.problem.channels > 4

    def run(self, plan: KernelPlan | None) -> list[Tensor]:
        """The result, or the gradients of weights, bias and input; None is torch's own path."""
        return self._fused(plan) if plan else self._by_torch()

    def call(self, plan: KernelPlan | None) -> list[Tensor]:
        """The same as a layer calls it: with what the operator and autograd cost the host."""
        return self._differentiated(partial(self._operator, plan) if plan else composite_by_torch)

    def pooled(self, plan: KernelPlan) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The result of a plan with a fused pool, the winners' codes, and the gradients."""
        from lowrank_cnn.kernels.conv import launch

        codes = empty_codes(self.problem, self.x)
        assert codes is not None
        y = launch.forward(plan, self.problem, self.x, self.weights, self.bias, codes)
        return y, codes, self._gradients(y, codes)

    def won_by(self, codes: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What torch computes at the winners named, and its gradients."""
        problem, inputs = self.problem, self._inputs()
        y = composite_by_torch(self.x, self.weights, self.bias, stride=problem.stride, padding=_sides(problem))
        rows, columns = problem.result_size
        y = pad(y, (0, 2 * columns - y.shape[3], 0, 2 * rows - y.shape[2]))  # cut, or filled where windows are cut
        place = codes.permute(0, 3, 1, 2).long()
        quads = y.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
        won = quads.gather(-1, place.clamp(max=3).unsqueeze(-1)).squeeze(-1) * (place < 4)
        return won.detach(), list(torch.autograd.grad(won, inputs, grad))

    def _operator(
        self, plan: KernelPlan, x: Tensor, weights: list[Tensor], bias: Tensor | None, **_: Any
    ) -> Tensor:
        from lowrank_cnn.kernels import ops

        padding, codes = _sides(self.problem), self.training and self.problem.pool is not None
        return ops.run_plan(str(plan), self.problem, x, weights, bias, self.residual, padding, codes=codes)

    def _fused(self, plan: KernelPlan) -> list[Tensor]:
        from lowrank_cnn.kernels.conv import launch

        codes = empty_codes(self.problem, self.x) if self.training else None
        y = launch.forward(plan, self.problem, self.x, self.weights, self.bias, codes, self.residual)
        if not self.training:
            return [y]
        # As the operator keeps it: without a ReLU nothing is looked at again.
        kept = y.permute(0, 2, 3, 1) if self.problem.relu else y.new_empty(0, dtype=torch.uint8)
        return self._gradients(y, codes if codes is not None else kept)

    def _gradients(self, grad: Tensor, seen: Tensor) -> list[Tensor]:
        from lowrank_cnn.kernels.conv import launch

        need = {"need_input": self.need_input, "need_bias": self.bias is not None}
        dx, dw, db = launch.gradients(self.problem, grad, self.x, self.weights, seen, **need)
        return [part for part in (*dw, db if need["need_bias"] else None, dx) if part is not None]

    def _by_torch(self) -> list[Tensor]:
        return self._differentiated(composite_by_torch)

    def _differentiated(self, convolve: Callable[..., Tensor]) -> list[Tensor]:
        problem = self.problem
        options = {
            "stride": problem.stride,
            "padding": _sides(problem),
            "activation": problem.activation,
            "pool": problem.pool,
            "residual": self.residual,
        }
        inputs = self._inputs()
        y = convolve(self.x, self.weights, self.bias, **options)
        return list(torch.autograd.grad(y, inputs, y.detach())) if self.training else [y]

    def _inputs(self) -> list[Tensor]:
        """What gradients are asked for."""
        bias = [] if self.bias is None else [self.bias]
        inputs = [*self.weights, *bias, *([self.x] if self.need_input else [])]
        for tensor in inputs:
            tensor.requires_grad_(self.training)
        return inputs


def _sides(problem: Problem) -> list[Sides]:
    """The padding that gives the problem's output size from its first taps' offsets."""
    rows, columns = problem.stride
    return [
        (
            (g.top, (problem.out_height - 1) * rows + g.height - problem.height - g.top),
            (g.left, (problem.out_width - 1) * columns + g.width - problem.width - g.left),
        )
        for g in problem.groups
    ]
