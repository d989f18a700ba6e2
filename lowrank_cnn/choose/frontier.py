"""The record of a frontier: one JSON file, and beside it one file with the right and wrong answers of every run.

The answers are packed, one bit for each test image in the order of the set, and each run has a row of as many
bytes. A run's entry in the record says which row is its own, and the checksum of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, median_high
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.choose.candidates import Design
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.files import is_regular, open_in_place, read_json, read_regular, sealed, unsealed, write_json
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data
from lowrank_cnn.train.distributed import resolve_precision
from lowrank_cnn.train.recipe import Recipe

KIND, SCHEMA = "frontier", 1
RECORD, ANSWERS = "frontier.json", "answers.bits"
LARGEST_ANSWERS = 2**30
"""Bytes of the largest file of answers that is read: that of 160,000 runs on ILSVRC."""
DENSE_NAME, THIN, LOW_RANK = "dense", "thin", "low-rank"
"""Kinds of designs, the first also the name of the network that all others are timed beside."""
ABOUT = ("family", "network", "recipe", "data", "precision", "device", "teacher")
"""What all runs share: going on with another is refused. A comparison has a target and a plan, too."""


@dataclass
class SeedRun:
    """One trained network: its seed, how many answers were right, and where they are.

    `seconds` are those of training without compiling, by the median speed of its epochs; `wall` is everything.
    A run beside others on the device has no seconds and no speed: they would not be comparable.
    """

    seed: int
    correct: int
    row: int
    sha256: str
    seconds: float | None
    wall: float
    images_per_second: float | None
    train_accuracy: float
    environment: int
    processes: int = 1
    held_out: float | None = None


@dataclass
class DesignTime:
    """Milliseconds of a batch through `optimize`, and of the dense network that took turns with it.

    `choice` is the fastest of the variants in `tries`, with the `ways` of its blocks. `processes` has both times
    again from each fresh process, in which all networks of the record took turns. `environment` is the number of
    the machine and versions; older records have none.
    """

    ms: float
    low: float
    high: float
    reference_ms: float
    batch: int
    choice: str
    tries: dict[str, float] = field(default_factory=dict)
    ways: dict[str, str] | None = None
    processes: list[list[float]] = field(default_factory=list)
    environment: int | None = None

    @property
    def first_ratio(self) -> float:
        """The time as a share of the dense network's in the same turns, so that the speed of the day cancels."""
        return self.ms / self.reference_ms

    @property
    def ratios(self) -> list[float]:
        """That share in each fresh process; in older records, the only one."""
        return [ms / dense for ms, dense in self.processes] or [self.first_ratio]

    @property
    def ratio(self) -> float:
        return median(self.ratios)


@dataclass
class RateTry:
    """A factor of the learning rate, and the accuracy of each seed on held-out images."""

    rate: float
    accuracies: list[float] = field(default_factory=list)


@dataclass
class DesignRow:
    """A design: its costs, its time and its runs. `failed` are the seeds whose loss was not finite."""

    design: Design
    macs: int
    params: int
    timing: DesignTime | None = None
    rate: float = 1.0
    tries: list[RateTry] = field(default_factory=list)
    runs: list[SeedRun] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.design.name

    @property
    def dense(self) -> bool:
        return self.design.dense

    @property
    def branched(self) -> bool:
        return self.design.branched

    @property
    def seconds(self) -> float | None:
        """The median seconds of the trainings that had the device alone; None where there was none."""
        alone = [run.seconds for run in self.runs if run.seconds is not None]
        return median_high(alone) if alone else None

    @property
    def seeds(self) -> set[int]:
        return {*(run.seed for run in self.runs), *self.failed}

    def choose_rate(self) -> None:
        """Take the rate of the most accurate tries; without any, the one that it has."""
        if tried := [one for one in self.tries if one.accuracies]:
            self.rate = max(tried, key=lambda one: sum(one.accuracies) / len(one.accuracies)).rate

    def tried(self, rate: float) -> RateTry:
        """The tries of a factor of the learning rate, none as yet if it is a new one."""
        known = next((one for one in self.tries if one.rate == rate), None)
        if known is None:
            self.tries.append(known := RateTry(rate))
        return known


@dataclass
class Frontier:
    """Everything that a frontier found, and the folder it lives in; `answers` are verdicts on the questions."""

    folder: Path
    about: dict[str, Any]
    images: int
    rows: list[DesignRow] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        width, teacher = self.about["network"]["base"], self.about["teacher"]
        wide = f" (width {width:g})" if width != 1 else ""
        taught = f", taught by {teacher}" if teacher else ""
        return f"{self.about['family']}{wide} on {self.about['data']['name']}{taught}"

    @property
    def bytes_per_run(self) -> int:
        return ceil_div(self.images, 8)

    def row(self, name: str) -> DesignRow | None:
        return next((row for row in self.rows if row.name == name), None)

    def top1(self, row: DesignRow) -> float:
        """The mean accuracy of a design's runs, in percent."""
        return 100 * sum(run.correct for run in row.runs) / len(row.runs) / self.images

    def ms(self, row: DesignRow) -> float | None:
        """Milliseconds of a row on one clock: its share of the dense network's time, as that stands in the record.

        Rows may have been timed on different days, each in turns with the dense network.
        """
        dense = self.row(DENSE_NAME)
        if row.timing is None or dense is None or dense.timing is None:
            return row.timing and row.timing.ms
        return row.timing.ratio * median([ms for ms, _ in dense.timing.processes] or [dense.timing.ms])

    def batch(self, asked: int | None, usual: int = 0) -> int:
        """The images that are timed at once: those of the record's times, which refuse others, or those asked."""
        known = next((row.timing.batch for row in self.rows if row.timing), asked or usual)
        if asked and known != asked:
            raise LowRankError(
                f"{self.folder} holds times of batches of {counted(known, 'image')}, not {asked}: say "
                f"{option('batch', known)}, or choose another {option('out')}."
            )
        return known

    def save(self) -> None:
        values = {
            "kind": KIND,
            "schema": SCHEMA,
            **self.about,
            "images": self.images,
            "answers_file": {"name": ANSWERS, "bytes_per_run": self.bytes_per_run},
            "environments": self.environments,
            "rows": [asdict(row) for row in self.rows],
            "answers": self.answers,
        }
        write_json(self.folder / RECORD, sealed(values))

    def here(self) -> int:
        """The number of this machine and these versions among the environments of the record."""
        now = environment()
        for place, known in enumerate(self.environments):
            if {**known, "date": None} == {**now, "date": None}:
                return place
        self.environments.append(now)
        return len(self.environments) - 1

    def add_answers(self, packed: bytes) -> tuple[int, str]:
        """Append a row of packed answers, on disk before this returns: its number and its checksum.

        Rows behind those that the record knows were left by a process that was killed, and are written over.
        """
        if len(packed) != self.bytes_per_run:
            raise LowRankError(
                f"{len(packed)} bytes are not the answers for {counted(self.images, 'test image')}."
            )
        row = 1 + max((run.row for r in self.rows for run in r.runs), default=-1)
        path = self.folder / ANSWERS
        with os.fdopen(open_in_place(path), "r+b") as file:
            file.truncate(row * self.bytes_per_run)
            file.seek(0, os.SEEK_END)
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        return row, hashlib.sha256(packed).hexdigest()

    def add_run(self, row: DesignRow, seed: int, right: bytes, **figures: Any) -> SeedRun:
        """Keep a run of a design with its packed answers and the other fields of `SeedRun`."""
        here, (place, checksum) = self.here(), self.add_answers(right)
        correct = int.from_bytes(right).bit_count()
        row.runs.append(SeedRun(seed, correct, place, checksum, environment=here, **figures))
        self.save()
        return row.runs[-1]

    def right_answers(self, row: DesignRow) -> Tensor:
        """The answers [runs, images] of a design, as booleans, checked against their checksums."""
        path = self.folder / ANSWERS
        try:
            content = read_regular(path, most=LARGEST_ANSWERS)
        except OSError as error:
            raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
        found = []
        for run in row.runs:
            packed = content[run.row * self.bytes_per_run : (run.row + 1) * self.bytes_per_run]
            if hashlib.sha256(packed).hexdigest() != run.sha256:
                raise LowRankError(f"{path} is damaged: row {run.row} is not what was written.")
            found.append(unpack(packed, self.images))
        return torch.stack(found)


THIN_WORDS = {"64s": "in 64s", "branches": "with branches"}
"""Parts of the name of a thin dense design, and how they are told after its width."""


def in_words(design: Design | DesignRow) -> str:
    """The name of a design in the answer; thin at 0.5 has half of the filters in each layer."""
    name, _, width = design.name.partition("@")
    if not width:
        return name
    after: list[str] = []
    if kind_of(design) == THIN:
        base, *parts = name.split("-")
        after = [THIN_WORDS[part] for part in parts if part in THIN_WORDS]
        filters = [part for part in (base, *parts) if part not in (DENSE_NAME, *THIN_WORDS)]
        name = " ".join(["thin", *filters])
    return " ".join([f"{name} at {float(width):.2g}", *after])


def kind_of(design: Design | DesignRow) -> str:
    """Dense, thin or low-rank."""
    return LOW_RANK if not design.dense else THIN if "@" in design.name else DENSE_NAME


def pack(right: Tensor) -> bytes:
    """Booleans as bits, the first in the highest bit of the first byte."""
    import numpy

    return numpy.packbits(right.bool().cpu().numpy()).tobytes()


def unpack(packed: bytes, images: int) -> Tensor:
    """The inverse of `pack`."""
    import numpy

    return torch.from_numpy(numpy.unpackbits(numpy.frombuffer(packed, numpy.uint8), count=images)).bool()


def load_frontier(folder: str | Path) -> Frontier:
    """Read the record in a folder, or the record itself."""
    folder = Path(folder)
    path, folder = (folder / RECORD, folder) if folder.is_dir() else (folder, folder.parent)
    if not is_regular(path):
        raise LowRankError(f"there is no record of a frontier at {path}.")
    try:
        values = unsealed(read_json(path))
        if values["kind"] != KIND or values["schema"] != SCHEMA:
            raise KeyError("kind")
        rows = [_read_row(row) for row in values["rows"]]
        about = {key: values.get(key) for key in ABOUT}
        about |= {key: values[key] for key in ("target", "plan") if key in values}
        return Frontier(folder, about, values["images"], rows, values["environments"], values["answers"])
    except LowRankError as damage:
        raise LowRankError(f"{path} is damaged: {damage}.") from damage
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LowRankError(f"{path} is not the record of a frontier of this version.") from error


def _read_row(values: dict[str, Any]) -> DesignRow:
    timing = DesignTime(**values["timing"]) if values["timing"] else None
    runs, tries = [SeedRun(**run) for run in values["runs"]], [RateTry(**one) for one in values["tries"]]
    design = Design(**values["design"])
    design = replace(design, layers=tuple(map(tuple, design.layers)))  # lists in JSON
    return DesignRow(**{**values, "design": design, "timing": timing, "runs": runs, "tries": tries})


def open_frontier(folder: Path, about: dict[str, Any], images: int) -> Frontier:
    """The frontier in a folder, to go on with, or a new one; another one there is refused."""
    if not (folder / RECORD).exists():
        folder.mkdir(parents=True, exist_ok=True)
        return Frontier(folder, about, images)
    found = load_frontier(folder)
    before, now = (shared_settings(one) for one in (found.about, json.loads(json.dumps(about))))
    for what in before | now:
        then, wanted = ("none" if one.get(what) is None else one[what] for one in (before, now))
        if then != wanted:
            raise LowRankError(
                f"{folder} holds a frontier whose {what} is {then}, not {wanted}: choose another {option('out')}."
            )
    return found


def about_runs(
    recipe: Recipe, data: Data, device: str, *, teacher: str | None = None, **named: Any
) -> dict[str, Any]:
    """What all runs share, for the record: how they train, on what, and what is `named`."""
    images = {"name": data.name, "train": len(data.train), "test": len(data.test), "digest": data.digest}
    how = {"precision": resolve_precision(recipe.precision, device), "device": torch.device(device).type}
    return {**named, "recipe": recipe.to_dict(), "data": images, **how, "teacher": teacher}


def shared_settings(about: dict[str, Any]) -> dict[str, Any]:
    """The settings of all runs by name, with defaults for recipe fields that are newer than the record."""
    whole = {key: about.get(key) for key in (*ABOUT, "target")}
    whole["recipe"] = Recipe().to_dict() | about["recipe"]
    nested = {key: value if isinstance(value, dict) else {"": value} for key, value in whole.items()}
    return {f"{key} {name}".strip(): value for key, fields in nested.items() for name, value in fields.items()}
