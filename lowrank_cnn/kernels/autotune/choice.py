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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from lowrank_cnn.kernels.autotune import store
from lowrank_cnn.kernels.autotune.measure import FAILED, Times, agrees, times
from lowrank_cnn.kernels.autotune.support import Asked, plans_of, refusal
from lowrank_cnn.kernels.mode import is_for_graphs, is_tuning, mode, survey
from lowrank_cnn.kernels.problem import Pair, Problem, Sides, pose

if TYPE_CHECKING:
    from lowrank_cnn.kernels.conv.plans import Plan

CLEARLY = 2
"""So many times slower than ours, torch's path is not measured again with cuDNN's search."""


@dataclass(frozen=True)
class Choice:
    """Which path a problem takes, and why."""

    fused: bool
    why: str
    plan: Plan | None = None


def fuses(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    how: tuple[Pair, tuple[Sides, ...], bool, str | None],
    training: bool,
    need_input: bool,
    bias: torch.dtype | None = torch.float32,
) -> bool:
    """The choice, asked with plain values: sizes of the input and the weights, stride, padding, ReLU, pool."""
    stride, padding, relu, pool = how
    problem = pose(shapes[0], shapes[1:], dtype, stride=stride, padding=padding, relu=relu, pool=pool)
    return choose(problem, device, training=training, need_input=need_input, bias=bias).fused


def choose(
    problem: Problem,
    device: torch.device,
    *,
    training: bool,
    need_input: bool = True,
    bias: torch.dtype | None = torch.float32,
) -> Choice:
    """The path of a problem under the current mode; in training, `need_input` asks for the input's gradient."""
    asked = Asked(problem, device, training, need_input, bias)
    if mode() == "off":
        return Choice(False, "switched off")
    if reason := refusal(asked):
        return Choice(False, reason)
    if (noted := survey()) is not None:
        noted.append(asked)
        return Choice(False, "only asked for")
    if mode() == "on":
        return Choice(True, "forced", plan_for(problem, device))
    return (None if _to_tune(asked) else _stored(asked)) or _measured(asked) or _default(asked)


def in_question(asked: Asked) -> list[Plan]:
    """The plans that a choice would try: all where it tunes, the default, or none but the one it has stored."""
    if mode() == "on" or not (_to_tune(asked) or _stored(asked) is None):
        choice = choose(asked.problem, asked.device, training=asked.training, need_input=asked.need_input)
        return [choice.plan] if choice.plan else []
    plans = list(plans_of(asked.problem, asked.device))
    return plans if is_tuning() else plans[:1]


def _to_tune(asked: Asked) -> bool:
    return is_tuning() and not (_entry(asked) or {}).get("tuned")


def fastest(problem: Problem, device: torch.device, *, training: bool, need_input: bool = True) -> float | None:
    """Milliseconds of the path that a problem takes, measured now if that can be; None where it is not known."""
    choose(problem, device, training=training, need_input=need_input)
    entry = _entry(Asked(problem, device, training, need_input))
    return min(entry[path][_way()] for path in ("fused", "torch")) if entry else None


def plan_for(problem: Problem, device: torch.device, *, training: bool = False) -> Plan:
    """The plan of a problem that is known to run fused: the measured one, or the default."""
    from lowrank_cnn.kernels.conv.plans import Plan

    for purpose in (training, not training):
        if entry := _entry(Asked(problem, device, purpose)):
            return Plan.from_dict(entry["plan"])
    return plans_of(problem, device)[0]


def explain(problem: Problem, device: torch.device | str = "cuda", *, training: bool = False) -> str:
    """Which path a problem takes here and why, in one line; nothing is measured."""
    asked = Asked(problem, torch.device(device), training, need_input=problem.channels > 4)
    if mode() != "auto" or refusal(asked):
        choice = choose(problem, asked.device, training=training, need_input=asked.need_input)
    else:
        choice = _stored(asked) or _default(asked)
    return f"{problem}: {'fused ' + str(choice.plan) if choice.fused else 'torch'} ({choice.why})"


def _default(asked: Asked) -> Choice:
    """Unmeasured: fused on Hopper where the work is large enough to hide a launch, else torch."""
    hopper = asked.device.type == "cuda" and torch.cuda.get_device_capability(asked.device)[0] == 9
    if hopper and asked.problem.macs > 1e8:
        return Choice(True, "not measured; the default for large layers", plans_of(asked.problem, asked.device)[0])
    return Choice(False, "not measured; the default for small layers and other GPUs")


def _measured(asked: Asked) -> Choice | None:
    """Time the paths now, unless a graph is being captured or traced."""
    problem, device, training = asked.problem, asked.device, asked.training
    if torch.compiler.is_compiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    plan, tried = _fastest(problem, device, asked.bias)
    ours = times(problem, device, plan, training=training, bias=asked.bias)
    by_torch = _by_torch(asked, ours or FAILED)
    if all(path in (None, FAILED) for path in (ours, by_torch)):
        return None  # nothing runs here now, as within a tracer's own tensors
    right = agrees(problem, device, plan, training=training, bias=asked.bias)
    entry = {
        "torch": (by_torch or FAILED)._asdict(),
        "fused": ((right and ours) or FAILED)._asdict(),
        "plan": plan.to_dict(),
        "tuned": is_tuning(),
    }
    # Memory that ran out says nothing of a path: this run does without it, and a later one measures again.
    store.keep(_key(asked), entry, lasting=tried and None not in (by_torch, ours, right))
    return _choice(entry)


def _by_torch(asked: Asked, ours: Times) -> Times | None:
    """What torch's own path takes.

    Where cuDNN searches for its fastest algorithms, it does so for seconds a layer: only where that may decide.
    """
    how = {"training": asked.training, "bias": asked.bias}
    if torch.backends.cudnn.benchmark and asked.problem.dtype.itemsize == 2:
        with _unsearched():
            found = times(asked.problem, asked.device, None, **how)
        if found is None or all(CLEARLY * mine < theirs for mine, theirs in zip(ours, found, strict=True)):
            return found
    return times(asked.problem, asked.device, None, **how)


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


def _fastest(problem: Problem, device: torch.device, bias: torch.dtype | None) -> tuple[Plan, bool]:
    """Where tuning, the plan whose forward is right and fastest, and whether memory let all be tried."""
    plans = plans_of(problem, device)
    if not is_tuning() or len(plans) == 1:
        return plans[0], True
    if (tuned := _tuned(problem, device)) is not None:
        return tuned, True
    right = {plan: agrees(problem, device, plan, training=False, bias=bias) for plan in plans}
    candidates = [plan for plan in plans if right[plan]] or plans
    taken = {plan: times(problem, device, plan, training=False, bias=bias) for plan in candidates}
    tried = None not in (*right.values(), *taken.values())
    return min(taken, key=lambda plan: (taken[plan] or FAILED).graph), tried


def _tuned(problem: Problem, device: torch.device) -> Plan | None:
    """The plan that was found fastest before, be it for inference or for training: forwards are alike."""
    from lowrank_cnn.kernels.conv.plans import Plan

    for training in (False, True):
        entry = _entry(Asked(problem, device, training))
        if entry and entry["tuned"]:
            return Plan.from_dict(entry["plan"])
    return None


def _choice(entry: dict[str, Any]) -> Choice:
    from lowrank_cnn.kernels.conv.plans import Plan

    way = _way()
    ours, theirs = entry["fused"][way], entry["torch"][way]
    why = f"measured, in a {way}: fused {ours:.3f} ms, torch {theirs:.3f} ms"
    return Choice(True, why, Plan.from_dict(entry["plan"])) if ours < theirs else Choice(False, why)


def _way() -> str:
    return "graph" if is_for_graphs() else "call"


@lru_cache(maxsize=4096)
def _key(asked: Asked) -> str:
    offsets = ",".join(f"{g.top}:{g.left}" for g in asked.problem.groups)
    return f"{asked.problem} {offsets} {'training' if asked.training else 'inference'}"


def _entry(asked: Asked) -> dict[str, Any] | None:
    """What was measured before, unless its plan is one that the kernels no longer take."""
    entry = store.find(_key(asked)) if asked.device.type == "cuda" else None
    if entry is None:
        return None
    from lowrank_cnn.kernels.conv.plans import refusal

    return entry if refusal(entry["plan"]["kernel"], asked.problem) is None else None


def _stored(asked: Asked) -> Choice | None:
    entry = _entry(asked)
    return _choice(entry) if entry else None
