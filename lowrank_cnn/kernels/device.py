"""The GPU that kernels run on: its capability and size, and launches on the right device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from importlib.util import find_spec
from inspect import signature
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LowRankError

# How to choose between the fused kernels and torch: the variable LOWRANK_KERNELS, and context managers.
#
# off   always torch's own convolutions: one for each filter group
# dense always torch's own convolutions: in training one for a whole layer, zeros around its filters; only
#       depthwise layers run by the kernels, for which nothing is timed
# on    the fused kernels wherever they can run
# auto  the fastest on this device and shape, measured once (the default): the fused kernels, torch's
#       convs for each group, or in training one dense conv by either

MODES = ("off", "dense", "on", "auto")
_forced: ContextVar[str | None] = ContextVar("lowrank_kernels", default=None)
_tuning: ContextVar[bool] = ContextVar("lowrank_tuning", default=False)
_recording: ContextVar[bool] = ContextVar("lowrank_recording", default=False)
_ahead: ContextVar[bool] = ContextVar("lowrank_ahead", default=False)
_survey: ContextVar[list[Any] | None] = ContextVar("lowrank_survey", default=None)
T = TypeVar("T")
Setting = contextlib.AbstractContextManager[Any]


@contextlib.contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[T]:
    """A context variable has another value within a block or a decorated function."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def mode() -> str:
    """The current mode: that of the `forced` block, else of the environment, else "auto"."""
    return _forced.get() or _known(os.environ.get("LOWRANK_KERNELS", "auto"))


def by_torch() -> bool:
    """Whether no kernel of ours is to run."""
    return mode() in ("off", "dense")


def asked_for_dense() -> bool:
    """Whether layers are to train as one dense conv of torch's."""
    return mode() == "dense"


def _known(chosen: str) -> str:
    if chosen not in MODES:
        raise LowRankError(f"LOWRANK_KERNELS is {', '.join(MODES)}, not {chosen!r}.")
    return chosen


def asked_for() -> bool:
    """Whether kernels run without a GPU: only in Triton's interpreter, and only if mode "on" asks for it."""
    return os.environ.get("TRITON_INTERPRET") == "1" and mode() == "on"


def forced(chosen: str) -> Setting:
    """Within the block, the mode is `chosen`: "off", "dense", "on" or "auto"."""
    return _within(_forced, _known(chosen))


def surveying() -> Setting:
    """Within the block, every layer runs by torch, and the requests for a choice are collected in a list."""
    return _within(_survey, [])


for_graphs = partial(_within, _recording, True)
"""Within the block, choose as for a CUDA graph, in which launches cost the host nothing.

Put it around the warm-up of a graph and around its capture, so that both make the same choices.
"""
tuning = partial(_within, _tuning, True)
"""Within the block, measure every plan of each problem that runs."""
compiling_ahead = partial(_within, _ahead, True)
"""Within the block, kernels are compiled but not run: their results are uninitialised memory."""
unsurveyed = partial(_within, _survey, None)
"""Within the block, ignore a survey around it: a graph of torch.compile outlives it."""
is_tuning, is_for_graphs, survey = _tuning.get, _recording.get, _survey.get


TYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)
"""The lowest compute capability that the kernels are written for."""
P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Run a launcher on the device of its first tensor; Triton itself launches on the current device."""

    @wraps(launch)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        values = (value for part in arguments for value in (part if isinstance(part, tuple | list) else (part,)))
        tensor = next(value for value in values if isinstance(value, Tensor))
        with torch.cuda.device_of(tensor):
            return launch(*arguments, **options)

    # Annotations as types, not strings, so that torch can read an operator's schema from them.
    guarded.__signature__ = signature(launch, eval_str=True)  # type: ignore[attr-defined]
    return guarded


def operator(name: str, fake: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Make a launcher the torch operator `lowrank::name`; `fake` gives empty results to tracers."""

    def made(launch: Callable[..., Any]) -> Any:
        defined = torch.library.custom_op(f"lowrank::{name}", on_its_device(launch), mutates_args=mutates)
        defined.register_fake(fake)
        return defined

    return made


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Triton's `kernel[grid]`; within `compiling_ahead` the call only compiles the kernel."""
    return partial(kernel.warmup, grid=grid) if _ahead.get() else kernel[grid]


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) for a CPU, where Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def is_recent(device: torch.device) -> bool:
    """Whether the kernels are written for a device."""
    return device.type != "cuda" or capability_of(device) >= OLDEST


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 2 for a CPU, so that tests see several programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# Whether kernels run on a device now: they are wanted there, and Triton can build and launch them.

LARGEST = 2**30
"""The most values of a tensor: the kernels between convs count in 32 bits."""
_ABLE: dict[torch.device, bool] = {}


def takes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, depthwise: bool = False) -> bool:
    """Whether the kernels between convs, or depthwise ones, run now, on tensors of this shape and type."""
    fits = len(shape) == 4 and dtype in TYPES and 0 < prod(shape) <= LARGEST
    return fits and kernels_run(device, depthwise=depthwise)


def kernels_run(device: torch.device, *, depthwise: bool = False) -> bool:
    """Whether kernels are wanted on a device, and Triton can build and launch them there."""
    unwanted = mode() == "off" if depthwise else by_torch()
    if unwanted or survey() is not None or not (device.type == "cuda" or asked_for()):
        return False
    return _able(device)


def _able(device: torch.device) -> bool:
    """Whether Triton can build and launch a kernel here; without a C compiler, for example, it cannot."""
    if device not in _ABLE:
        try:
            _ABLE[device] = is_recent(device) and find_spec("triton") is not None and _runs(device)
        except Exception as error:  # whatever the reason, torch's own operations remain
            if is_out_of_memory(error):
                return False  # for now: ask again later
            _ABLE[device] = False
    return _ABLE[device]


def _runs(device: torch.device) -> bool:
    """Run a small kernel."""
    from lowrank_cnn.kernels.between import batch_statistics

    batch_statistics.batch_norm_statistics(torch.zeros(2, 8, 2, 2, device=device), None, None, None, 0.1, 1e-5)
    return True
