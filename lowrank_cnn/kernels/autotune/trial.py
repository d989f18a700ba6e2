"""Run a problem on random numbers, by a fused plan, by torch or as one dense conv: time and compare the paths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowrank_cnn.core.clock import measure
from lowrank_cnn.core.compare import difference
from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LostDeviceError, first_line
from lowrank_cnn.kernels.autotune.tuned import FAILED, DensePath, Request, Times
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.problem import CallOptions, Problem, empty_codes
from lowrank_cnn.kernels.reference import composite_by_torch

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan

TOLERANCE = 2e-2
"""The largest difference between two roundings of a layer in half precision, relative to the result's norm."""
CALLS = 10


Path = Any
"""A `KernelPlan`, a `DensePath`, or None for torch."""
WRONG, OUT_OF_MEMORY = "another result", "out of memory"


def times(request: Request, path: Path, *, repeats: int = 7) -> Times | None:
    """The times of a path: infinite if it fails, None if memory ran out."""
    try:
        with torch.cuda.device(request.device), torch.set_grad_enabled(request.training):
            trial = KernelTrial.random(request)
            graph = captured(lambda: trial.run(path))
            replayed = measure({path: graph.replay}, repeats=repeats, cuda=True)[path].ms
            return Times(replayed, _per_call(lambda: trial.call(path)))
    except Exception as error:  # a plan that fails on this device, for any reason, is not chosen
        _raise_if_lost(error, request, path)
        return None if _ran_out(error) else FAILED


def mismatch(request: Request, path: Path) -> str:
    """Why a path's results, in training also its gradients, differ from torch's; empty if they agree."""
    try:
        with torch.no_grad():
            trial = KernelTrial.random(replace(request, training=False))
            if not _all_close(trial.run(path), trial.run(None)):
                return WRONG
        right = not request.training or _gradients_agree(KernelTrial.random(request), path)
        return "" if right else WRONG
    except Exception as error:
        _raise_if_lost(error, request, path)
        return OUT_OF_MEMORY if _ran_out(error) else first_line(error)


@dataclass(frozen=True)
class KernelTrial:
    """A problem with random numbers: one forward, and one backward if training."""

    problem: Problem
    x: Tensor
    weights: list[Tensor]
    bias: Tensor | None
    training: bool
    residual: Tensor | None = None

    @classmethod
    def random(cls, request: Request) -> KernelTrial:
        """Random inputs for a request."""
        problem = request.problem
        # A generator of its own: measuring must not change the random numbers of a training run.
        numbers = torch.Generator(request.device).manual_seed(0)

        def draw(*size: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            made = torch.randn(size, device=request.device, dtype=dtype, generator=numbers)
            return made.contiguous(memory_format=torch.channels_last) if len(size) == 4 else made

        x = draw(problem.batch, problem.channels, problem.height, problem.width)
        weights = [draw(*shape).contiguous() for shape in problem.shapes]
        bias = None if request.bias is None else draw(problem.filters, dtype=request.bias)
        residual = draw(problem.batch, problem.filters, *problem.result_size) if problem.residual else None
        return cls(problem, x, weights, bias, request.training, residual)

    @property
    def need_input(self) -> bool:
        """The input of a first layer, which has few channels, needs no gradient."""
        return self.problem.channels > 4

    def run(self, plan: Path) -> list[Tensor]:
        """The result, or in training the gradients of weights, bias and input; None runs torch."""
        if plan is None or isinstance(plan, DensePath):
            return self.call(plan)
        y, codes = self.forward(plan)
        if not self.training:
            return [y]
        # Without a pool, the gradient of a ReLU reads the result.
        kept = y.permute(0, 2, 3, 1) if self.problem.relu else y.new_empty(0, dtype=torch.uint8)
        return self.gradients(y, kept if codes is None else codes)

    def call(self, plan: Path) -> list[Tensor]:
        """The same as a layer calls it, with the host's time for the operator and for autograd."""
        from lowrank_cnn.kernels import ops

        p, inputs, weights, padding = self.problem, self._inputs(), self.weights, self.problem.padding
        if isinstance(plan, DensePath):
            weight, sides = ops.enclose(weights, padding)
            weights, padding, plan = [weight], [sides], plan.plan
        asked = CallOptions(p.stride, tuple(padding), p.activation, p.pool, p.residual, p.add_last)
        if plan is None:
            y = composite_by_torch(self.x, weights, self.bias, **asked.arguments, residual=self.residual)
        else:
            how = (asked, self.training and p.pool is not None, False, str(plan))
            y = ops.fused_conv2d(self.x, weights, None, self.bias, self.residual, *how)[0]
        return list(torch.autograd.grad(y, inputs, y.detach())) if self.training else [y]

    def by_winners(self, codes: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Torch's results at the argmax positions in `codes`, and their gradients."""
        problem, inputs = self.problem, self._inputs()
        y = composite_by_torch(self.x, self.weights, self.bias, stride=problem.stride, padding=problem.padding)
        rows, columns = problem.result_size
        y = pad(y, (0, 2 * columns - y.shape[3], 0, 2 * rows - y.shape[2]))  # to whole windows
        place = codes.permute(0, 3, 1, 2).long()
        quads = y.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
        won = quads.gather(-1, place.clamp(max=3).unsqueeze(-1)).squeeze(-1) * (place < 4)
        return won.detach(), list(torch.autograd.grad(won, inputs, grad))

    def forward(self, plan: KernelPlan) -> tuple[Tensor, Tensor | None]:
        from lowrank_cnn.kernels.conv import forward

        codes = empty_codes(self.problem, self.x) if self.training else None
        inputs = (self.x, self.weights, self.bias, codes, self.residual)
        return forward.run_plan(plan, self.problem, *inputs), codes

    def gradients(self, grad: Tensor, seen: Tensor) -> list[Tensor]:
        from lowrank_cnn.kernels.conv import gradients

        need = {"need_input": self.need_input, "need_bias": self.bias is not None}
        dx, dw, db = gradients.compute_gradients(self.problem, grad, self.x, self.weights, seen, **need)
        return [part for part in (*dw, db if need["need_bias"] else None, dx) if part is not None]

    def _inputs(self) -> list[Tensor]:
        """The tensors whose gradients are computed."""
        found = (*self.weights, self.bias, self.x if self.need_input else None)
        return [tensor.requires_grad_(self.training) for tensor in found if tensor is not None]


def _gradients_agree(trial: KernelTrial, plan: Path) -> bool:
    """With a pool, compare at the plan's own argmax positions: rounded values tie, and either may win.

    The plan of a dense path was already compared when the dense conv chose it; only the placement of its weights
    is compared here.
    """
    if isinstance(plan, DensePath) and trial.problem.pool is not None:
        trial, plan = replace(trial, problem=replace(trial.problem, pool=None)), DensePath(None)
    if isinstance(plan, DensePath) or trial.problem.pool is None:
        return _all_close(trial.run(plan), trial.run(None))
    y, codes = trial.forward(plan)
    assert codes is not None
    won, right = trial.by_winners(codes, y)
    return _all_close([y, *trial.gradients(y, codes)], [won, *right])


def _all_close(ours: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return difference(list(ours), list(right), by="norm") <= TOLERANCE


def _per_call(run: Callable[[], object]) -> float:
    """Milliseconds per call of several in a row: the longer of the host's and the device's time."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / CALLS


def _raise_if_lost(error: Exception, request: Request, plan: Path) -> None:
    """Stop if an illegal access or instruction has taken the device from this process, and name what ran."""
    if request.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(request.device)
    except RuntimeError as lost:
        if "captur" in str(lost) or is_out_of_memory(lost):  # another thread may be capturing
            return
        raise LostDeviceError(
            f"the GPU stopped while {plan or 'torch'} was measured on {request.problem} ({first_line(lost)}), and "
            "this process cannot continue. Please report it; LOWRANK_KERNELS=off runs without these kernels."
        ) from error


def _ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out: at once, or behind an error of the graph that was being captured."""
    return error is not None and (is_out_of_memory(error) or _ran_out(error.__context__))
