"""Work shared by processes that know nothing of each other: whoever holds a run's lock trains it.

The lock goes with the process that holds it, however that ends, so a run that was cut can be taken up by another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LOCK = "held.lock"


@contextlib.contextmanager
def held(directory: Path) -> Iterator[bool]:
    """Whether the directory is this process's alone while the block lasts; False where another holds it.

    Processes that torchrun started train one run together, and hold nothing; nor do systems without such locks.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        yield True
        return
    try:
        import fcntl
    except ImportError:
        yield True
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
