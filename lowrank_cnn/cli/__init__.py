"""The command `lowrank`: thin functions that parse, call the library and print.

This file imports nothing that takes time, so that Ctrl-C is answered from the first moment on.

Exit codes: 0 for success, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 for a fault of this program.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""What a shell expects after Ctrl-C: 128 and the number of the signal."""


def main() -> None:
    """Run the command; bad input is one sentence and exit code 2."""
    try:
        with interruptible_import():
            from lowrank_cnn.cli.app import run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


@contextmanager
def interruptible_import() -> Iterator[None]:
    """End the process at Ctrl-C while libraries are imported: some of them catch every exception of an import."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored by who started us, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
