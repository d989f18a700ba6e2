"""The directory of a run: its recipe, record and checkpoints, and the rules for resuming it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowrank_cnn.data import Data
from lowrank_cnn.models.rebuild import entry_description
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import clear_temporaries, is_regular, set_aside, write_json
from lowrank_cnn.system.lock import locked
from lowrank_cnn.system.text import counted
from lowrank_cnn.train.checkpoint import Checkpoint, CheckpointStore
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.record import Record, load_record

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

    def finished(self, recipe: Recipe, say: Callable[[str], None]) -> Record | None:
        """The record of a run that is complete; None for a run that goes on from its checkpoints.

        A run goes on if its record is damaged or is that of another run, or if its last checkpoint is damaged.
        """
        if not (self.path / RECORD).exists():
            return None
        try:
            record = load_record(self.path)
            more = recipe.epochs > Recipe.from_dict(record.recipe).epochs
        except LowRankError as damage:
            say(f"{damage} The run goes on from its checkpoints.")
            return None
        if record.status != "finished" or more:
            return None
        damages: list[str] = []
        last = self.store.latest(damages.append)
        if last and not damages and not _is_of_run(record, last):
            say(f"{self.path / RECORD} is not the record of the checkpoint beside it, which is used instead.")
            return None
        return None if damages else record

    def resume(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None where the run never came to write one."""
        return self.store.latest(lambda damage: say(f"{damage} The one before it is used."))

    def check_apart_from(self, data: str | Path) -> None:
        """Refuse the folder of the images as the directory of the run, whose files would lie among them."""
        if self.path.is_dir() and self.path.resolve() == Path(data).resolve():
            raise LowRankError(
                f"{self.path} holds the images to train on: choose another directory for the run, such as "
                "runs/first."
            )

    def kept_nothing(self) -> bool:
        """Whether a run has finished here and its weights are gone: a new run would overwrite its record."""
        try:
            return load_record(self.path).status == "finished"
        except LowRankError:
            return False

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
                if not is_regular(path) or (name == RECORD and not _is_readable(path)):
                    set_aside(path)


def _is_readable(path: Path) -> bool:
    try:
        load_record(path)
    except LowRankError:
        return False
    return True


def _is_of_run(record: Record, checkpoint: Checkpoint) -> bool:
    """Whether a record and a checkpoint are of one run: the same network, data and seed, and the same epochs."""
    same = _differing(vars(record), checkpoint.state) == []
    return same and record.history == checkpoint.state["position"]["history"]


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another network, data set or seed than the run was started with."""
    then, wanted, differing = _identity(before), _identity(now), _differing(before, now)
    if IMAGES in differing and len(differing) == 1:
        raise _other_images(before["data"]["name"], "their names, sizes or contents have changed")
    if differing := _telling(differing):
        started = " and ".join(f"the {what} {_short(_value(then, what))}" for what in differing)
        offered = " and ".join(_short(_value(wanted, what)) for what in differing)
        raise _other_run(started, offered)


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
    """Without what follows from other differences, and with the first of all layers and of all classes."""
    implied = (IMAGES,) if len(differing) > 1 else ()
    implied += ("network's ", _LAYER) if "network" in differing else ()
    implied += (_CLASS,) if CLASSES in differing else ()
    told: dict[str, str] = {}
    for what in differing:
        many = next((kind for kind in (_LAYER, _CLASS) if what.startswith(kind)), what)
        if not what.startswith(implied):
            told.setdefault(many, what)
    return list(told.values())


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What the two differ in. Runs of older versions have no digest of their images, and are not judged by it."""
    then, wanted = _identity(before), _identity(now)
    found = [what for what in then | wanted if _value(then, what) != _value(wanted, what)]
    known = then[IMAGES] is not None and wanted[IMAGES] is not None
    return [what for what in found if what != IMAGES or known]


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


def _value(identity: Mapping[str, Any], what: str) -> Any:
    """A fact; a layer that was not rewritten is dense."""
    return identity.get(what, "dense" if what.startswith(_LAYER) else None)


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
    changes = {field: (before[field], now[field]) for field in now if before[field] != now[field]}
    for field in FIXED:
        if field in changes:
            then, after = changes[field]
            raise _other_run(f"{field}={_short(then)}", _short(after))
    return changes
