"""Time the paths of a problem on its device: a fused plan, or torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowrank_cnn.kernels.problem import Problem, Sides, empty_codes
from lowrank_cnn.kernels.reference import composite_by_torch

if TYPE_CHECKING:
    from lowrank_cnn.kernels.launch import Plan


def milliseconds(
    problem: Problem, device: torch.device, plan: Plan | None, *, training: bool, repeats: int = 7
) -> float:
    """Milliseconds the device takes for one path (None: torch's own), infinite where it fails.

    A captured graph is timed: between events around a launch, a small layer would show the host's time.
    """
    try:
        with torch.cuda.device(device), torch.set_grad_enabled(training):
            graph = captured(_runner(problem, device, plan, training))
            graph.replay()
            return median(_once(graph) for _ in range(repeats))
    except Exception:  # whatever keeps a plan from running on this device keeps it from being chosen
        return float("inf")


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A function's work as a graph, after it has run outside of one: compiled, allocated, algorithms chosen."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads that only load data may call CUDA meanwhile: "thread_local" leaves them alone.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph


def _once(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
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
        y = composite_by_torch(x, weights, bias, **options)
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
