"""The record of a run: what was trained, how, on what, and the result, in one JSON file for reports.

A record is sealed with a checksum when it is written, which is verified when it is read. Records of older versions
have no checksum; they are read all the same, and `Record.sealed` is then False.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import (
    SEAL,
    BrokenSealError,
    UnreadableError,
    as_path,
    is_sealed,
    read_json,
    sealed,
    unsealed,
    write_json,
)
from lowrank_cnn.core.text import html_table, si

SCHEMA = 1
KIND = "training"
LATER = {"begun_from", "execution"}
"""Fields that older records lack."""
NOT_WRITTEN = {"right", "sealed"}
"""Fields that the file does not have."""
STATUSES = ("running", "interrupted", "failed", "finished")


@dataclass(frozen=True)
class Epoch:
    """One line of the history. Accuracies are shares; a value is None if it was not measured.

    Seconds and speed are those of training alone, without the evaluation.
    """

    epoch: int
    lr: float | None
    train_loss: float | None
    train_accuracy: float | None
    accuracy: float | None
    seconds: float | None
    images_per_second: float | None


@dataclass
class Record:
    """One training run. `history` holds `Epoch` rows as dictionaries; `result` is empty until the end.

    `watched` says whose accuracy the history shows: the images held out of training, or the test set.
    `changes` are the fields of the recipe that were changed when an interrupted run was taken up again.
    `result["details"]` says more of the test images (`EvaluationDetails.to_dict`): `per_class` accuracies, the
    `confusion` matrix by true class (None beyond 200 classes), the `most_confused` pairs, the `worst` images,
    and `calibration` by bins of confidence with its expected error. `data["digest"]` is the identity of the
    images, `data["val_split"]` the share of them that was taken for testing.
    `begun_from` names the trained weights that the network had before the run; empty where it had none.
    `execution` says how steps ran, compiled or not and as a CUDA graph or not; empty before the first.
    `right` tells of each test image, in the order of the set, whether the answer of the trained network was right;
    None for several processes, for other tasks, and in a record that was read from a file.
    `sealed` says whether the file that the record was read from had a checksum; it is not written either.
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
    execution: dict[str, Any] = field(default_factory=dict)
    kind: str = KIND
    schema: int = SCHEMA
    right: Tensor | None = field(default=None, compare=False, repr=False)
    sealed: bool = field(default=True, compare=False)

    def _repr_html_(self) -> str:
        """The summary that notebooks show: the run, its result and its last epochs."""
        about = (
            f"{self.model['name']} on {self.data['name']}, {self.recipe['name']}, seed {self.seed}: {self.status}"
        )
        shown = {key: f"{self.result[key]:.2%}" for key in ("top1", "top5") if self.result.get(key) is not None}
        shown |= {key: si(self.result[key]) for key in ("n", "macs", "params", "seconds") if self.result.get(key)}
        result = ", ".join(f"{key} {value}" for key, value in shown.items())
        columns = (">epoch", ">loss", ">train", ">accuracy", ">lr", ">images/s")
        names = ("epoch", "train_loss", "train_accuracy", "accuracy", "lr", "images_per_second")
        rows = [["" if row[name] is None else f"{row[name]:.4g}" for name in names] for row in self.history[-5:]]
        return html_table(columns, rows, f"{about}. {result}")

    def save(self, path: Path, *, parents: bool = True) -> None:
        """Write the record with its checksum, in one move; `parents` makes its folder if it is not there."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in NOT_WRITTEN}
        write_json(path, sealed(values), parents=parents)


def load_record(path: str | Path) -> Record:
    """Read the record of a run, given its file or the directory of the run."""
    path = as_path(path)
    path = path / "record.json" if path.is_dir() else path
    if not path.exists():
        raise LowRankError(f"there is no record of a run at {path}.")
    try:
        return _checked(read_json(path), path)
    except UnreadableError as error:
        raise LowRankError(f"{path} is not the record of a run: {error}.") from error
    except BrokenSealError as error:
        raise LowRankError(
            f"{path} is damaged or was edited: {error}. To use it as it is, delete its field {SEAL}."
        ) from error


def _checked(stored: object, path: Path) -> Record:
    if not isinstance(stored, dict) or stored.get("kind") != KIND:
        raise LowRankError(f"{path} is not the record of a training run.")
    values = unsealed(stored)
    if values.get("schema") != SCHEMA:
        raise LowRankError(f"{path} has schema {values.get('schema')}; this version reads schema {SCHEMA}.")
    known = {f.name for f in dataclasses.fields(Record)} - NOT_WRITTEN
    wrong = sorted((values.keys() ^ known) - (LATER - values.keys()))
    if wrong:
        raise LowRankError(f"{path} is not a record of this version: {', '.join(wrong)} missing or unknown.")
    for name, kind in typing.get_type_hints(Record).items():
        if name in values and not isinstance(values[name], typing.get_origin(kind) or kind):
            raise LowRankError(f"{path} is not the record of a run: its {name} is not of type {kind}.")
    if values["status"] not in STATUSES:
        raise LowRankError(f"{path} has the status {values['status']!r}; known are {', '.join(STATUSES)}.")
    return Record(**values, sealed=is_sealed(stored))
