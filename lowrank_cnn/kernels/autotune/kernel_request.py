"""What a choice between the fused kernels and torch is made for, and whether the kernels can run it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from lowrank_cnn.kernels import gpu
from lowrank_cnn.kernels.problem import Problem

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan


@dataclass(frozen=True)
class Request:
    """A problem on a device. In training, `need_input` asks for the input's gradient.

    `bias` is the type of the bias, None for none. It decides which kernels are compiled, not which path is chosen.
    """

    problem: Problem
    device: torch.device
    training: bool = False
    need_input: bool = True
    bias: torch.dtype | None = torch.float32

    @property
    def as_dense(self) -> Request | None:
        """The request of the layer as one dense conv; None if it is one already, or is not trained."""
        several = len(self.problem.groups) > 1
        return replace(self, problem=self.problem.as_dense) if self.training and several else None


@dataclass(frozen=True)
class DensePath:
    """A composite layer run as one dense conv over the taps of all groups: by a plan, or by torch for None."""

    plan: KernelPlan | None


def unsupported(
    problem: Problem, device: torch.device, *, training: bool = False, need_input: bool = True
) -> str | None:
    """Why the fused kernels cannot run a problem on a device, or None if they can."""
    return refusal(Request(problem, device, training, need_input))


def refusal(request: Request) -> str | None:
    """Why the fused kernels cannot run a request, or None if they can."""
    exact = request.problem.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "float32 without TF32" if exact and request.device.type == "cuda" else _unable(request)


@lru_cache(maxsize=4096)
def _unable(request: Request) -> str | None:
    problem = request.problem
    if find_spec("triton") is None:
        return "Triton is not installed"
    if request.device.type == "cuda" and gpu.capability_of(request.device) < gpu.OLDEST:
        return "the GPU is older than compute capability 8.0"
    if problem.dtype not in gpu.TYPES:
        return f"{problem.dtype} is not bfloat16, float16 or float32"
    if not plans_of(problem, request.device):
        return "no kernel takes this stride, these channels, these taps or this epilogue"
    return _untrainable(request) if request.training else None


def _untrainable(request: Request) -> str | None:
    from lowrank_cnn.kernels.conv import fold, stem, tiled
    from lowrank_cnn.kernels.conv.gradients import has_windows

    problem = request.problem
    if problem.residual or problem.activation not in (None, "relu"):
        return "no gradient for a residual or for this activation"
    inner = fold.folded(problem) or problem
    reason = tiled.unsupported(inner) or (f"stride {inner.stride}" if inner.stride != (1, 1) else None)
    first = stem.unsupported(problem) is None or has_windows(problem, gpu.capability_of(request.device))
    return None if reason is None or (first and not request.need_input) else f"no gradient for {reason}"


@lru_cache(maxsize=4096)
def plans_of(problem: Problem, device: torch.device) -> tuple[KernelPlan, ...]:
    """The plans of a problem on a device, the default first."""
    from lowrank_cnn.kernels.conv.plans import plans

    return tuple(plans(problem, capability=gpu.capability_of(device)))
