"""Standard output that outlives its reader: `lowrank train ... | head -1` trains to the end. Plain warnings."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from lowrank_cnn.system.errors import LowRankWarning
from lowrank_cnn.system.processes import first_process


class LastingStream:
    """A text stream that drops what cannot be written any more. `error` is the first failure but a closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._closed = stream, False
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if not self._closed:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._closed:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Discard the rest, also what the stream has buffered: Python flushes it once more at exit."""
        self._closed = True
        if error.errno != errno.EPIPE:
            self.error = error
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[LastingStream]:
    """Let both standard streams outlive their readers, and write unprintable characters as escapes."""
    before = sys.stdout, sys.stderr
    out, err = LastingStream(sys.stdout), LastingStream(sys.stderr)
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print our own warnings as one sentence, without the file and line where they arise.

    Each is printed once: a command may open a set again, in the size that the network is for.
    """
    told: set[str] = set()

    def show(message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
        if not issubclass(category, LowRankWarning):
            usual(message, category, *place, **options)
        elif first_process() and str(message) not in told:
            from lowrank_cnn.cli.show import errors  # help and completion do without rich

            told.add(str(message))
            errors.print(str(message), markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        usual, warnings.showwarning = warnings.showwarning, show
        yield
