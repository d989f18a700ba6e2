"""Fused or not: what is supported, what was measured faster here, and the choice, kept on disk.

    LOWRANK_KERNELS=off   torch's own convolutions, always
    LOWRANK_KERNELS=on    the fused kernels wherever they can
    LOWRANK_KERNELS=auto  the faster of the two on this device and shape, measured once (the default)

Nothing is measured while a CUDA graph is captured or torch.compile traces: then the stored choice holds, or
the default one. `tune` measures ahead of time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowrank_cnn.errors import LowRankError
from lowrank_cnn.kernels import store
from lowrank_cnn.kernels.measure import milliseconds
from lowrank_cnn.kernels.problem import Pair, Problem, Sides, describe
from lowrank_cnn.kernels.reference import composite_reference

if TYPE_CHECKING:
    from lowrank_cnn.kernels.launch import Plan

MODES = ("off", "on", "auto")
_forced: ContextVar[str | None] = ContextVar("lowrank_kernels", default=None)


@dataclass(frozen=True)
class Choice:
    """Which path a problem takes, and why."""

    fused: bool
    why: str
    plan: Plan | None = None


def composite_conv2d(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    *,
    stride: Pair = (1, 1),
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
) -> Tensor:
    """One composite layer with what follows it: fused where that is supported and faster, else by torch."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    options: dict[str, Any] = {"stride": stride, "padding": padding, "relu": relu, "pool": pool}
    if not _worth_asking(x):
        return _eager(x, weights, bias, options)
    problem = describe(x, weights, **options)
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    if not choose(problem, x.device, training=training, need_input=x.requires_grad).fused:
        return _eager(x, weights, bias, options)
    from lowrank_cnn.kernels.ops import composite_conv2d as fused
    from lowrank_cnn.kernels.ops import flat_padding

    codes = training and pool is not None
    return fused(x, list(weights), bias, list(stride), flat_padding(padding), relu, pool or "", codes)[0]


def mode() -> str:
    """How to choose: from the `forced` block, else the environment, else "auto"."""
    chosen = _forced.get() or os.environ.get("LOWRANK_KERNELS", "auto")
    if chosen not in MODES:
        raise LowRankError(f"LOWRANK_KERNELS is {', '.join(MODES)}, not {chosen!r}.")
    return chosen


@contextlib.contextmanager
def forced(chosen: str) -> Iterator[None]:
    """Within the block, choose as `chosen` says."""
    token = _forced.set(chosen)
    try:
        mode()
        yield
    finally:
        _forced.reset(token)


def unsupported(
    problem: Problem, device: torch.device, *, training: bool = False, need_input: bool = True
) -> str | None:
    """Why the fused kernels cannot take a problem on a device, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{problem.dtype} is not bfloat16, float16 or float32"
    if problem.dtype == torch.float32 and device.type == "cuda" and not torch.backends.cudnn.allow_tf32:
        return "float32 without TF32"
    if not _plans(problem, device):
        return "no kernel takes this stride, these channels or these taps"
    return _untrainable(problem, need_input) if training else None


def _untrainable(problem: Problem, need_input: bool) -> str | None:
    from lowrank_cnn.kernels import stem, tiled

    reason = tiled.unsupported(problem)
    if reason is None or (stem.unsupported(problem) is None and not need_input):
        return None
    return f"no gradient for {reason}"


def choose(problem: Problem, device: torch.device, *, training: bool, need_input: bool = True) -> Choice:
    """The path of a problem under the current mode; in training, `need_input` asks for the input's gradient."""
    how = mode()
    if how == "off":
        return Choice(False, "switched off")
    if reason := unsupported(problem, device, training=training, need_input=need_input):
        return Choice(False, reason)
    if how == "on":
        return Choice(True, "forced", _stored_plan(problem, device, training) or _plans(problem, device)[0])
    return _stored(problem, device, training) or _measured(problem, device, training) or _default(problem, device)


def plan_for(problem: Problem, device: torch.device) -> Plan:
    """The plan of a problem that is known to run fused."""
    for training in (False, True):
        if plan := _stored_plan(problem, device, training):
            return plan
    return _plans(problem, device)[0]


def explain(problem: Problem, device: torch.device | str = "cuda", *, training: bool = False) -> str:
    """Which path a problem takes here and why, in one line; nothing is measured."""
    device = torch.device(device)
    if mode() != "auto" or unsupported(problem, device, training=training, need_input=False):
        choice = choose(problem, device, training=training, need_input=False)
    else:
        choice = _stored(problem, device, training) or _default(problem, device)
    return f"{problem}: {'fused ' + str(choice.plan) if choice.fused else 'torch'} ({choice.why})"


def tune(model: torch.nn.Module, example: Tensor, *, training: bool = False) -> None:
    """Measure every plan of every layer a model calls on an example; later runs take the fastest."""
    with _tuning(), torch.set_grad_enabled(training):
        model(example)
    store.save()


_tuning_now: ContextVar[bool] = ContextVar("lowrank_tuning", default=False)


@contextlib.contextmanager
def _tuning() -> Iterator[None]:
    token = _tuning_now.set(True)
    try:
        yield
    finally:
        _tuning_now.reset(token)


def _worth_asking(x: Tensor) -> bool:
    """Off the GPU only the interpreter could run the kernels, which is for tests that ask for it."""
    return x.is_cuda or (mode() == "on" and os.environ.get("TRITON_INTERPRET") == "1")


def _eager(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    bias = bias if bias is None else bias.to(x.dtype)
    return composite_reference(x, weights, bias, **options)


def _plans(problem: Problem, device: torch.device) -> list[Plan]:
    from lowrank_cnn.kernels.launch import plans

    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return plans(problem, hopper=hopper)


def _default(problem: Problem, device: torch.device) -> Choice:
    """Unmeasured: fused on Hopper where the work is large enough to hide a launch, else torch."""
    plan = _plans(problem, device)[0]
    large = problem.macs > 1e8
    if plan.kernel in ("hopper", "stem") and large:
        return Choice(True, "not measured; the default for large layers", plan)
    return Choice(False, "not measured; the default for small layers and other kernels")


def _measured(problem: Problem, device: torch.device, training: bool) -> Choice | None:
    """Time the paths now, unless a graph is being captured or traced."""
    if torch.compiler.is_compiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    plans = _plans(problem, device)
    plans = plans if _tuning_now.get() else plans[:1]
    times = {str(plan): milliseconds(problem, device, plan, training=training) for plan in plans}
    eager = milliseconds(problem, device, None, training=training)
    best = min(plans, key=lambda plan: times[str(plan)])
    entry = {"torch_ms": eager, "fused_ms": times[str(best)], "plan": best.to_dict()}
    store.entries()[_key(problem, training)] = entry
    store.save()
    return _choice(entry)


def _choice(entry: dict[str, Any]) -> Choice:
    from lowrank_cnn.kernels.launch import Plan

    why = f"measured: fused {entry['fused_ms']:.3f} ms, torch {entry['torch_ms']:.3f} ms"
    fused = entry["fused_ms"] < entry["torch_ms"]
    return Choice(fused, why, Plan.from_dict(entry["plan"]) if fused else None)


def _key(problem: Problem, training: bool) -> str:
    offsets = ",".join(f"{g.top}:{g.left}" for g in problem.groups)
    return f"{problem} {offsets} {'training' if training else 'inference'}"


def _stored(problem: Problem, device: torch.device, training: bool) -> Choice | None:
    entry = store.entries().get(_key(problem, training)) if device.type == "cuda" else None
    return _choice(entry) if entry else None


def _stored_plan(problem: Problem, device: torch.device, training: bool) -> Plan | None:
    from lowrank_cnn.kernels.launch import Plan

    entry = store.entries().get(_key(problem, training)) if device.type == "cuda" else None
    return Plan.from_dict(entry["plan"]) if entry else None
