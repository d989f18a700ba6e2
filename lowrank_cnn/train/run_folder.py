"""The folder of a run: its record, its checkpoints, and the rules for resuming it. Reading them runs no code.

A record says what was trained, how, on what, and the result: one JSON file for reports, sealed with a checksum.
Records of older versions have no checksum; they are read all the same.

A checkpoint is a pair of files. `step-00000120.safetensors` holds the tensors; `step-00000120.json` holds the
rest, the checksum of the tensors, and its own. The JSON file is written last, so a complete pair was written to
the end. The two most recent pairs are kept, and the best one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, option, require
from lowrank_cnn.core.files import (
    LARGEST_JSON,
    SEAL,
    BrokenSealError,
    UnreadableError,
    as_path,
    clear_temporaries,
    delete,
    is_regular,
    locked,
    parse_json,
    read_json,
    read_regular,
    sealed,
    set_aside,
    unsealed,
    write_atomically,
    write_json,
)
from lowrank_cnn.core.numbers import accuracy
from lowrank_cnn.core.text import counted, duration, html_table, si
from lowrank_cnn.data import Data
from lowrank_cnn.models.build import entry_description
from lowrank_cnn.train.recipe import Recipe, differences, in_words

SCHEMA = 1
KIND = "training"
LATER = {"begun_from", "execution"}
"""Fields that older records lack."""
NOT_WRITTEN = {"right"}
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
    `changes` are the fields of the recipe that were changed when an interrupted run was resumed.
    `result["details"]` says more of the test images (`EvaluationDetails.to_dict`): `per_class` accuracies, the
    `confusion` matrix by true class (None beyond 200 classes), the `most_confused` pairs, the `worst` images,
    and `calibration` by bins of confidence with its expected error. `data["digest"]` is the identity of the
    images, `data["val_split"]` the share of them that was taken for testing.
    `begun_from` names the trained weights that the network had before the run; empty where it had none.
    `execution` says how steps ran, compiled or not and as a CUDA graph or not; empty before the first.
    `right` says for each test image, in the order of the set, whether the network classified it correctly;
    None for several processes, for other tasks, and in a record that was read from a file.
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

    def __repr__(self) -> str:
        about = f"{self.model['name']} on {self.data['name']}, recipe {self.recipe['name']}, seed {self.seed}"
        found = {key: value for key, value in self.result.items() if value is not None}
        shown = [f"top-{k} {accuracy(found[f'top{k}'], found['n'])}" for k in (1, 5) if f"top{k}" in found]
        shown += [f"{key} {si(found[key])}" for key in ("n", "macs", "params") if key in found]
        shown += [duration(found["seconds"])] if "seconds" in found else []
        return f"{about}: {', '.join([self.status, *shown])}"

    def _repr_html_(self) -> str:
        """The summary that notebooks show: the run, its result and its last epochs."""
        columns = (">epoch", ">loss", ">train", ">accuracy", ">lr", ">images/s")
        names = ("epoch", "train_loss", "train_accuracy", "accuracy", "lr", "images_per_second")
        rows = [["" if row[name] is None else f"{row[name]:.4g}" for name in names] for row in self.history[-5:]]
        return html_table(columns, rows, repr(self))

    def save(self, path: Path, *, parents: bool = True) -> None:
        """Write the record with its checksum; `parents` makes its folder if it is not there."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in NOT_WRITTEN}
        write_json(path, sealed(values), parents=parents)


def load_record(path: str | Path) -> Record:
    """Read the record of a run, given its file or the directory of the run."""
    path = as_path(path)
    path = path / "record.json" if path.is_dir() else path
    if not path.exists():
        raise LowRankError(f"there is no record of a run at {path}.")
    try:
        stored = read_json(path)
        values = unsealed(stored) if isinstance(stored, dict) else {}
    except UnreadableError as error:
        raise LowRankError(f"{path} is not the record of a run: {error}.") from error
    except BrokenSealError as error:
        raise LowRankError(
            f"{path} is damaged or was edited: {error}. To use it as it is, delete its field {SEAL}."
        ) from error
    if values.get("kind") != KIND:
        raise LowRankError(f"{path} is not the record of a training run.")
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
    return Record(**values)


FORMAT = "lowrank-cnn checkpoint 1"
KEEP = 2
LARGEST_TENSORS = 2**36
"""Bytes of the largest file of tensors that is read: more than any network here has, less than a device gives."""


class DamagedCheckpointError(LowRankError):
    """The files are cut short, changed, or not a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors by name, and the state that JSON can hold; `stem` is where it was read from."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    stem: Path | None = None

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        start = prefix + "."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


@dataclass
class Position:
    """How far a run has come: `epoch` epochs are done, and `batch` batches of the next."""

    epoch: int = 0
    batch: int = 0
    stopped: bool = False
    epoch_seconds: float = 0.0
    best_epoch: int = 0
    best_accuracy: float = -1.0
    history: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)

    def done(self, epochs: int) -> bool:
        return self.stopped or self.epoch >= epochs

    def told(self, epochs: int) -> str:
        """The position in words, as in "the state after 3 of 10 epochs"."""
        batches, of = counted(self.batch, "batch"), f"of {counted(epochs, 'epoch')}"
        if not self.epoch:
            return f"after {batches} of the first {of}" if self.batch else "before any training"
        return f"after {self.epoch} {of} and {batches} of the next" if self.batch else f"after {self.epoch} {of}"


def write_checkpoint(stem: Path, checkpoint: Checkpoint) -> None:
    """Write the pair of files `stem.safetensors` and `stem.json`, in this order.

    A folder that was moved is not made again: the run would then lie in two places.
    """
    safetensors = require("safetensors.torch", extra="train", purpose="writing a checkpoint")
    # Contiguous copies in main memory: safetensors knows neither strides nor shared storage.
    how: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
    payload = safetensors.save({name: t.detach().to("cpu", **how) for name, t in checkpoint.tensors.items()})
    manifest = {"format": FORMAT, "tensors": hashlib.sha256(payload).hexdigest(), "state": checkpoint.state}
    write_atomically(stem.with_suffix(".safetensors"), payload, parents=False)
    write_atomically(stem.with_suffix(".json"), _manifest_bytes(manifest), parents=False)


def read_checkpoint(stem: Path) -> Checkpoint:
    """Read a pair of files back, or say in one sentence why it cannot be trusted."""
    safetensors = require("safetensors.torch", extra="train", purpose="reading a checkpoint")
    manifest = _read_manifest(stem.with_suffix(".json"))
    path = stem.with_suffix(".safetensors")
    try:
        payload = read_regular(path, most=LARGEST_TENSORS)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    if hashlib.sha256(payload).hexdigest() != manifest.get("tensors"):
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not the one that was written.")
    return Checkpoint(safetensors.load(payload), manifest["state"], stem)


def read_state(stem: Path) -> dict[str, Any]:
    """The state of a checkpoint, without reading its tensors."""
    return _read_manifest(stem.with_suffix(".json"))["state"]


def _manifest_bytes(manifest: Mapping[str, object]) -> bytes:
    return json.dumps(sealed(manifest), sort_keys=True).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, most=LARGEST_JSON)
        manifest = {name: value for name, value in parse_json(content).items() if name != SEAL}
        known = manifest["format"] == FORMAT and isinstance(manifest["state"], dict)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged or not a checkpoint of this library.") from error
    # Byte by byte: two ways to write one number have the same value, and so the same checksum.
    if content != _manifest_bytes(manifest) or not known:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not the one that was written.")
    return manifest


IMAGES = "images with the digest"
RECIPE, RECORD = "recipe.json", "record.json"
_MOST_LETTERS = 60


@dataclass(frozen=True)
class RunDirectory:
    """The files of a run: its record, its recipe, checkpoints called "step", and the "best"."""

    path: Path

    @classmethod
    def open(cls, out: str | Path | None, data: object, *, resume: bool) -> RunDirectory | None:
        """The directory of a run, not that of its images; None for a run that is not saved."""
        if out is None and resume:
            raise LowRankError(f"there is nothing to resume without the directory of a run: give {option('out')}.")
        if out is None:
            return None
        path, images = Path(out), Path(data).resolve() if isinstance(data, str | Path) else None
        if not resume and path.is_dir() and path.resolve() == images:
            raise LowRankError(
                f"{path} holds the images to train on: choose another directory for the run, such as runs/first."
            )
        return cls(path)

    def held(self) -> AbstractContextManager[None]:
        if self.path.exists() and not self.path.is_dir():
            raise LowRankError(f"{self.path} is a file: give the name of a directory.")
        return locked(self.path)

    def holds_run(self) -> bool:
        return any((self.path / name).exists() for name in (RECIPE, RECORD)) or any(self.path.glob("step-*"))

    def check_free(self) -> None:
        if self.holds_run():
            raise LowRankError(
                f"{self.path} already holds a run: go on with {option('resume', True)}, or choose another "
                f"{option('out')}."
            )

    def resume(
        self, data: Data, recipe: Recipe, about: Mapping[str, Any], say: Callable[[str], None]
    ) -> Record | Checkpoint | None:
        """The record of this run if it is complete, else the newest whole checkpoint; None if there is none yet.

        Training continues if the record is damaged or of another run, or if the last checkpoint is damaged.
        """
        damages: list[str] = []
        last, record, epochs = self.latest(damages.append), None, 0
        if (self.path / RECORD).exists():
            try:
                record = load_record(self.path)
                epochs = Recipe.from_dict(record.recipe).epochs
            except LowRankError as damage:
                say(f"{damage} The run continues from its checkpoints.")
        if record and record.status == "finished" and recipe.epochs <= epochs and not damages:
            ran = record.history == last.state["position"]["history"] if last else True
            if ran and not (last and _differing(vars(record), last.state)):
                check_same_run(vars(record), about)
                differ = differences(record.recipe, recipe.to_dict())
                fewer = f" its {counted(epochs, 'epoch')}" if differ.pop("epochs", None) else ""
                if differ:
                    raise LowRankError(f"the run in {self.path} has finished with {in_words(differ)}.")
                say(f"The run in {self.path} has finished{fewer}: nothing is left to do.")
                return record
            say(f"{self.path / RECORD} is not the record of the checkpoint beside it, which is used instead.")
        for damage in damages:
            say(f"{damage} The one before it is used.")
        if last:
            check_same_run(last.state, about)
            check_same_images(data, last, say)
        elif record and record.status == "finished":  # a new run would overwrite the record
            raise LowRankError(
                f"the run in {self.path} has finished and kept no weights to go on from: choose another "
                f"{option('out')}."
            )
        else:
            say(f"There is nothing to resume in {self.path} yet: the run starts anew.")
        return last

    def begin(self, recipe: Recipe) -> None:
        """Remove leftovers of a killed process, and write the resolved recipe.

        A record that cannot be read, and whatever has the name of a run's file but is none, is renamed.
        """
        clear_temporaries(self.path)
        for name in (RECIPE, RECORD, "step-*.json", "step-*.safetensors", "best-*.json", "best-*.safetensors"):
            for path in self.path.glob(name):
                if not is_regular(path) or (name == RECORD and _status(path) is None):
                    set_aside(path)
        write_json(self.path / RECIPE, recipe.to_dict())

    def save(self, checkpoint: Checkpoint, iteration: int, *, kind: str = "step", keep: int = KEEP) -> None:
        """Write a checkpoint, and only then remove those that it replaces.

        These are all but the last few complete pairs; also any beyond `iteration`, of a run that was taken back.
        """
        written = self.path / f"{kind}-{iteration:08d}"
        write_checkpoint(written, checkpoint)
        try:
            complete = [stem for stem in self.stems(kind) if stem.name <= written.name]
            others = {*self.stems(kind), *self.stems(kind, ".safetensors")} - {*complete[-keep:]}
        except FileNotFoundError:  # the folder was moved since: the next write says so
            return
        for stem in sorted(others):
            # The manifest goes first: without it, what is left no longer counts as a checkpoint.
            if delete(stem.with_suffix(".json")):
                delete(stem.with_suffix(".safetensors"))

    def latest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint; `say` gets a sentence about each damaged newer one."""
        for stem in (stems := self.stems("step")[::-1]):
            try:
                return read_checkpoint(stem)
            except DamagedCheckpointError as damage:
                say(str(damage))
        if stems:
            raise LowRankError(
                f"every checkpoint in {self.path} is damaged, and none can be used: "
                "train anew, in another directory."
            )
        return None

    def best(self) -> Checkpoint:
        """The best weights; an error says whether they are damaged or missing."""
        if not (found := self.stems("best")):
            raise LowRankError(
                f"{self.path} has no best weights (best-*.json and best-*.safetensors): the last ones are "
                f"used without {option('best', True)}."
            )
        try:
            return read_checkpoint(found[-1])
        except DamagedCheckpointError as damage:
            raise LowRankError(f"{damage} The last weights are used without {option('best', True)}.") from damage

    def stems(self, kind: str, suffix: str = ".json") -> list[Path]:
        """The paths of checkpoints, without suffix, the newest last."""
        return sorted(path.with_suffix("") for path in self.path.glob(f"{kind}-*{suffix}"))


def _status(path: Path) -> str | None:
    """The status of the record at a path; None if there is none that can be read."""
    try:
        return load_record(path).status
    except LowRankError:
        return None


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another network, data set or seed than the run was started with."""
    if not (differing := _differing(before, now)):
        return
    what, (then, offered) = next(iter(differing.items()))  # what follows may follow from it
    if what == IMAGES:
        raise _other_images(before["data"]["name"], "their names, sizes or contents have changed")
    raise _other_run(f"the {what} {_short(then)}", _short(offered))


def check_same_images(data: Data, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
    """Refuse to go on with images of other contents; say so if nobody can tell whether they are others."""
    for name, split in (("train", data.train), ("test", data.test)):
        before = checkpoint.part(f"images.{name}")
        changed, unknown = split.changed(before) if before else ([], 0)
        if changed:
            more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            raise _other_images(data.name, f"the contents of {changed[0]}{more} differ")
        if unknown:
            say(
                f"The time or size of {counted(unknown, 'image file')} of {data.name} has changed, and this run "
                "was stopped before it had read all images: it cannot tell whether the contents are the same."
            )


def _other_images(name: str, why: str) -> LowRankError:
    return LowRankError(
        f"the images of {name} are not those that this run was started with: {why}. Bring the old ones back, or "
        f"start a new run in another {option('out')}."
    )


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The facts in which two runs differ, as name: (before, now). A digest that is not known is not compared."""
    then, wanted = _identity(before), _identity(now)
    differing: dict[str, tuple[Any, Any]] = {}
    for what in then | wanted:
        missing = "dense" if what.startswith("layer ") else None  # a layer that was not rewritten is dense
        pair = then.get(what, missing), wanted.get(what, missing)
        if pair[0] != pair[1] and not (what == IMAGES and None in pair):
            differing[what] = pair
    return differing


def _identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run: each fact by the words that name it, before the facts that follow from it."""
    model, data = about["model"], about["data"]
    found = entry_description(model)
    ours = found["model"] is not None
    # The name of another network than ours may change with its file.
    apart = ("name", "base", "class", "config", "conversion", "thinning")
    options = {field: value for field, value in {**model, **(found["model"] or {})}.items() if field not in apart}
    return {
        "network": model["name"] if ours else model.get("class", model["name"]),
        **{f"network's {field}": value for field, value in options.items()},
        **{f"layer {row['name']} as": row["scheme"] for row in found["conversion"]["changed"]},
        **{f"channels of {name}": n for name, n in found.get("thinning", {}).get("channels", {}).items()},
        "data set": data["name"],
        "number of classes": len(data["classes"]),
        **{f"class number {number} as": name for number, name in enumerate(data["classes"])},
        "number of training images": data["train"],
        "number of test images": data["test"],
        "image size": "x".join(map(str, data["image"])) or "varying",
        IMAGES: data.get("digest"),
        "seed": about["seed"],
    }


def _other_run(started: str, offered: str) -> LowRankError:
    hint = f"leave that as it was, or start a new run in another {option('out')}"
    return LowRankError(f"this run was started with {started}, and cannot go on with {offered}: {hint}.")


def _short(value: object) -> str:
    """A value in a sentence, not in Python."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = "none" if value is None or not text else text
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def recipe_changes(saved: dict[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Fields that differ from the saved recipe, as field: (before, now); refuses a change of a fixed field."""
    before, now = type(recipe).from_dict(saved).to_dict(), recipe.to_dict()  # an older one may lack a field
    changes = {name: (before[name], now[name]) for name in now if before[name] != now[name]}
    for one in dataclasses.fields(recipe):
        if one.metadata.get("fixed") and one.name in changes:
            then, offered = changes[one.name]
            raise _other_run(f"{one.name}={_short(then)}", _short(offered))
    return changes
