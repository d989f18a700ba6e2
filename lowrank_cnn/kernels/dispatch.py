"""Fused or not: what is supported, what was measured faster here, and the choice, kept on disk.

    LOWRANK_KERNELS=off   torch's own convolutions, always
    LOWRANK_KERNELS=on    the fused kernels wherever they can
    LOWRANK_KERNELS=auto  the faster of the two on this device and shape, measured once (the default)

Nothing is measured while a CUDA graph is captured or torch.compile traces: then the stored choice holds, or
the default one. `tune` measures ahead of time. What torch.export takes down is torch's own convolutions, which
run anywhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowrank_cnn.errors import LowRankError
from lowrank_cnn.kernels import store
from lowrank_cnn.kernels.measure import milliseconds
from lowrank_cnn.kernels.problem import Pair, Problem, Sides, describe, pose
from lowrank_cnn.kernels.reference import composite_by_torch

if TYPE_CHECKING:
    from lowrank_cnn.kernels.launch import Plan

MODES = ("off", "on", "auto")
_forced: ContextVar[str | None] = ContextVar("lowrank_kernels", default=None)
_tuning: ContextVar[bool] = ContextVar("lowrank_tuning", default=False)


@dataclass(frozen=True)
class Choice:
    """Which path a problem takes, and why."""

    fused: bool
    why: str
    plan: Plan | None = None


@dataclass(frozen=True)
class Asked:
    """What a choice is made for; in training, `need_input` asks for the input's gradient."""

    problem: Problem
    device: torch.device
    training: bool = False
    need_input: bool = True


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
    """One composite layer with what follows it: fused where that is supported and faster, else by torch.

    `padding` has ((top, bottom), (left, right)) for each group; `pool` is "floor" or "ceil" for a 2x2 max-pool
    that rounds so, or None.
    """
    options: dict[str, Any] = {"stride": stride, "padding": padding, "relu": relu, "pool": pool}
    if torch.compiler.is_exporting() or not (x.is_cuda or _decider().asked_for()):
        return composite_by_torch(x, weights, bias, **options)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    # index() makes numbers of sizes that torch.compile holds open: the choice is made for one size.
    shapes = tuple(tuple(map(index, tensor.shape)) for tensor in (x, *weights))
    how = (stride, tuple(padding), relu, pool)
    if not _decider().fuses(shapes, x.dtype, x.device, how, training, x.requires_grad):
        return composite_by_torch(x, weights, bias, **options)
    from lowrank_cnn.kernels.ops import composite_conv2d as fused
    from lowrank_cnn.kernels.ops import flat_padding

    codes = training and pool is not None
    return fused(x, list(weights), bias, list(stride), flat_padding(padding), relu, pool or "", codes)[0]


def _decider() -> Any:
    """Who is asked: this module, or what stands for it while torch.compile traces."""
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels import tracing

        return tracing
    return sys.modules[__name__]


def asked_for() -> bool:
    """Off the GPU only the interpreter could run the kernels, which is for tests that ask for it."""
    return os.environ.get("TRITON_INTERPRET") == "1" and mode() == "on"


def fuses(
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    how: tuple[Pair, tuple[Sides, ...], bool, str | None],
    training: bool,
    need_input: bool,
) -> bool:
    """The choice, asked with plain values: sizes of the input and the weights, stride, padding, ReLU, pool."""
    stride, padding, relu, pool = how
    problem = pose(shapes[0], shapes[1:], dtype, stride=stride, padding=padding, relu=relu, pool=pool)
    return choose(problem, device, training=training, need_input=need_input).fused


def mode() -> str:
    """How to choose: from the `forced` block, else the environment, else "auto"."""
    chosen = _forced.get() or os.environ.get("LOWRANK_KERNELS", "auto")
    if chosen not in MODES:
        raise LowRankError(f"LOWRANK_KERNELS is {', '.join(MODES)}, not {chosen!r}.")
    return chosen


@contextlib.contextmanager
def forced(chosen: str) -> Iterator[None]:
    """Within the block, choose as `chosen` says: "off", "on" or "auto"."""
    token = _forced.set(chosen)
    try:
        mode()
        yield
    finally:
        _forced.reset(token)


def choose(problem: Problem, device: torch.device, *, training: bool, need_input: bool = True) -> Choice:
    """The path of a problem under the current mode; in training, `need_input` asks for the input's gradient."""
    asked = Asked(problem, device, training, need_input)
    if mode() == "off":
        return Choice(False, "switched off")
    if reason := _unsupported(asked):
        return Choice(False, reason)
    if mode() == "on":
        return Choice(True, "forced", plan_for(problem, device))
    retune = _tuning.get() and not (store.entries().get(_key(asked)) or {}).get("tuned")
    return (None if retune else _stored(asked)) or _measured(asked) or _default(asked)


def unsupported(
    problem: Problem, device: torch.device, *, training: bool = False, need_input: bool = True
) -> str | None:
    """Why the fused kernels cannot take a problem on a device, or None."""
    return _unsupported(Asked(problem, device, training, need_input))


def _unsupported(asked: Asked) -> str | None:
    exact = asked.problem.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "float32 without TF32" if exact and asked.device.type == "cuda" else _unable(asked)


@lru_cache(maxsize=4096)
def _unable(asked: Asked) -> str | None:
    problem, cuda = asked.problem, asked.device.type == "cuda"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if cuda and torch.cuda.get_device_capability(asked.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{problem.dtype} is not bfloat16, float16 or float32"
    if not _plans(problem, asked.device):
        return "no kernel takes this stride, these channels or these taps"
    return _untrainable(problem, asked.need_input) if asked.training else None


def _untrainable(problem: Problem, need_input: bool) -> str | None:
    from lowrank_cnn.kernels import stem, tiled

    reason = tiled.unsupported(problem)
    if reason is None or (stem.unsupported(problem) is None and not need_input):
        return None
    return f"no gradient for {reason}"


def plan_for(problem: Problem, device: torch.device) -> Plan:
    """The plan of a problem that is known to run fused: the measured one, or the default."""
    for training in (False, True):
        if plan := _stored_plan(Asked(problem, device, training)):
            return plan
    return _plans(problem, device)[0]


def explain(problem: Problem, device: torch.device | str = "cuda", *, training: bool = False) -> str:
    """Which path a problem takes here and why, in one line; nothing is measured."""
    asked = Asked(problem, torch.device(device), training, need_input=problem.channels > 4)
    if mode() != "auto" or _unsupported(asked):
        choice = choose(problem, asked.device, training=training, need_input=asked.need_input)
    else:
        choice = _stored(asked) or _default(asked)
    return f"{problem}: {'fused ' + str(choice.plan) if choice.fused else 'torch'} ({choice.why})"


def explain_call(x: Tensor, weights: Sequence[Tensor], *, training: bool = False, **options: Any) -> str:
    """Which path `composite_conv2d` takes for such tensors, with the options of `describe`, and why."""
    if not (x.is_cuda or asked_for()):
        return "torch (not on a GPU)"
    return explain(describe(x, weights, **options), x.device, training=training)


def tune(model: torch.nn.Module, example: Tensor, *, training: bool = False) -> None:
    """Measure every plan of every layer a model calls on an example; later runs take the fastest."""
    token = _tuning.set(True)
    try:
        with torch.set_grad_enabled(training):
            model(example)
    finally:
        _tuning.reset(token)


@lru_cache(maxsize=4096)
def _plans(problem: Problem, device: torch.device) -> tuple[Plan, ...]:
    from lowrank_cnn.kernels.launch import plans

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return tuple(plans(problem, capability=capability))


def _default(asked: Asked) -> Choice:
    """Unmeasured: fused on Hopper where the work is large enough to hide a launch, else torch."""
    hopper = asked.device.type == "cuda" and torch.cuda.get_device_capability(asked.device)[0] == 9
    if hopper and asked.problem.macs > 1e8:
        return Choice(True, "not measured; the default for large layers", _plans(asked.problem, asked.device)[0])
    return Choice(False, "not measured; the default for small layers and other GPUs")


def _measured(asked: Asked) -> Choice | None:
    """Time the paths now, unless a graph is being captured or traced."""
    problem, device, training = asked.problem, asked.device, asked.training
    if torch.compiler.is_compiling() or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    best = _fastest(problem, device)
    fused, eager = (milliseconds(problem, device, plan, training=training) for plan in (best, None))
    if min(eager, fused) == float("inf"):  # nothing runs here now, as within a tracer's own tensors
        return None
    entry = {"torch_ms": eager, "fused_ms": fused, "plan": best.to_dict(), "tuned": _tuning.get()}
    store.entries()[_key(asked)] = entry
    store.save()
    return _choice(entry)


def _fastest(problem: Problem, device: torch.device) -> Plan:
    """The plan whose forward is fastest, where tuning; the backward is the same for all. Else the default."""
    plans = _plans(problem, device)
    if not _tuning.get() or len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: milliseconds(problem, device, plan, training=False))


def _choice(entry: dict[str, Any]) -> Choice:
    from lowrank_cnn.kernels.launch import Plan

    why = f"measured: fused {entry['fused_ms']:.3f} ms, torch {entry['torch_ms']:.3f} ms"
    fused = entry["fused_ms"] < entry["torch_ms"]
    return Choice(fused, why, Plan.from_dict(entry["plan"]) if fused else None)


@lru_cache(maxsize=4096)
def _key(asked: Asked) -> str:
    offsets = ",".join(f"{g.top}:{g.left}" for g in asked.problem.groups)
    return f"{asked.problem} {offsets} {'training' if asked.training else 'inference'}"


def _stored(asked: Asked) -> Choice | None:
    entry = store.entries().get(_key(asked)) if asked.device.type == "cuda" else None
    return _choice(entry) if entry else None


def _stored_plan(asked: Asked) -> Plan | None:
    from lowrank_cnn.kernels.launch import Plan

    entry = store.entries().get(_key(asked)) if asked.device.type == "cuda" else None
    return Plan.from_dict(entry["plan"]) if entry else None
