"""Which of the processes that torchrun started this one is."""

from __future__ import annotations

import os


def first_process() -> bool:
    """Whether this process speaks and writes for all that torchrun started; true where there is one alone."""
    return os.environ.get("RANK", "0") == "0"
