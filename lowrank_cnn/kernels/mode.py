"""How to choose between the fused kernels and torch: by the environment, by blocks of code.

LOWRANK_KERNELS=off   torch's own convolutions, always
LOWRANK_KERNELS=on    the fused kernels wherever they can
LOWRANK_KERNELS=auto  the faster of the two on this device and shape, measured once (the default)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from lowrank_cnn.system.errors import LowRankError

MODES = ("off", "on", "auto")
_forced: ContextVar[str | None] = ContextVar("lowrank_kernels", default=None)
_tuning: ContextVar[bool] = ContextVar("lowrank_tuning", default=False)
_recording: ContextVar[bool] = ContextVar("lowrank_recording", default=False)
_ahead: ContextVar[bool] = ContextVar("lowrank_ahead", default=False)
_survey: ContextVar[list[Any] | None] = ContextVar("lowrank_survey", default=None)


def mode() -> str:
    """How to choose: from the `forced` block, else the environment, else "auto"."""
    chosen = _forced.get() or os.environ.get("LOWRANK_KERNELS", "auto")
    if chosen not in MODES:
        raise LowRankError(f"LOWRANK_KERNELS is {', '.join(MODES)}, not {chosen!r}.")
    return chosen


def asked_for() -> bool:
    """Off the GPU only the interpreter could run the kernels, which is for tests that ask for it."""
    return os.environ.get("TRITON_INTERPRET") == "1" and mode() == "on"


@contextlib.contextmanager
def forced(chosen: str) -> Iterator[None]:
    """Within the block, choose as `chosen` says: "off", "on" or "auto"."""
    with _set(_forced, chosen):
        mode()
        yield


@contextlib.contextmanager
def for_graphs() -> Iterator[None]:
    """Within the block, choose as for a CUDA graph, whose launches cost the host nothing.

    Put it around the steps that warm a graph up and around its capture, so that both make the same choices.
    """
    with _set(_recording, True):
        yield


@contextlib.contextmanager
def tuning() -> Iterator[None]:
    """Within the block, measure every plan of a problem that is met."""
    with _set(_tuning, True):
        yield


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within the block, kernels are compiled and not run: what they would have written holds anything."""
    with _set(_ahead, True):
        yield


@contextlib.contextmanager
def surveying() -> Iterator[list[Any]]:
    """Within the block, every layer runs by torch's own operations; what choices were asked for is given back."""
    asked: list[Any] = []
    with _set(_survey, asked):
        yield asked


@contextlib.contextmanager
def unsurveyed() -> Iterator[None]:
    """Within the block, choose as if nothing were surveyed around it: what torch.compile takes down lasts."""
    with _set(_survey, None):
        yield


def as_now() -> contextlib.AbstractContextManager[None]:
    """A block in which is chosen as now, for what autograd does later: its threads know of no blocks around it."""
    return _as({variable: variable.get() for variable in (_forced, _tuning, _recording)})


def is_tuning() -> bool:
    return _tuning.get()


def is_for_graphs() -> bool:
    return _recording.get()


def is_compiling_ahead() -> bool:
    return _ahead.get()


def survey() -> list[Any] | None:
    """Where to note what a choice was asked for, while a block surveys."""
    return _survey.get()


@contextlib.contextmanager
def _as(values: dict[ContextVar, object]) -> Iterator[None]:
    with contextlib.ExitStack() as blocks:
        for variable, value in values.items():
            blocks.enter_context(_set(variable, value))
        yield


@contextlib.contextmanager
def _set(variable: ContextVar, value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
