"""Run an experiment of the paper: train what is not trained yet, go on where a run was cut, write the table.

A run lives in a directory of its own, named after its network, variant and seed. It uses the test set once, at
its end: decisions on the way are made on training images that are held out.

Several processes may share the work, with the same directory for all: each takes the runs that no other holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.data import Data
from lowrank_cnn.method.counting import count
from lowrank_cnn.models import create_model
from lowrank_cnn.models.hub import save_pretrained
from lowrank_cnn.paper.experiments import CLASSES, ExperimentLine, ExperimentPart, lines, parts_of
from lowrank_cnn.paper.table import ExperimentTable, build_table
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import below
from lowrank_cnn.system.lock import HeldError, locked
from lowrank_cnn.system.processes import first_process
from lowrank_cnn.system.text import counted
from lowrank_cnn.train import Record, fit, get_recipe, load_record
from lowrank_cnn.train.directory import RunDirectory
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import Recipe, differences, in_words
from lowrank_cnn.train.trained import load_checkpoint

NETWORK_OPTIONS: dict[str, Callable[[Any], object]] = {"init": str, "width": float, "scheme": str, "stride": int}
"""Settings that are the network's and not the recipe's, and how their text is read."""
NETWORK = "network"
"""The folder in a finished run's directory with the network to use, share and fine-tune."""


@dataclass(frozen=True)
class TrainingTask:
    """One network to train, by one recipe."""

    line: ExperimentLine
    seed: int
    recipe: Recipe
    options: Mapping[str, Any]


def reproduce(
    experiment: str,
    data: Data,
    out: str | Path,
    *,
    parts: tuple[str, ...] = (),
    networks: tuple[str, ...] = (),
    seeds: int | None = None,
    settings: Mapping[str, object] | None = None,
    keep_weights: bool = True,
    say: Callable[[str], None] = print,
    **how: Any,
) -> ExperimentTable:
    """Train all of an experiment, or the parts and networks named, and write `table.json` into `out`.

    settings change the recipe and the network of every run; keep_weights=False deletes the checkpoints of a run
    once it has finished; how goes to `fit` (device, compile, progress, ...). The table is that of everything in
    `out`. A run whose loss is not finite is said, and the others go on.
    """
    bench, known = ExperimentBench(data, Path(out), keep_weights, say, how), parts_of(experiment)
    if len(data.classes) != CLASSES.get(experiment, len(data.classes)):
        raise LowRankError(f"{experiment} has {CLASSES[experiment]} classes; {data.name} has {len(data.classes)}.")
    for line in lines(experiment, parts, networks):
        part = known[line.part]
        task = bench.prepared(line, part, settings or {})
        for seed in range(1, 1 + (part.seeds if seeds is None else seeds)):
            bench.train(replace(task, seed=seed))
        if first_process():
            build_table(experiment, out, seeds=seeds).save(Path(out))
    return build_table(experiment, out, seeds=seeds)


@dataclass(frozen=True)
class ExperimentBench:
    """Where runs are made: on which images, into which directory, how."""

    data: Data
    out: Path
    keep_weights: bool
    say: Callable[[str], None]
    how: Mapping[str, Any]

    def prepared(self, line: ExperimentLine, part: ExperimentPart, settings: Mapping[str, object]) -> TrainingTask:
        """A line of the table before its seeds: the recipe and the network's options, resolved."""
        wanted = {**part.own.get(line.network, {}), **part.variants[line.variant], **settings}
        name = str(wanted.pop("recipe", part.recipe))
        options = {key: _read(key, wanted.pop(key)) for key in NETWORK_OPTIONS if key in wanted}
        task = TrainingTask(line, 0, get_recipe(name, **wanted), options)
        return self.as_costly(task, part.as_costly_as) if part.as_costly_as else task

    def as_costly(self, task: TrainingTask, dearest: str) -> TrainingTask:
        """With as many more epochs as the network is cheaper than the dearest one."""
        other = replace(task, line=replace(task.line, network=dearest))
        epochs = round(task.recipe.epochs * self.macs(other) / self.macs(task))
        return replace(task, recipe=get_recipe(task.recipe.name, **{**task.recipe.to_dict(), "epochs": epochs}))

    def macs(self, task: TrainingTask) -> int:
        with torch.device("meta"):
            return count(self.network(task), self.input_size(task.recipe)).macs

    def network(self, task: TrainingTask) -> torch.nn.Module:
        """The network of a task, made for these images."""
        channels, height, width = self.input_size(task.recipe)
        side = height if height == width else None
        options = {**task.recipe.network(), "image_size": side, **task.options}
        return create_model(task.line.network, num_classes=len(self.data.classes), in_channels=channels, **options)

    def input_size(self, recipe: Recipe) -> tuple[int, int, int]:
        return image_size(self.data.test, augmentation(recipe))

    def train(self, task: TrainingTask) -> None:
        """Finish the run of a task, unless another process is at it; one that diverges is said."""
        directory = below(self.out, task.line.directory(self.out, task.seed))
        try:
            with locked(directory):
                _check_made_by(task.recipe, directory)
                self._train(task, directory)
        except HeldError:
            return
        except NotFiniteError as error:
            self.say(f"  failed: {error}")

    def _train(self, task: TrainingTask, directory: Path) -> None:
        line = task.line
        self.say(
            f"{line.part}: {line.network} {line.variant} seed {task.seed}, {counted(task.recipe.epochs, 'epoch')}"
        )
        torch.manual_seed(task.seed)
        recipe, begun = _tested_once(task.recipe), RunDirectory(directory).holds_run()
        how = {"seed": task.seed, "out": directory, "resume": begun, **self.how}
        record = fit(self.network(task), self.data, recipe, **how)
        self.say(f"  top-1 {100 * record.result['top1']:.2f}% in {record.result['seconds']:.0f} s")
        if first_process():
            _write_network(record, directory) if self.keep_weights else _delete_weights(directory)


def _read(option: str, value: object) -> object:
    try:
        return NETWORK_OPTIONS[option](value)
    except (TypeError, ValueError) as error:
        wanted = NETWORK_OPTIONS[option].__name__
        raise LowRankError(f"{option} wants a value of type {wanted}, not {value!r}.") from error


def _check_made_by(recipe: Recipe, directory: Path) -> None:
    """Refuse a run that another recipe began: its result is none of this one's."""
    try:
        record = load_record(directory)
    except LowRankError:  # there is none, or none that can be read: the checkpoints know
        return
    if differ := differences(record.recipe, recipe.to_dict()):
        raise LowRankError(f"{directory} was trained with {in_words(differ)}: choose another --out.")


def _tested_once(recipe: Recipe) -> Recipe:
    """A recipe that evaluates on the test set does so at the end alone; with held-out images it stays as it is."""
    return recipe if recipe.holdout else replace(recipe, evaluate_every=max(1, recipe.epochs))


def _write_network(record: Record, directory: Path) -> None:
    """Write the folder `network` that `from_pretrained` reads and `push_to_hub` publishes."""
    if not (directory / NETWORK).exists() and any(directory.glob("step-*.json")):
        metrics = {name: record.result[name] for name in ("top1", "top5")}
        save_pretrained(load_checkpoint(directory).network, directory / NETWORK, metrics=metrics)


def _delete_weights(directory: Path) -> None:
    """The manifests first: without them, what is left no longer counts as a checkpoint."""
    for suffix in ("json", "safetensors"):
        for kind in ("step", "best"):
            for path in directory.glob(f"{kind}-*.{suffix}"):
                path.unlink()
