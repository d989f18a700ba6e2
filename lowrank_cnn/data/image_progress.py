"""A progress bar on standard error for work that takes more than a moment."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from lowrank_cnn.system.processes import first_process
from lowrank_cnn.system.text import counted

QUIET_SECONDS = 1.0


class ImageProgress:
    """Shows nothing for a moment, then a bar on a terminal, or elsewhere one line.

    Of several processes, the first alone shows it.
    """

    def __init__(self, what: str, total: int, *, enabled: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self.enabled = enabled and first_process()
        self.began = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self.bar, "stop"):
            self.bar.stop()

    def advance(self, images: int) -> None:
        """Count some more images as done."""
        self.done += images
        if not self.enabled or time.monotonic() - self.began < QUIET_SECONDS:
            return
        if self.bar is None:
            self.bar = self._start()
        if hasattr(self.bar, "update"):
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def _start(self) -> Any:
        if not sys.stderr.isatty():
            print(f"{self.what}: {counted(self.total, 'image')} ...", file=sys.stderr, flush=True)
            return "said"
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(self.what, total=self.total)
        bar.start()
        return bar
