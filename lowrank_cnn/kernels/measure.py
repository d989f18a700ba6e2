"""Time the paths of a problem on its device: a fused plan, or torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowrank_cnn.kernels.problem import Problem, Sides, empty_codes
from lowrank_cnn.kernels.reference import composite_reference

if TYPE_CHECKING:
    from lowrank_cnn.kernels.launch import Plan


def milliseconds(problem: Problem, device: torch.device, plan: Plan | None, *, training: bool) -> float:
    """Milliseconds of one path, infinite where it fails."""
    try:
        run = _runner(problem, device, plan, training)
        for _ in range(2):
            run()
        return median(_once(run) for _ in range(5))
    except Exception:  # whatever keeps a plan from running on this device keeps it from being chosen
        return float("inf")


def _once(run: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _runner(problem: Problem, device: torch.device, plan: Plan | None, training: bool) -> Callable[[], object]:
    """One forward, and its backward where training, on random inputs of the problem's shapes."""
    from lowrank_cnn.kernels import launch

    x = torch.randn(
        (problem.batch, problem.channels, problem.height, problem.width), device=device, dtype=problem.dtype
    ).contiguous(memory_format=torch.channels_last)
    weights = [
        torch.randn((g.filters, problem.channels, g.height, g.width), device=device, dtype=problem.dtype)
        for g in problem.groups
    ]
    bias = torch.randn(problem.filters, device=device)
    if plan is None:
        return _eager_runner(problem, x, weights, bias, training)
    need_input = problem.channels > 4

    def fused() -> object:
        codes = empty_codes(problem, x) if training else None
        y = launch.forward(plan, problem, x, weights, bias, codes)
        if not training:
            return y
        seen = codes if codes is not None else y.permute(0, 2, 3, 1)
        return launch.gradients(problem, y, x, weights, seen, need_input=need_input)

    return fused


def _eager_runner(
    problem: Problem, x: Tensor, weights: list[Tensor], bias: Tensor, training: bool
) -> Callable[[], object]:
    options = {"stride": problem.stride, "padding": _sides(problem), "relu": problem.relu, "pool": problem.pool}
    inputs = [*weights, bias, *([x] if problem.channels > 4 else [])]
    for tensor in inputs:
        tensor.requires_grad_(training)

    def eager() -> object:
        y = composite_reference(x, weights, bias.to(x.dtype), **options)
        return torch.autograd.grad(y, inputs, y.detach()) if training else y

    return eager


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
