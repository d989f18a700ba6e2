"""What a run shows, a moving bar or one line per epoch, and the loggers that get the figures of each epoch."""

from __future__ import annotations

import csv
import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lowrank_cnn.core.errors import LowRankError, nearest, require
from lowrank_cnn.core.files import below, read_json, replacing, write_json
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import printable
from lowrank_cnn.train.record import Epoch, Record
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


PROJECT = "lowrank-cnn"
IDENTITIES = ".loggers"
_SHOWN = ("lr", "train_loss", "train_accuracy", "accuracy", "images_per_second")
_RESULT = ("top1", "top5", "loss", "macs", "params", "seconds")


class Logger:
    """Receives the figures of a run. `folder` is the run's directory, None where it has none.

    A client is imported when its logger is used. A run that is resumed continues the run of the client, whose
    identity is kept in `.loggers` beside the record.
    """

    def __init__(self, record: Record, folder: Path | None, identity: str | None) -> None:
        """`identity` is the id that the logger gave this run before it was interrupted."""
        self.identity = identity

    def epoch(self, row: Epoch) -> None:
        """Take the figures of a finished epoch."""
        self.log({name: value for name in _SHOWN if (value := getattr(row, name)) is not None}, row.epoch)

    def result(self, result: Mapping[str, Any], epoch: int) -> None:
        """Take the result on the test images."""
        self.log({f"test_{name}": result[name] for name in _RESULT if result.get(name) is not None}, epoch)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        raise NotImplementedError

    def close(self, *, failed: bool) -> None:
        """Finish; `failed` where the run was interrupted or ended with an error."""


class TensorBoardLogger(Logger):
    """Scalars in the folder `tensorboard` of the run: `tensorboard --logdir runs` shows them."""

    def __init__(self, record: Record, folder: Path | None, identity: str | None) -> None:
        super().__init__(record, folder, identity)
        if folder is None:
            raise LowRankError("TensorBoard scalars are written beside the run: give --out.")
        tensorboard = require("torch.utils.tensorboard", extra="train", purpose="writing TensorBoard scalars")
        self.writer: Any = tensorboard.SummaryWriter(
            str(below(folder, folder / "tensorboard")), purge_step=len(record.history) + 1
        )

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)

    def close(self, *, failed: bool) -> None:
        self.writer.close()


class CsvLogger(Logger):
    """The history as `history.csv` in the run's directory, whole after every epoch."""

    def __init__(self, record: Record, folder: Path | None, identity: str | None) -> None:
        super().__init__(record, folder, identity)
        if folder is None:
            raise LowRankError("the history is written beside the run: give --out.")
        self.path, self.rows = folder / "history.csv", [dict(row) for row in record.history]

    def epoch(self, row: Epoch) -> None:
        self.rows.append(asdict(row))
        with replacing(self.path, parents=False) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Epoch)], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)

    def result(self, result: Mapping[str, Any], epoch: int) -> None:
        """The record has it."""


class WandbLogger(Logger):
    """A run of Weights & Biases. `WANDB_PROJECT`, `WANDB_MODE=offline` and its other variables work."""

    def __init__(self, record: Record, folder: Path | None, identity: str | None) -> None:
        wandb: Any = require("wandb", extra="wandb", purpose="--log wandb")
        options = {"dir": str(folder)} if folder else {}
        project = {} if os.environ.get("WANDB_PROJECT") else {"project": PROJECT}
        again = {"id": identity, "resume": "allow"} if identity else {}
        self.run: Any = wandb.init(
            config=_about(record), name=_name(record, folder), **project, **options, **again
        )
        super().__init__(record, folder, self.run.id)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        self.run.log(dict(values), step=epoch)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MlflowLogger(Logger):
    """A run of MLflow, at `MLFLOW_TRACKING_URI` or in the folder `mlruns`."""

    def __init__(self, record: Record, folder: Path | None, identity: str | None) -> None:
        self.mlflow: Any = require("mlflow", extra="mlflow", purpose="--log mlflow")
        if not identity:
            self.mlflow.set_experiment(PROJECT)
        run = self.mlflow.start_run(run_id=identity, run_name=_name(record, folder))
        super().__init__(record, folder, run.info.run_id)
        if not identity:
            self.mlflow.log_params({name: str(value)[:500] for name, value in _flat(_about(record)).items()})

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        self.mlflow.log_metrics(dict(values), step=epoch)

    def close(self, *, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


class TrackioLogger(Logger):
    """A run of Trackio, on this machine: `trackio show` opens the page."""

    def __init__(self, record: Record, folder: Path | None, identity: str | None) -> None:
        self.trackio: Any = require("trackio", extra="trackio", purpose="--log trackio")
        name = identity or _name(record, folder)
        resumed = {"resume": "must"} if identity else {}
        self.trackio.init(project=PROJECT, name=name, config=_flat(_about(record)), **resumed)
        super().__init__(record, folder, name)

    def log(self, values: Mapping[str, float], epoch: int) -> None:
        self.trackio.log(dict(values), step=epoch)

    def close(self, *, failed: bool) -> None:
        self.trackio.finish()


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "csv": CsvLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}


class Logged(Progress):
    """Pass everything on to another way of showing, and the figures of epochs to the loggers too."""

    def __init__(self, shown: Progress, names: Sequence[str], record: Record, folder: Path | None) -> None:
        check_loggers(names)
        place = folder / IDENTITIES if folder else None
        known = _identities(place) if place and record.history else {}
        self.shown, self.epochs = shown, len(record.history)
        self.loggers = {name: _started(name, record, folder, known.get(name)) for name in dict.fromkeys(names)}
        identities = {name: own for name, logger in self.loggers.items() if (own := logger.identity)}
        if place and identities:
            write_json(place, {**known, **identities})

    def __enter__(self) -> Logged:
        self.shown.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._each(lambda logger: logger.close(failed=error[0] is not None))
        self.shown.__exit__(*error)

    def due(self) -> bool:
        return self.shown.due()

    def say(self, line: str) -> None:
        self.shown.say(line)

    def step(self, tally: Tally, rate: float, iteration: int) -> None:
        self.shown.step(tally, rate, iteration)

    def epoch(self, row: Epoch, epochs: int) -> None:
        self.epochs = row.epoch
        self._each(lambda logger: logger.epoch(row))
        self.shown.epoch(row, epochs)

    def result(self, result: Mapping[str, Any]) -> None:
        self._each(lambda logger: logger.result(result, self.epochs))

    def _each(self, call: Callable[[Logger], None]) -> None:
        """Call every logger. One that fails, as when its server is gone, is dropped with a warning."""
        for name, logger in list(self.loggers.items()):
            try:
                call(logger)
            except Exception as error:
                del self.loggers[name]
                self.shown.say(f"Logging to {name} stopped ({_reason(error)}). The run goes on without it.")


def check_loggers(names: Sequence[str]) -> None:
    """Refuse an unknown name."""
    for name in names:
        if name not in LOGGERS:
            raise LowRankError(f"there is no logger {name!r}: {nearest(name, LOGGERS)}")


def _started(name: str, record: Record, folder: Path | None, identity: str | None) -> Logger:
    """The logger, or one sentence where its client refuses: no login, no server, no store."""
    try:
        return LOGGERS[name](record, folder, identity)
    except LowRankError:
        raise
    except Exception as error:
        raise LowRankError(f"--log {name} could not start: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line of a client's error; some write pages."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
    return line if len(line) <= 200 else f"{line[:197]}..."


def _identities(path: Path) -> dict[str, Any]:
    """What loggers of the interrupted run had as their own; without it they begin new runs."""
    try:
        found = read_json(path)
    except LowRankError:
        return {}
    return found if isinstance(found, dict) else {}


def _name(record: Record, folder: Path | None) -> str:
    return folder.name if folder else str(record.model["name"])


def _about(record: Record) -> dict[str, Any]:
    """What the run is: its network, data, recipe and seed."""
    data = {key: record.data[key] for key in ("name", "train", "test") if key in record.data}
    return {"model": record.model, "data": data, "recipe": record.recipe, "seed": record.seed}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with points in its names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
