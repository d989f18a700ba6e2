"""Time the paths of a problem on its device, a fused plan or torch's own operations, and compare their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.kernels.mode import for_graphs, forced
from lowrank_cnn.kernels.problem import Problem, Sides, empty_codes
from lowrank_cnn.kernels.reference import composite_by_torch
from lowrank_cnn.memory import is_out_of_memory

if TYPE_CHECKING:
    from lowrank_cnn.kernels.launch import Plan

TOLERANCE = 2e-2
"""Between two ways to round a layer in half precision, relative to the norm of the result."""
CALLS = 10


class Times(NamedTuple):
    """Milliseconds of one path: in a replayed graph, and as a call from Python among many."""

    graph: float
    call: float


FAILED = Times(float("inf"), float("inf"))


def times(
    problem: Problem, device: torch.device, plan: Plan | None, *, training: bool, repeats: int = 7
) -> Times | None:
    """What a plan takes (or torch's own path, without one): infinite where it fails, None where memory ran out."""
    try:
        with torch.cuda.device(device), torch.set_grad_enabled(training):
            trial = Trial.random(problem, device, training)
            graph = captured(lambda: trial.run(plan))
            graph.replay()
            return Times(median(_replay(graph) for _ in range(repeats)), _per_call(lambda: trial.call(plan)))
    except Exception as error:  # whatever keeps a plan from running on this device keeps it from being chosen
        return None if _ran_out(error) else FAILED


def agrees(problem: Problem, device: torch.device, plan: Plan, *, training: bool) -> bool | None:
    """Whether a plan gives what torch gives, gradients too where training; a plan that fails does not.

    None where memory ran out before that was known.
    Gradients are compared without the pool: rounded values tie, and either may win.
    """
    trials = [(problem, plan, False)] + ([(*_without_pool(problem, device, plan), True)] if training else [])
    try:
        for each, its_plan, gradients in trials:
            with torch.set_grad_enabled(gradients):
                trial = Trial.random(each, device, gradients)
                if not all(_close(*pair) for pair in zip(trial.run(its_plan), trial.run(None), strict=True)):
                    return False
    except Exception as error:
        return None if _ran_out(error) else False
    return True


def _without_pool(problem: Problem, device: torch.device, plan: Plan) -> tuple[Problem, Plan]:
    """The problem without its pool, with a plan that fits: results four times as many may not fit the same one."""
    from lowrank_cnn.kernels.launch import capability_of, plans

    if problem.pool is None:
        return problem, plan
    whole = replace(problem, pool=None)
    return whole, plans(whole, capability=capability_of(device))[0]


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A function's work as a graph, after it has run outside of one: compiled, allocated, algorithms chosen."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with for_graphs():
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


@dataclass(frozen=True)
class Trial:
    """A problem with random numbers to try its paths on: one forward, and its backward where training."""

    problem: Problem
    x: Tensor
    weights: list[Tensor]
    bias: Tensor
    training: bool

    @classmethod
    def random(cls, problem: Problem, device: torch.device, training: bool) -> Trial:
        # A generator of its own: what training draws must not hang on what was measured before.
        numbers = torch.Generator(device).manual_seed(0)

        def draw(*size: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype, generator=numbers)

        x = draw(problem.batch, problem.channels, problem.height, problem.width)
        weights = [draw(g.filters, problem.channels, g.height, g.width) for g in problem.groups]
        bias = draw(problem.filters, dtype=torch.float32)
        return cls(problem, x.contiguous(memory_format=torch.channels_last), weights, bias, training)

    @property
    def need_input(self) -> bool:
        """The first layer's input, of few channels, needs no gradient."""
        return self.problem.channels > 4

    def run(self, plan: Plan | None) -> list[Tensor]:
        """The result, or the gradients of weights, bias and input; None is torch's own path."""
        return self._fused(plan) if plan else self._by_torch()

    def call(self, plan: Plan | None) -> list[Tensor]:
        """The same as a layer calls it: with what an operator, autograd and the choice cost the host."""
        from lowrank_cnn.kernels.dispatch import composite_conv2d

        with forced("off" if plan is None else "on"):
            return self._differentiated(composite_conv2d)

    def _fused(self, plan: Plan) -> list[Tensor]:
        from lowrank_cnn.kernels import launch

        codes = empty_codes(self.problem, self.x) if self.training else None
        y = launch.forward(plan, self.problem, self.x, self.weights, self.bias, codes)
        if not self.training:
            return [y]
        seen = codes if codes is not None else y.permute(0, 2, 3, 1)
        need = self.need_input
        dx, dw, db = launch.gradients(self.problem, y, self.x, self.weights, seen, need_input=need)
        return [part for part in (*dw, db, dx) if part is not None]

    def _by_torch(self) -> list[Tensor]:
        return self._differentiated(composite_by_torch)

    def _differentiated(self, convolve: Callable[..., Tensor]) -> list[Tensor]:
        problem = self.problem
        options = {
            "stride": problem.stride,
            "padding": _sides(problem),
            "relu": problem.relu,
            "pool": problem.pool,
        }
        inputs = [*self.weights, self.bias, *([self.x] if self.need_input else [])]
        for tensor in inputs:
            tensor.requires_grad_(self.training)
        y = convolve(self.x, self.weights, self.bias, **options)
        return list(torch.autograd.grad(y, inputs, y.detach())) if self.training else [y]


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _per_call(run: Callable[[], object]) -> float:
    """Milliseconds per call of several in a row: whichever of host and device takes longer."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / CALLS


def _ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out: at once, or behind an error of the graph that was being captured."""
    return error is not None and (is_out_of_memory(error) or _ran_out(error.__context__))


def _close(ours: Tensor, right: Tensor) -> bool:
    difference = torch.linalg.vector_norm(ours.float() - right.float())
    return bool(difference <= TOLERANCE * torch.linalg.vector_norm(right.float()))


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
