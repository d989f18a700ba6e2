"""What a run shows: a moving bar on a terminal or in a notebook, one line per epoch elsewhere."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Mapping
from typing import Any

from lowrank_cnn.system.arithmetic import ceil_div
from lowrank_cnn.system.errors import require
from lowrank_cnn.system.text import printable
from lowrank_cnn.train.record import Epoch
from lowrank_cnn.train.step import Tally

REFRESH_SECONDS = 0.5
_NOTEBOOK_WIDTH = 110


class Progress:
    """Shows nothing: the base class, used as it is by all processes but the first."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def due(self) -> bool:
        """Whether to show figures now. Reading them makes the device wait, so this is seldom true."""
        return False

    def say(self, line: str) -> None:
        """Print a line that stays."""

    def step(self, tally: Tally, rate: float, iteration: int) -> None:
        """Show where the run stands."""

    def epoch(self, row: Epoch, epochs: int) -> None:
        """Show a finished epoch."""

    def result(self, result: Mapping[str, Any]) -> None:
        """Show the result on the test images, at the end of a run."""


class Lines(Progress):
    """One line per epoch: for logs and pipes."""

    def say(self, line: str) -> None:
        print(printable(line), flush=True)

    def epoch(self, row: Epoch, epochs: int) -> None:
        self.say(epoch_line(row, epochs))


class Live(Progress):
    """One line that moves: epoch, loss, accuracy, learning rate, images per second, time left."""

    def __init__(self, total: int, per_epoch: int, start: int, *, processes: int = 1) -> None:
        rich = require("rich.progress", extra="train", purpose="the progress line")
        self.bar: Any = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=12),
            rich.TextColumn("{task.fields[figures]}"),
            rich.TimeRemainingColumn(),
            transient=True,
        )
        self.task = self.bar.add_task("starting", total=total, completed=start, figures="")
        self.per_epoch, self.total, self.processes = per_epoch, total, processes
        self.shown_at, self.shown_images = time.monotonic(), 0.0

    def __enter__(self) -> Live:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def due(self) -> bool:
        return time.monotonic() - self.shown_at >= REFRESH_SECONDS

    def say(self, line: str) -> None:
        self.bar.console.print(printable(line), highlight=False, markup=False)

    def step(self, tally: Tally, rate: float, iteration: int) -> None:
        now, images = time.monotonic(), max(tally.images, 1)
        speed = self.processes * (tally.images - self.shown_images) / (now - self.shown_at)
        self.shown_at, self.shown_images = now, tally.images
        figures = (
            f"loss {tally.loss / images:.3f}  accuracy {tally.correct / images:.1%}  "
            f"lr {rate:.2g}  {speed:,.0f} images/s"
        )
        description = f"epoch {ceil_div(iteration, self.per_epoch)}/{self.total // self.per_epoch}"
        self.bar.update(self.task, completed=iteration, description=description, figures=figures)

    def epoch(self, row: Epoch, epochs: int) -> None:
        self.shown_images = 0.0
        self.bar.update(self.task, completed=row.epoch * self.per_epoch)
        self.say(epoch_line(row, epochs))


class NotebookLine(Live):
    """The same line in a notebook: one output of the cell that is replaced, which needs no widgets."""

    def __enter__(self) -> NotebookLine:
        display = require("IPython.display", extra="train", purpose="the progress line of a notebook").display
        self.output = display(_as_text(""), raw=True, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.output.update(_as_text(""), raw=True)

    def say(self, line: str) -> None:
        print(printable(line), flush=True)

    def step(self, tally: Tally, rate: float, iteration: int) -> None:
        super().step(tally, rate, iteration)
        console = require("rich.console", extra="train", purpose="the progress line").Console
        options = {"force_jupyter": False, "force_terminal": False, "no_color": True}
        screen = console(file=io.StringIO(), width=_NOTEBOOK_WIDTH, **options)
        screen.print(self.bar.get_renderable())
        self.output.update(_as_text(screen.file.getvalue().rstrip()), raw=True)


def _as_text(line: str) -> dict[str, str]:
    return {"text/plain": line}


def moving_line() -> type[Live] | None:
    """The class of the line that is rewritten in place: on a terminal or in a notebook; None elsewhere."""
    if sys.stdout.isatty():
        return Live
    rich = require("rich.console", extra="train", purpose="the progress line")
    return NotebookLine if rich.Console().is_jupyter else None


def epoch_line(row: Epoch, epochs: int) -> str:
    """A finished epoch in one line, short enough for a terminal of 80 columns."""
    watched = "" if row.accuracy is None else f"  accuracy {row.accuracy:.2%}"
    return (
        f"epoch {row.epoch}/{epochs}  loss {row.train_loss:.4f}  train {row.train_accuracy:.1%}{watched}  "
        f"lr {row.lr:.2g}  {row.images_per_second:,.0f} images/s"
    )
