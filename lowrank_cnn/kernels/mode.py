"""How to choose between the fused kernels and torch: an environment variable, and context managers.

LOWRANK_KERNELS=off   torch's own convolutions, always: one for each filter group
LOWRANK_KERNELS=dense torch's own convolutions, always: in training one for a whole layer, zeros around its filters
LOWRANK_KERNELS=on    the fused kernels wherever they can run
LOWRANK_KERNELS=auto  the fastest on this device and shape, measured once (the default): the fused kernels, torch's
                      convs for each group, or in training one dense conv by either
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from lowrank_cnn.system.errors import LowRankError

MODES = ("off", "dense", "on", "auto")
_forced: ContextVar[str | None] = ContextVar("lowrank_kernels", default=None)
_tuning: ContextVar[bool] = ContextVar("lowrank_tuning", default=False)
_recording: ContextVar[bool] = ContextVar("lowrank_recording", default=False)
_ahead: ContextVar[bool] = ContextVar("lowrank_ahead", default=False)
_survey: ContextVar[list[Any] | None] = ContextVar("lowrank_survey", default=None)


class KernelSettings(contextlib.ContextDecorator):
    """Context variables that have other values within a block or a decorated function."""

    def __init__(self, values: dict[ContextVar, object]) -> None:
        self.values, self.tokens = values, {}

    def __enter__(self) -> None:
        self.tokens = {variable: variable.set(value) for variable, value in self.values.items()}

    def __exit__(self, *_: object) -> None:
        for variable, token in self.tokens.items():
            variable.reset(token)

    def _recreate_cm(self) -> KernelSettings:
        """One for each call of a decorated function, as calls may overlap."""
        return KernelSettings(self.values)


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


def forced(chosen: str) -> KernelSettings:
    """Within the block, the mode is `chosen`: "off", "dense", "on" or "auto"."""
    return KernelSettings({_forced: _known(chosen)})


def for_graphs() -> KernelSettings:
    """Within the block, choose as for a CUDA graph, in which launches cost the host nothing.

    Put it around the warm-up of a graph and around its capture, so that both make the same choices.
    """
    return KernelSettings({_recording: True})


def tuning() -> KernelSettings:
    """Within the block, measure every plan of each problem that runs."""
    return KernelSettings({_tuning: True})


def compiling_ahead() -> KernelSettings:
    """Within the block, kernels are compiled but not run: their results are uninitialised memory."""
    return KernelSettings({_ahead: True})


@contextlib.contextmanager
def surveying() -> Iterator[list[Any]]:
    """Within the block, every layer runs by torch, and the requests for a choice are collected."""
    asked: list[Any] = []
    with KernelSettings({_survey: asked}):
        yield asked


def unsurveyed() -> KernelSettings:
    """Within the block, ignore a survey around it: what torch.compile traces outlives the survey."""
    return KernelSettings({_survey: None})


def as_now() -> KernelSettings:
    """A block with the present settings, for autograd's threads, which do not inherit context variables."""
    return KernelSettings({variable: variable.get() for variable in (_forced, _tuning, _recording)})


def is_tuning() -> bool:
    return _tuning.get()


def is_for_graphs() -> bool:
    return _recording.get()


def is_compiling_ahead() -> bool:
    return _ahead.get()


def survey() -> list[Any] | None:
    """The list that collects requests within a `surveying` block, else None."""
    return _survey.get()
