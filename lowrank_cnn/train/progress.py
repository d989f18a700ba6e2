"""The progress of a run, as a moving line or one line per epoch, and the loggers of its figures."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.errors import LowRankError, check_choice, explained, first_line, option, require
from lowrank_cnn.core.files import below, read_text, replacing, write_atomically
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.progress import moves
from lowrank_cnn.core.text import duration, printable
from lowrank_cnn.train.run_folder import Epoch, Record
from lowrank_cnn.train.step import Tally, put_back

if TYPE_CHECKING:
    from lowrank_cnn.train.loop import Trainer

REFRESH_SECONDS = 0.5
PROJECT = "lowrank-cnn"
WANDB_RUN = ".wandb-run"
_SHOWN = ("lr", "train_loss", "train_accuracy", "accuracy", "images_per_second")
_RESULT = ("top1", "top5", "loss", "macs", "params", "seconds")


class Progress:
    """Prints one line per epoch if it is `shown`, for logs and pipes, and passes figures on to loggers."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.loggers: dict[str, Logger] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._each(lambda logger: logger.close(error[0] is not None))

    def due(self) -> bool:
        """Whether to show figures now. Reading them makes the device wait, so this is seldom true."""
        return False

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self.shown:
            print(printable(line), flush=True)

    def step(self, tally: Tally, rate: float, iteration: int) -> None:
        """Show how far the run is."""

    def epoch(self, row: Epoch, epochs: int) -> None:
        values = {name: value for name in _SHOWN if (value := getattr(row, name)) is not None}
        self._each(lambda logger: logger.log(values, row.epoch))
        watched = "" if row.accuracy is None else f"  accuracy {row.accuracy:.2%}"
        self.say(  # short enough for a terminal of 80 columns
            f"epoch {row.epoch}/{epochs}  loss {row.train_loss:.4f}  train {row.train_accuracy:.1%}{watched}  "
            f"lr {row.lr:.2g}  {row.images_per_second:,.0f} images/s"
        )

    def result(self, result: Mapping[str, Any]) -> None:
        values = {f"test_{name}": result[name] for name in _RESULT if result.get(name) is not None}
        self._each(lambda logger: logger.log(values, result["epochs"]))

    def _each(self, call: Callable[[Logger], object]) -> None:
        """Call every logger. One that fails, as when its server is gone, is dropped with a warning."""
        for name, logger in list(self.loggers.items()):
            try:
                call(logger)
            except Exception as error:
                del self.loggers[name]
                self.say(f"Logging to {name} stopped ({first_line(error):.200}). Training continues without it.")


class Live(Progress):
    """One line that moves, above it those of epochs: figures of the epoch so far and the time left."""

    def __init__(self, total: int, per_epoch: int, start: int, *, processes: int = 1) -> None:
        super().__init__(shown=True)
        self.total, self.per_epoch, self.start, self.processes = total, per_epoch, start, processes
        self.began = self.shown_at = time.monotonic()
        self.shown_images, self.width = 0.0, 0

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._draw("")

    def due(self) -> bool:
        return time.monotonic() - self.shown_at >= REFRESH_SECONDS

    def say(self, line: str) -> None:
        self._draw("")
        super().say(line)

    def step(self, tally: Tally, rate: float, iteration: int) -> None:
        now, images = time.monotonic(), max(tally.images, 1)
        speed = self.processes * (tally.images - self.shown_images) / (now - self.shown_at)
        self.shown_at, self.shown_images = now, tally.images
        left = (now - self.began) * (self.total - iteration) / max(iteration - self.start, 1)
        self._draw(
            f"epoch {ceil_div(iteration, self.per_epoch)}/{self.total // self.per_epoch}  {duration(left)} left  "
            f"loss {tally.loss / images:.3f}  accuracy {tally.correct / images:.1%}  "
            f"lr {rate:.2g}  {speed:,.0f} images/s"
        )

    def epoch(self, row: Epoch, epochs: int) -> None:
        self.shown_images = 0.0
        super().epoch(row, epochs)

    def _draw(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        while len(text) >= columns and "  " in text:  # a narrow terminal shows fewer parts, each whole
            text = text.rpartition("  ")[0]
        text = text[: columns - 1]
        print(f"\r{text.ljust(self.width)}", end="" if text else "\r", flush=True)
        self.width = len(text)


@contextlib.contextmanager
def showing(trainer: Trainer, names: Sequence[str]) -> Iterator[None]:
    """Show the progress of a run, on a line that moves if there is a terminal, and log it by these loggers."""
    show = trainer.progress
    # Importing rich draws a random number, and loggers may: a resumed run draws what it would have drawn.
    with put_back((), trainer.fabric.device):
        if show.shown and moves(sys.stdout):
            total, processes = trainer.recipe.epochs * trainer.per_epoch, trainer.fabric.world_size
            show = trainer.progress = Live(total, trainer.per_epoch, trainer.iteration, processes=processes)
        if names and trainer.fabric.is_global_zero:
            trainer.update_record()
            folder = trainer.directory and trainer.directory.path
            for name in dict.fromkeys(names):
                with explained(f"{option('log', name)} could not start"):  # no login, no server, no store
                    show.loggers[name] = LOGGERS[name](trainer.record, folder)
    with show:
        yield


@dataclass(frozen=True)
class Logger:
    """Receives figures by name with the number of an epoch; `close` gets whether the run failed."""

    log: Callable[[dict[str, float], int], object]
    close: Callable[[bool], object] = lambda failed: None


def _tensorboard(record: Record, folder: Path | None) -> Logger:
    """Scalars in the folder `tensorboard` of the run: `tensorboard --logdir runs` shows them."""
    tensorboard = require("torch.utils.tensorboard", extra="train", purpose="writing TensorBoard scalars")
    place = below(_needed(folder), _needed(folder) / "tensorboard")
    writer: Any = tensorboard.SummaryWriter(str(place), purge_step=len(record.history) + 1)

    def log(values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)

    return Logger(log, lambda failed: writer.close())


def _csv(record: Record, folder: Path | None) -> Logger:
    """The history as `history.csv` in the run's directory, whole after every epoch."""
    path = _needed(folder) / "history.csv"

    def log(values: dict[str, float], epoch: int) -> None:
        with replacing(path, parents=False) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Epoch)], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(record.history)

    return Logger(log)


def _wandb(record: Record, folder: Path | None) -> Logger:
    """A run of Weights & Biases. `WANDB_PROJECT`, `WANDB_MODE=offline` and its other variables work.

    A resumed run goes on with the run there, whose number is kept beside the record.
    """
    wandb: Any = require("wandb", extra="wandb", purpose=option("log", "wandb"))
    kept = folder / WANDB_RUN if folder else None
    options = {"dir": str(folder)} if folder else {}
    options |= {} if os.environ.get("WANDB_PROJECT") else {"project": PROJECT}
    if kept and record.history:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # without its number, a new run begins there
            options |= {"id": read_text(kept, most=100), "resume": "allow"}
    about = {name: getattr(record, name) for name in ("model", "data", "recipe", "seed")}
    name = folder.name if folder else str(record.model["name"])
    run = wandb.init(config=about, name=name, **options)
    if kept:
        write_atomically(kept, run.id.encode(), parents=False)
    return Logger(
        lambda values, epoch: run.log(values, step=epoch), lambda failed: run.finish(exit_code=int(failed))
    )


LOGGERS: dict[str, Callable[[Record, Path | None], Logger]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "wandb": _wandb,
}


def check_loggers(names: Sequence[str]) -> None:
    for name in names:
        check_choice("logger", name, LOGGERS)


def _needed(folder: Path | None) -> Path:
    if folder is None:
        raise LowRankError(f"TensorBoard and CSV files are written beside the run: give {option('out')}.")
    return folder
