"""The command `lowrank`: thin functions that parse, call the library and print.

This file imports nothing that takes time, so that Ctrl-C is answered from the first moment on.

Exit codes: 0 for success, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 for a fault of this program.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130
"""What a shell expects after Ctrl-C: 128 and the number of the signal."""
GRACE_SECONDS = 10.0


class CtrlC:
    """Handle Ctrl-C for the whole process, so that it always ends with exit code 130.

    KeyboardInterrupt alone is not enough: libraries catch it, above all while they are imported, and a module
    whose import was broken off fails later with errors of its own. During an import the process therefore ends at
    once. Elsewhere Ctrl-C raises KeyboardInterrupt. If the command still runs after `GRACE_SECONDS`, or at the
    second Ctrl-C, the process ends. `received` tells that an error may be a consequence of Ctrl-C.
    """

    def __init__(self) -> None:
        self.received = False
        self.finished = False

    def handle(self) -> None:
        """Install the handler, unless Ctrl-C is ignored (nohup) or somebody else's."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received or self.finished or _importing(frame):
            os._exit(INTERRUPTED)
        self.received = True
        timer = threading.Timer(GRACE_SECONDS, os._exit, (INTERRUPTED,))
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in this frame or in one of its callers."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


CTRL_C = CtrlC()


def main() -> None:
    """Run the command; bad input is one sentence and exit code 2."""
    try:
        CTRL_C.handle()
        from lowrank_cnn.cli.app import run

        code = run()
        CTRL_C.finished = True
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(INTERRUPTED if CTRL_C.received else code)
