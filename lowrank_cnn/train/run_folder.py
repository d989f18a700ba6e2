"""The directory of a run: its recipe, record and checkpoints, and the rules for resuming it.

A checkpoint is a pair of files. `step-00000120.safetensors` holds the tensors; `step-00000120.json` holds the
rest, the checksum of the tensors, and its own. The JSON file is written last, so a complete pair was written to
the end. The two most recent pairs are kept, and the best one. Reading them runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import (
    LARGEST_JSON,
    BrokenSealError,
    clear_temporaries,
    delete,
    is_regular,
    locked,
    parse_json,
    read_regular,
    sealed,
    set_aside,
    unsealed,
    write_atomically,
    write_json,
)
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data
from lowrank_cnn.models.build import entry_description
from lowrank_cnn.train.recipe import Recipe, differences, in_words
from lowrank_cnn.train.record import Record, load_record

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
        """Whether a run of this many epochs is complete."""
        return self.stopped or self.epoch >= epochs

    def told(self, epochs: int) -> str:
        """The position in words, as in "the state after 3 of 10 epochs"."""
        batches = counted(self.batch, "batch")
        if not self.epoch:
            return (
                f"after {batches} of the first of {counted(epochs, 'epoch')}"
                if self.batch
                else "before any training"
            )
        rest = f" and {batches} of the next" if self.batch else ""
        return f"after {self.epoch} of {counted(epochs, 'epoch')}{rest}"


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, in one directory."""

    directory: Path

    def save(self, checkpoint: Checkpoint, iteration: int, *, kind: str = "step", keep: int = KEEP) -> None:
        """Write a checkpoint, and only then remove those that it replaces."""
        write_checkpoint(self.directory / f"{kind}-{iteration:08d}", checkpoint)
        for stem in self._superseded(kind, iteration, keep):
            # The manifest goes first: without it, what is left no longer counts as a checkpoint.
            if delete(stem.with_suffix(".json")):
                delete(stem.with_suffix(".safetensors"))

    def latest(self, say: Callable[[str], None], *, kind: str = "step") -> Checkpoint | None:
        """The newest intact checkpoint; `say` gets a sentence about each damaged newer one."""
        damages: list[str] = []
        for stem in reversed(self._stems(kind, ".json")):
            try:
                checkpoint = read_checkpoint(stem)
            except DamagedCheckpointError as damage:
                damages.append(str(damage))
                continue
            for damage in damages:
                say(damage)
            return checkpoint
        if damages:
            raise LowRankError(
                f"every checkpoint in {self.directory} is damaged, and none can be used: "
                "train anew, in another directory."
            )
        return None

    def newest(self) -> Path | None:
        """The path of the newest checkpoint, intact or not; None if nothing has been saved yet."""
        return max(self._stems("step", ".json"), default=None)

    def _stems(self, kind: str, suffix: str) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.directory.glob(f"{kind}-*{suffix}"))

    def _superseded(self, kind: str, iteration: int, keep: int) -> list[Path]:
        """All but the last few complete pairs; also any beyond `iteration`, of a run that was taken back."""
        complete = [stem for stem in self._stems(kind, ".json") if stem.name <= f"{kind}-{iteration:08d}"]
        return sorted({*self._stems(kind, ".json"), *self._stems(kind, ".safetensors")} - {*complete[-keep:]})


def write_checkpoint(stem: Path, checkpoint: Checkpoint) -> None:
    """Write the pair of files `stem.safetensors` and `stem.json`, in this order, to a folder that is there.

    A folder that was moved is not made again: the run would then lie in two places.
    """
    safetensors = require("safetensors.torch", extra="train", purpose="writing a checkpoint")
    payload = safetensors.save({name: _portable(tensor) for name, tensor in checkpoint.tensors.items()})
    manifest = {"format": FORMAT, "tensors": _sha256(payload), "state": checkpoint.state}
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
    if _sha256(payload) != manifest.get("tensors"):
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not the one that was written.")
    return Checkpoint(safetensors.load(payload), manifest["state"], stem)


def read_state(stem: Path) -> dict[str, Any]:
    """What a checkpoint holds besides its tensors, without reading those."""
    return _read_manifest(stem.with_suffix(".json"))["state"]


def _portable(tensor: Tensor) -> Tensor:
    """A contiguous copy in main memory: safetensors knows neither strides nor shared storage."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _manifest_bytes(manifest: Mapping[str, object]) -> bytes:
    return json.dumps(sealed(manifest), sort_keys=True).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, most=LARGEST_JSON)
        manifest = unsealed(parse_json(content))
        known = manifest["format"] == FORMAT and isinstance(manifest["state"], dict)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except BrokenSealError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged or not a checkpoint of this library.") from error
    # Byte by byte: two ways to write one number have the same value, and so the same checksum.
    if content != _manifest_bytes(manifest) or not known:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not the one that was written.")
    return manifest


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


FIXED = ("batch_size", "holdout", "preprocess", "zca_epsilon", "resize", "crop", "ema", "norm", "pool")
FIXED += ("lookahead", "whiten_first", "alternate_mirror", "optimizer", "freeze")
"""Fields that cannot change in mid-run: the order of the data and the saved state depend on them."""
IMAGES = "images with the digest"
CLASSES = "number of classes"
_LAYER, _CLASS = "layer ", "class number "
RECIPE, RECORD = "recipe.json", "record.json"
_MOST_LETTERS = 60


@dataclass(frozen=True)
class RunDirectory:
    """The files of a run."""

    path: Path

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.path)

    def held(self) -> AbstractContextManager[None]:
        """Keep every other process out of the directory while the block lasts."""
        if self.path.exists() and not self.path.is_dir():
            raise LowRankError(f"{self.path} is a file: give the name of a directory.")
        return locked(self.path)

    def holds_run(self) -> bool:
        return any((self.path / name).exists() for name in (RECIPE, RECORD)) or any(self.path.glob("step-*"))

    def check_free(self) -> None:
        """Refuse to start a run over another."""
        if self.holds_run():
            raise LowRankError(f"{self.path} already holds a run: go on with --resume, or choose another --out.")

    def finished(self, recipe: Recipe, about: Mapping[str, Any], say: Callable[[str], None]) -> Record | None:
        """The record of this run if it is complete; None for a run that goes on from its checkpoints.

        A run goes on if its record is damaged or is that of another run, or if its last checkpoint is damaged.
        """
        if not (self.path / RECORD).exists():
            return None
        try:
            record = load_record(self.path)
            epochs = Recipe.from_dict(record.recipe).epochs
        except LowRankError as damage:
            say(f"{damage} The run goes on from its checkpoints.")
            return None
        if record.status != "finished" or recipe.epochs > epochs:
            return None
        damages: list[str] = []
        last = self.store.latest(damages.append)
        if damages:
            return None
        if last and not _is_of_run(record, last):
            say(f"{self.path / RECORD} is not the record of the checkpoint beside it, which is used instead.")
            return None
        check_same_run(vars(record), about)
        differ = differences(record.recipe, recipe.to_dict())
        fewer = f" its {counted(epochs, 'epoch')}" if differ.pop("epochs", None) else ""
        if differ:
            raise LowRankError(f"the run in {self.path} has finished with {in_words(differ)}.")
        say(f"The run in {self.path} has finished{fewer}: nothing is left to do.")
        return record

    def resume(self, data: Data, about: Mapping[str, Any], say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None where the run never came to write one."""
        checkpoint = self.store.latest(lambda damage: say(f"{damage} The one before it is used."))
        if checkpoint:
            check_same_run(checkpoint.state, about)
            check_same_images(data, checkpoint, say)
            return checkpoint
        if _status(self.path) == "finished":  # a new run would overwrite the record
            raise LowRankError(
                f"the run in {self.path} has finished and kept no weights to go on from: choose another --out."
            )
        say(f"There is nothing to resume in {self.path} yet: the run starts anew.")
        return None

    def check_apart_from(self, data: str | Path) -> None:
        """Refuse the folder of the images as the directory of the run, whose files would lie among them."""
        if self.path.is_dir() and self.path.resolve() == Path(data).resolve():
            raise LowRankError(
                f"{self.path} holds the images to train on: choose another directory for the run, such as "
                "runs/first."
            )

    def begin(self, recipe: Recipe) -> None:
        """Remove leftovers of a killed process, move obstacles aside, and write the resolved recipe."""
        clear_temporaries(self.path)
        self._clear_the_way()
        write_json(self.path / RECIPE, recipe.to_dict())

    def write_record(self, record: Record) -> None:
        record.save(self.path / RECORD, parents=False)

    def _clear_the_way(self) -> None:
        """Rename a record that cannot be read, and whatever has the name of a run's file but is none."""
        for name in (RECIPE, RECORD, "step-*.json", "step-*.safetensors", "best-*.json", "best-*.safetensors"):
            for path in self.path.glob(name):
                if not is_regular(path) or (name == RECORD and _status(path) is None):
                    set_aside(path)


def _status(path: Path) -> str | None:
    """The status of the record at a path; None if there is none that can be read."""
    try:
        return load_record(path).status
    except LowRankError:
        return None


def _is_of_run(record: Record, checkpoint: Checkpoint) -> bool:
    """Whether a record and a checkpoint are of one run: the same network, data and seed, and the same epochs."""
    same = not _differing(vars(record), checkpoint.state)
    return same and record.history == checkpoint.state["position"]["history"]


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another network, data set or seed than the run was started with."""
    differing = _differing(before, now)
    if list(differing) == [IMAGES]:
        raise _other_images(before["data"]["name"], "their names, sizes or contents have changed")
    if told := _telling(list(differing)):
        started = " and ".join(f"the {what} {_short(differing[what][0])}" for what in told)
        raise _other_run(started, " and ".join(_short(differing[what][1]) for what in told))


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
        "start a new run in another --out."
    )


def _telling(differing: list[str]) -> list[str]:
    """The differences to report: none that follows from another, one layer at most, and one class at most."""
    implied = (IMAGES,) if len(differing) > 1 else ()
    implied += ("network's ", _LAYER) if "network" in differing else ()
    implied += (_CLASS,) if CLASSES in differing else ()
    told: dict[str, str] = {}
    for what in differing:
        many = next((kind for kind in (_LAYER, _CLASS) if what.startswith(kind)), what)
        if not what.startswith(implied):
            told.setdefault(many, what)
    return list(told.values())


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The facts in which two runs differ, as name: (before, now). A digest that is not known is not compared."""
    then, wanted = _identity(before), _identity(now)
    differing: dict[str, tuple[Any, Any]] = {}
    for what in then | wanted:
        missing = "dense" if what.startswith(_LAYER) else None  # a layer that was not rewritten is dense
        pair = then.get(what, missing), wanted.get(what, missing)
        if pair[0] != pair[1] and not (what == IMAGES and None in pair):
            differing[what] = pair
    return differing


def _identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run: each fact by the words that name it."""
    model, data = about["model"], about["data"]
    found = entry_description(model)
    ours = found["model"] is not None
    apart = ("name", "base", "class", "config", "conversion")  # another network's name may change with its file
    options = {field: value for field, value in {**model, **(found["model"] or {})}.items() if field not in apart}
    return {
        "network": model["name"] if ours else model.get("class", model["name"]),
        **{f"network's {field}": value for field, value in options.items()},
        **{f"{_LAYER}{row['name']} as": row["scheme"] for row in found["conversion"]["changed"]},
        "data set": data["name"],
        CLASSES: len(data["classes"]),
        **{f"{_CLASS}{number} as": name for number, name in enumerate(data["classes"])},
        "number of training images": data["train"],
        "number of test images": data["test"],
        "image size": "x".join(map(str, data["image"])) or "varying",
        IMAGES: data.get("digest"),
        "seed": about["seed"],
    }


def _other_run(started: str, offered: str) -> LowRankError:
    hint = "leave that as it was, or start a new run in another --out"
    return LowRankError(f"this run was started with {started}, and cannot go on with {offered}: {hint}.")


def _short(value: object) -> str:
    """A value in a sentence, not in Python."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = "none" if value is None or not text else text
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def recipe_changes(saved: dict[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Fields that differ from the saved recipe, as field: (before, now); refuses a change of a fixed field."""
    before, now = Recipe.from_dict(saved).to_dict(), recipe.to_dict()  # an older one may lack a field
    changes = {name: (before[name], now[name]) for name in now if before[name] != now[name]}
    for name in FIXED:
        if name in changes:
            then, after = changes[name]
            raise _other_run(f"{name}={_short(then)}", _short(after))
    return changes
