"""The directory of a run: recipe.json, record.json, its checkpoints, and the rules for going on in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.checkpoint import Checkpoint, Store, clear_temporaries, write_json
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.record import Record, load_record

FIXED = ("batch_size", "holdout", "preprocess", "zca_epsilon", "resize", "crop", "ema", "norm", "pool")
"""Fields that cannot change in mid-run: the order of the data and the saved state hang on them."""
_MOST_LETTERS = 60


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps what must survive it."""

    path: Path

    @property
    def store(self) -> Store:
        return Store(self.path)

    def holds_run(self) -> bool:
        return any((self.path / name).exists() for name in ("recipe.json", "record.json")) or any(
            self.path.glob("step-*")
        )

    def check_free(self) -> None:
        """Refuse to start over what is already there."""
        if self.path.exists() and not self.path.is_dir():
            raise LowRankError(f"{self.path} is a file: give the name of a directory.")
        if self.holds_run():
            raise LowRankError(f"{self.path} already holds a run: go on with --resume, or choose another --out.")

    def finished(self, recipe: Recipe, say: Callable[[str], None]) -> Record | None:
        """The record of a run that has nothing left to do; one that cannot be read is written anew.

        A run whose last weights are damaged has something left to do: it goes on from those before them.
        """
        if not (self.path / "record.json").exists():
            return None
        try:
            record = load_record(self.path)
            more = recipe.epochs > Recipe.from_dict(record.recipe).epochs
        except LowRankError as damage:
            say(f"{damage} The checkpoints say where the run stands.")
            return None
        return record if record.status == "finished" and not more and self._last_is_whole() else None

    def _last_is_whole(self) -> bool:
        """Whether the last weights can be read, or none were kept; an error where all are damaged."""
        damages: list[str] = []
        self.store.latest(damages.append)
        return not damages

    def resume(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None where the run never came to write one."""
        return self.store.latest(lambda damage: say(f"{damage} The one before it is used."))

    def kept_nothing(self) -> bool:
        """Whether a run has finished here and its weights are gone: to begin anew would lose its record."""
        try:
            return load_record(self.path).status == "finished"
        except LowRankError:
            return False

    def begin(self, recipe: Recipe) -> None:
        """Sweep up after a killed process, and write the resolved recipe beside the run."""
        clear_temporaries(self.path)
        write_json(self.path / "recipe.json", recipe.to_dict())

    def write_record(self, record: Record) -> None:
        record.save(self.path / "record.json")


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another network, data set or seed than the run was started with."""
    then, wanted = _identity(before), _identity(now)
    differing = [what for what in then | wanted if then.get(what) != wanted.get(what)]
    if "network" in differing:  # its options then differ as well, and say nothing more
        differing = [what for what in differing if not what.startswith("network's")]
    if differing:
        started = " and ".join(f"the {what} {_short(then.get(what))}" for what in differing)
        offered = " and ".join(_short(wanted.get(what)) for what in differing)
        raise LowRankError(f"this run was started with {started}, and cannot go on with {offered}.")


def _identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run that run, each fact by the words that name it."""
    model, data = about["model"], about["data"]
    return {
        "network": model["name"],
        **{f"network's {field}": value for field, value in model.items() if field != "name"},
        "data set": data["name"],
        "classes": list(data["classes"]),
        "number of training images": data["train"],
        "number of test images": data["test"],
        "image size": "x".join(map(str, data["image"])) or "varying",
        "seed": about["seed"],
    }


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def recipe_changes(saved: dict[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """What differs from the saved recipe, as field: (before, now); refused where the run hangs on it."""
    before, now = Recipe.from_dict(saved).to_dict(), recipe.to_dict()  # an older one may lack a field
    changes = {field: (before[field], now[field]) for field in now if before[field] != now[field]}
    for field in FIXED:
        if field in changes:
            then, after = changes[field]
            raise LowRankError(f"this run was started with {field}={then}, and cannot go on with {after}.")
    return changes
