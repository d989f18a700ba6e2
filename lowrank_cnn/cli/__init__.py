"""The command `lowrank`: thin functions that parse, call the library and print.

This file imports nothing that takes time, so that Ctrl-C is answered from the first moment on.

Exit codes: 0 for success, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM, 1 for a fault of this program.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""What a shell expects after Ctrl-C: 128 and the number of the signal."""


def main() -> None:
    """Run the command; bad input is one sentence and exit code 2."""
    try:
        from lowrank_cnn.cli.app import run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)
