"""The record of a run: what was trained, how, on what, and what came of it, in one JSON file for reports."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.checkpoint import write_json

SCHEMA = 1
KIND = "training"
LATER = {"begun_from"}
"""Fields that records have had for a while only."""
STATUSES = ("running", "interrupted", "failed", "finished")


@dataclass(frozen=True)
class Epoch:
    """One line of the history. Accuracies are shares; the watched one is None where none was measured.

    Seconds and speed are those of training alone, without the evaluation.
    """

    epoch: int
    lr: float
    train_loss: float
    train_accuracy: float
    accuracy: float | None
    seconds: float
    images_per_second: float


@dataclass
class Record:
    """One training run. `history` holds `Epoch` rows as dictionaries; `result` is empty until the end.

    `watched` says whose accuracy the history shows: the images held out of training, or the test set.
    `changes` are the fields of the recipe that were changed when an interrupted run was taken up again.
    `result["details"]` says more of the test images (`EvaluationDetails.to_dict`): `per_class` accuracies, the
    `confusion` matrix [true][predicted] (None beyond 200 classes), the `most_confused` pairs, the `worst` images,
    and `calibration` by bins of confidence with its expected error. `data["digest"]` is the identity of the
    images, `data["val_split"]` the share of them that was taken for testing.
    `begun_from` names the trained weights that the network had before the run; empty where it had none.
    """

    model: dict[str, Any]
    recipe: dict[str, Any]
    data: dict[str, Any]
    seed: int
    watched: str
    precision: str
    device: str
    processes: int = 1
    history: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    status: str = "running"
    environment: dict[str, Any] = field(default_factory=environment)
    begun_from: str = ""
    kind: str = KIND
    schema: int = SCHEMA

    def save(self, path: Path) -> None:
        """Write the record, atomically."""
        write_json(path, dataclasses.asdict(self))


def load_record(path: str | Path) -> Record:
    """Read the record of a run, given its file or the directory of the run."""
    path = Path(path)
    path = path / "record.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise LowRankError(f"there is no record of a run at {path} ({error.strerror}).") from error
    except ValueError as error:
        raise LowRankError(f"{path} is not the record of a run: it is not JSON.") from error
    return _checked(values, path)


def _checked(values: object, path: Path) -> Record:
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise LowRankError(f"{path} is not the record of a training run.")
    if values.get("schema") != SCHEMA:
        raise LowRankError(f"{path} has schema {values.get('schema')}; this version reads schema {SCHEMA}.")
    known = {f.name: f for f in dataclasses.fields(Record)}
    wrong = sorted((values.keys() ^ known.keys()) - (LATER - values.keys()))
    if wrong:
        raise LowRankError(f"{path} is not a record of this version: {', '.join(wrong)} missing or unknown.")
    if values["status"] not in STATUSES:
        raise LowRankError(f"{path} has the status {values['status']!r}; known are {', '.join(STATUSES)}.")
    return Record(**values)
