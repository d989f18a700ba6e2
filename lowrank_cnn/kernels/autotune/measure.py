"""Time the paths of a problem on its device, a fused plan or torch's own operations, and compare their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.kernels.autotune.trial import Trial
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.system.compare import difference
from lowrank_cnn.system.errors import LostDeviceError
from lowrank_cnn.system.memory import is_out_of_memory

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan

TOLERANCE = 2e-2
"""Between two ways to round a layer in half precision, relative to the norm of the result."""
CALLS = 10


class Times(NamedTuple):
    """Milliseconds of one path: in a replayed graph, and as a call from Python among many."""

    graph: float
    call: float


FAILED = Times(float("inf"), float("inf"))


def times(
    problem: Problem,
    device: torch.device,
    plan: KernelPlan | None,
    *,
    training: bool,
    bias: torch.dtype | None = torch.float32,
    repeats: int = 7,
) -> Times | None:
    """What a plan takes (or torch's own path, without one): infinite where it fails, None where memory ran out."""
    try:
        with torch.cuda.device(device), torch.set_grad_enabled(training):
            trial = Trial.random(problem, device, training, bias)
            graph = captured(lambda: trial.run(plan))
            graph.replay()
            return Times(median(_replay(graph) for _ in range(repeats)), _per_call(lambda: trial.call(plan)))
    except Exception as error:  # whatever keeps a plan from running on this device keeps it from being chosen
        _refuse_to_go_on(error, problem, device, plan)
        return None if _ran_out(error) else FAILED


def agrees(
    problem: Problem,
    device: torch.device,
    plan: KernelPlan,
    *,
    training: bool,
    bias: torch.dtype | None = torch.float32,
) -> bool | None:
    """Whether a plan gives what torch gives, gradients too where training; a plan that fails does not.

    None where memory ran out before that was known.
    """
    try:
        with torch.no_grad():
            trial = Trial.random(problem, device, False, bias)
            if not _all_close(trial.run(plan), trial.run(None)):
                return False
        return not training or _gradients_agree(Trial.random(problem, device, True, bias), plan)
    except Exception as error:
        _refuse_to_go_on(error, problem, device, plan)
        return None if _ran_out(error) else False


def _gradients_agree(trial: Trial, plan: KernelPlan) -> bool:
    """With a pool, by its own choice of winners: rounded values tie, and either may win."""
    if trial.problem.pool is None:
        return _all_close(trial.run(plan), trial.run(None))
    y, codes, ours = trial.pooled(plan)
    won, right = trial.won_by(codes, y)
    return _all_close([y, *ours], [won, *right])


def _all_close(ours: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return difference(list(ours), list(right), by="norm") <= TOLERANCE


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


def _refuse_to_go_on(error: Exception, problem: Problem, device: torch.device, plan: KernelPlan | None) -> None:
    """After an illegal access or instruction a process has lost its device: say what ran then, and stop."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:
        if "captur" in str(lost) or is_out_of_memory(lost):  # a graph that another thread records forbids to ask
            return
        reason = str(lost).strip().partition("\n")[0]
        raise LostDeviceError(
            f"the GPU stopped while {plan or 'torch'} was measured on {problem} ({reason}), and this process "
            "cannot go on. Please report it; LOWRANK_KERNELS=off does without such kernels."
        ) from error


def _ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out: at once, or behind an error of the graph that was being captured."""
    return error is not None and (is_out_of_memory(error) or _ran_out(error.__context__))
