"""Look up what was measured: the entry of a request, and the plan it names. Nothing is measured here."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from lowrank_cnn.kernels.autotune import store
from lowrank_cnn.kernels.autotune.support import Request, plans_of
from lowrank_cnn.kernels.problem import Problem

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan


@lru_cache(maxsize=4096)
def key_of(request: Request) -> str:
    """Under which name a request's entry is stored: a problem's text lacks the offsets of its groups."""
    offsets = ",".join(f"{g.top}:{g.left}" for g in request.problem.groups)
    return f"{request.problem} {offsets} {'training' if request.training else 'inference'}"


def entry_of(request: Request) -> dict[str, Any] | None:
    """What was measured before, unless its plan is one that the kernels no longer take."""
    entry = store.find(key_of(request)) if request.device.type == "cuda" else None
    if entry is None:
        return None
    from lowrank_cnn.kernels.conv.plans import refusal

    try:
        return entry if refusal(plan_in(entry).kernel, request.problem) is None else None
    except (KeyError, TypeError):  # a kernel or a tile of another version
        return None


def plan_in(entry: dict[str, Any]) -> KernelPlan:
    """The fastest plan of an entry."""
    from lowrank_cnn.kernels.conv.plans import KernelPlan

    return KernelPlan.parse(entry["plan"])


def plan_for(problem: Problem, device: torch.device, *, training: bool = False) -> KernelPlan:
    """The plan of a problem that is known to run fused: the measured one, or the default.

    The forwards of inference and training are alike: where one was not measured, the other's plan serves.
    """
    for purpose in (training, not training):
        if entry := entry_of(Request(problem, device, purpose)):
            return plan_in(entry)
    return plans_of(problem, device)[0]


def tuned_plan(problem: Problem, device: torch.device) -> KernelPlan | None:
    """The plan that tuning found fastest before, for inference or for training."""
    for training in (False, True):
        entry = entry_of(Request(problem, device, training))
        if entry and entry["tuned"]:
            return plan_in(entry)
    return None
