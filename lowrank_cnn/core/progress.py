"""Show the current step of a call on standard error, once it takes more than two seconds.

    @progress("thin")
    def thin(...):
        step("width 0.41")

A terminal or a notebook shows one line that changes and vanishes at the end; a log gets a line now and then.
A call within another one shows its steps on the line of the outer call.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from lowrank_cnn.core.processes import first_process
from lowrank_cnn.core.text import printable

_QUIET, _LOG_EVERY = 2.0, 10.0
"""Seconds before the first line, and between the lines of a log."""


class StepLine:
    """The line of one call: its step, and those of calls within it. `say` gets every step in place of the line."""

    def __init__(self, what: str, say: Callable[[str], None] | None) -> None:
        self.what, self.say, self.steps = what, say, []
        self.began = time.monotonic()
        self.width, self.logged = 0, -_LOG_EVERY
        self.lock = threading.Lock()
        self.timer = threading.Timer(_QUIET, self.show)  # the first step may take minutes
        self.timer.daemon = True
        if say is None and first_process():
            self.timer.start()

    @property
    def text(self) -> str:
        return ": ".join(filter(None, self.steps))

    def step(self, text: str) -> None:
        self.steps[-1] = text
        if self.say is not None:
            self.say(self.text)
        elif time.monotonic() - self.began >= _QUIET and first_process():
            self.show()

    def show(self) -> None:
        line = printable(f"{self.what}: {self.text} ..." if self.text else f"{self.what} ...")
        with self.lock:
            if moves(sys.stderr):
                line = fitting(line, shutil.get_terminal_size().columns - 1)
                self._write(f"\r{line.ljust(self.width)}")
                self.width = len(line)
            elif time.monotonic() - self.logged >= _LOG_EVERY:
                self.logged = time.monotonic()
                self._write(f"{line}\n")

    def erase(self) -> None:
        with self.lock:
            if self.width:
                self._write(f"\r{' ' * self.width}\r")
                self.width = 0

    def close(self) -> None:
        self.timer.cancel()
        self.erase()

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads any more
            print(text, end="", file=sys.stderr, flush=True)


def fitting(line: str, width: int) -> str:
    """A line of at most so many characters: its middle is left out, as the time that is left stands at the end."""
    if len(line) <= width:
        return line
    end = width // 2
    return f"{line[: max(0, width - end - 2)]}..{line[len(line) - end :]}"[:width]


_line: ContextVar[StepLine | None] = ContextVar("line", default=None)


@contextmanager
def progress(what: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Show the steps of a call; `say` is called with each instead. Also a decorator."""
    outer = _line.get() if say is None else None
    line = outer or StepLine(what, say)
    line.steps.append("")
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)
        line.steps.pop()
        if line is not outer:
            line.close()


def step(text: str) -> None:
    """Show this as the current step."""
    line = _line.get()
    if line is not None:
        line.step(text)


def lasting(text: str) -> None:
    """Print a line on standard error that stays."""
    line = _line.get()
    if line is not None:
        line.erase()
    print(printable(text), file=sys.stderr, flush=True)


def moves(stream: TextIO | None) -> bool:
    """Whether a line can be overwritten: on a terminal, and in a notebook's output."""
    return stream is not None and (stream.isatty() or type(stream).__module__.startswith("ipykernel"))
