"""Failures while training, each reported in one sentence: infinite numbers, memory, and requests to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import is_finite
from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LowRankError, option, to_caller
from lowrank_cnn.core.modules import call
from lowrank_cnn.core.text import counted

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class NotFiniteError(LowRankError):
    """The loss or a gradient became infinite or not a number."""


class OutOfMemoryError(LowRankError):
    """The device has no room for a step of this batch size."""


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, has saved its state, and can be resumed.

    `exit_code` is what a shell expects: 130 after Ctrl-C, 143 after SIGTERM.
    """

    signal: int = signal.SIGINT

    @property
    def exit_code(self) -> int:
        return 128 + self.signal


def first_not_finite(network: nn.Module, images: Any) -> str:
    """Name the first layer, in the order of the forward pass, whose weights or output are not finite."""
    found: list[str] = []

    def look(name: str, module: nn.Module, _: object, output: object) -> None:
        if not is_finite(list(module.parameters())):
            found.append(f"the weights of layer {name!r} ({type(module).__name__})")
        elif not is_finite(output):
            found.append(f"the output of layer {name!r} ({type(module).__name__})")

    # A hook runs when its module is done: an inner layer is named before the block around it.
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in network.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(look, name)))
        call(network, images)
    return found[0] if found else "a gradient, behind layers whose outputs are all finite"


def resume_hint() -> str:
    """How to resume a run, for the end of a sentence."""
    return to_caller("fit(..., resume=True)", "the same command and --resume")


@contextlib.contextmanager
def oom_as_user_error(batch_size: int, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error, on any device, into a sentence with the batch size that failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"a batch of {counted(batch_size, 'image')} does not fit the memory of {device}: use a smaller "
            f"{option('batch_size')}, or bf16, or more processes."
        ) from error


@contextlib.contextmanager
def lost_process_as_user_error() -> Iterator[None]:
    """Turn the error about a data worker that was killed, or another process of the run, into a sentence.

    torch raises the first from a signal handler, wherever the main thread is.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" in str(error):
            raise LowRankError(
                "a process that reads images was killed, by the system if memory ran out: go on with "
                f"{option('resume', True)}, and with fewer {option('workers')} if it happens again."
            ) from error
        if isinstance(error, getattr(torch.distributed, "DistError", ())) or "/gloo/" in str(error):
            raise LowRankError(f"another process of this run has ended: go on with {resume_hint()}.") from error
        raise


class StopRequest:
    """Receives Ctrl-C and SIGTERM, prints a line, and is then True. A second Ctrl-C raises KeyboardInterrupt.

    Python handles signals in the main thread, between two operations. Outside that thread this does nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self.signal: int = signal.SIGINT
        self._second: Any = signal.default_int_handler

    def __bool__(self) -> bool:
        return self.received

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS}
        if callable(before[signal.SIGINT]):
            self._second = before[signal.SIGINT]
        try:
            yield self
        except Interrupted as interrupted:
            interrupted.signal = self.signal
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            told = "Stopping at the next safe point. Ctrl-C again leaves at once, without saving."
            print(f"\n{told}", file=sys.stderr, flush=True)
        self.received, self.signal = True, number
        signal.signal(signal.SIGINT, self._second)


class StoppedWithin(Exception):
    """A step ended before it changed any weight."""


@contextlib.contextmanager
def stopping_within(network: nn.Module, stop: StopRequest) -> Iterator[None]:
    """While the block lasts, raise `StoppedWithin` between two layers, forward or backward, once asked to stop."""

    def check(*_: object) -> None:
        if stop:
            raise StoppedWithin

    def check_backward(_: nn.Module, __: object, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(check)

    with contextlib.ExitStack() as hooks:
        for layer in network.modules():
            if not list(layer.children()):
                hooks.enter_context(layer.register_forward_pre_hook(check))
                hooks.enter_context(layer.register_forward_hook(check_backward))
        yield
