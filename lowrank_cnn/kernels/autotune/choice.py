"""Fused or not: what is supported, what was measured faster here, and the choice, kept on disk.

Two times are measured for each path. The device's own decides for CUDA graphs; the time of a call from Python, in
which launches of small kernels weigh more than their work, decides everywhere else. Nothing is measured while a
graph is captured or torch.compile traces: then the stored choice holds, or the default one. A plan whose results
are not torch's is never chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowrank_cnn.kernels.autotune import store
from lowrank_cnn.kernels.autotune.measure import FAILED, Times, agrees, times
from lowrank_cnn.kernels.autotune.support import Request, plans_of, refusal
from lowrank_cnn.kernels.autotune.table import entry_of, key_of, plan_for, plan_in, tuned_plan
from lowrank_cnn.kernels.mode import is_for_graphs, is_tuning, mode, survey
from lowrank_cnn.kernels.problem import CallOptions, Problem, pose

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import KernelPlan

DECISIVE_RATIO = 2
"""Where torch's path takes so many times as long as ours, it is not measured again with cuDNN's search."""


@dataclass(frozen=True)
class Choice:
    """Which path a problem takes, and why."""

    fused: bool
    why: str
    plan: KernelPlan | None = None


def plan_text(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    asked: tuple,
    training: bool,
    need_input: bool,
    bias: torch.dtype | None = torch.float32,
) -> str | None:
    """The choice for a call, by plain values: a plan as text, None for torch.

    `shapes` are the input's size and those of the weights; `asked` holds the fields of `CallOptions`.
    """
    problem = pose(shapes[0], shapes[1:], dtype, **CallOptions(*asked)._asdict())
    chosen = choose(problem, device, training=training, need_input=need_input, bias=bias)
    return str(chosen.plan) if chosen.fused else None


def choose(
    problem: Problem,
    device: torch.device,
    *,
    training: bool,
    need_input: bool = True,
    bias: torch.dtype | None = torch.float32,
) -> Choice:
    """The path of a problem under the current mode; in training, `need_input` asks for the input's gradient."""
    request = Request(problem, device, training, need_input, bias)
    if mode() == "off":
        return Choice(False, "switched off")
    if reason := refusal(request):
        return Choice(False, reason)
    if (noted := survey()) is not None:
        noted.append(request)
        return Choice(False, "only surveyed")
    if mode() == "on":
        return Choice(True, "forced", plan_for(problem, device))
    return (None if _to_tune(request) else _stored(request)) or _measured(request) or _default(request)


def in_question(request: Request) -> list[KernelPlan]:
    """The plans that a choice would try: all where it tunes, the default, or none but the one it has stored."""
    if mode() == "on" or not (_to_tune(request) or _stored(request) is None):
        choice = choose(request.problem, request.device, training=request.training, need_input=request.need_input)
        return [choice.plan] if choice.plan else []
    plans = list(plans_of(request.problem, request.device))
    return plans if is_tuning() else plans[:1]


def _to_tune(request: Request) -> bool:
    return is_tuning() and not (entry_of(request) or {}).get("tuned")


def fastest(problem: Problem, device: torch.device, *, training: bool, need_input: bool = True) -> float | None:
    """Milliseconds of the path that a problem takes, measured now if that can be; None where it is not known."""
    choose(problem, device, training=training, need_input=need_input)
    entry = entry_of(Request(problem, device, training, need_input))
    return min(entry[path][_way()] for path in ("fused", "torch")) if entry else None


def explain(problem: Problem, device: torch.device | str = "cuda", *, training: bool = False) -> str:
    """Which path a problem takes here and why, in one line; nothing is measured."""
    request = Request(problem, torch.device(device), training, need_input=problem.channels > 4)
    if mode() != "auto" or refusal(request):
        choice = choose(problem, request.device, training=training, need_input=request.need_input)
    else:
        choice = _stored(request) or _default(request)
    return f"{problem}: {'fused ' + str(choice.plan) if choice.fused else 'torch'} ({choice.why})"


def _default(request: Request) -> Choice:
    """Unmeasured: fused on Hopper where the work is large enough to hide a launch, else torch."""
    hopper = request.device.type == "cuda" and torch.cuda.get_device_capability(request.device)[0] == 9
    if hopper and request.problem.macs > 1e8:
        return Choice(
            True, "not measured; the default for large layers", plans_of(request.problem, request.device)[0]
        )
    return Choice(False, "not measured; the default for small layers and other GPUs")


def _measured(request: Request) -> Choice | None:
    """Time the paths now, unless a graph is being captured or traced."""
    problem, device, training = request.problem, request.device, request.training
    if torch.compiler.is_compiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    plan, tried = _fastest(problem, device, request.bias)
    ours = times(problem, device, plan, training=training, bias=request.bias)
    by_torch = _by_torch(request, ours or FAILED)
    if all(path in (None, FAILED) for path in (ours, by_torch)):
        return None  # nothing runs here now, as within a tracer's own tensors
    right = agrees(problem, device, plan, training=training, bias=request.bias)
    entry = {
        "torch": (by_torch or FAILED)._asdict(),
        "fused": ((right and ours) or FAILED)._asdict(),
        "plan": str(plan),
        "tuned": is_tuning(),
    }
    # Memory that ran out says nothing of a path: this run does without it, and a later one measures again.
    store.keep(key_of(request), entry, lasting=tried and None not in (by_torch, ours, right))
    return _choice(entry)


def _by_torch(request: Request, ours: Times) -> Times | None:
    """What torch's own path takes.

    Where cuDNN searches for its fastest algorithms, it does so for seconds a layer: only where that may decide.
    """
    how = {"training": request.training, "bias": request.bias}
    if torch.backends.cudnn.benchmark and request.problem.dtype.itemsize == 2:
        with _unsearched():
            found = times(request.problem, request.device, None, **how)
        if found is None or all(DECISIVE_RATIO * mine < theirs for mine, theirs in zip(ours, found, strict=True)):
            return found
    return times(request.problem, request.device, None, **how)


@contextlib.contextmanager
def _unsearched() -> Iterator[None]:
    """Without cuDNN's search, and apart from what torch keeps for convolutions with it.

    Torch keeps the algorithm of a shape whether it was searched for or not, and looks no further. TF32, which
    means nothing to 16 bits, is part of what it keeps them by.
    """
    cudnn = torch.backends.cudnn
    searches, exact = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32 = False, not exact
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = searches, exact


def _fastest(problem: Problem, device: torch.device, bias: torch.dtype | None) -> tuple[KernelPlan, bool]:
    """Where tuning, the plan whose forward is right and fastest, and whether memory let all be tried."""
    plans = plans_of(problem, device)
    if not is_tuning() or len(plans) == 1:
        return plans[0], True
    if (tuned := tuned_plan(problem, device)) is not None:
        return tuned, True
    right = {plan: agrees(problem, device, plan, training=False, bias=bias) for plan in plans}
    candidates = [plan for plan in plans if right[plan]] or plans
    taken = {plan: times(problem, device, plan, training=False, bias=bias) for plan in candidates}
    tried = None not in (*right.values(), *taken.values())
    return min(taken, key=lambda plan: (taken[plan] or FAILED).graph), tried


def _choice(entry: dict[str, Any]) -> Choice:
    way = _way()
    ours, theirs = entry["fused"][way], entry["torch"][way]
    why = f"measured, in a {way}: fused {ours:.3f} ms, torch {theirs:.3f} ms"
    return Choice(True, why, plan_in(entry)) if ours < theirs else Choice(False, why)


def _way() -> str:
    return "graph" if is_for_graphs() else "call"


def _stored(request: Request) -> Choice | None:
    entry = entry_of(request)
    return _choice(entry) if entry else None
