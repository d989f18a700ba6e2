"""Run an experiment of the paper: train what is not trained yet, go on where a run was cut, write the table.

A run lives in a directory of its own, named after its network, variant and seed. Decisions (when to divide the
learning rate, when to stop) are made on training images held out for them, by runs with seed 0; the runs that the
table shows replay those decisions on all training images and meet the test set once, at their end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from lowrank_cnn.count import count
from lowrank_cnn.data import Data
from lowrank_cnn.environment import environment
from lowrank_cnn.errors import LowRankError, nearest
from lowrank_cnn.models import create_model
from lowrank_cnn.paper.experiments import EXPERIMENTS, Part
from lowrank_cnn.paper.published import published
from lowrank_cnn.train import Record, fit, get_recipe
from lowrank_cnn.train.recipe import Recipe

NETWORK_OPTIONS = ("norm", "init", "width", "scheme", "stride")


@dataclass(frozen=True)
class Row:
    """A line of the table: a network by a variant, over its seeds. Accuracies are shares."""

    part: str
    network: str
    variant: str
    published: float | None
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    macs: int
    params: int
    epochs: float
    seconds: float

    @property
    def mean(self) -> float:
        return mean(self.top1)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, where there are several."""
        return stdev(self.top1) if len(self.top1) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": self.mean, "stdev": self.spread, "n": len(self.top1)}


@dataclass(frozen=True)
class Task:
    """One network to train, by one recipe."""

    part: str
    network: str
    variant: str
    seed: int
    recipe: Recipe
    options: Mapping[str, Any]

    def directory(self, out: Path) -> Path:
        words = [
            self.network,
            *filter(None, [self.variant.replace(", ", "-").replace(" ", "-")]),
            f"seed{self.seed}",
        ]
        return out / self.part / "-".join(words)


def reproduce(
    experiment: str,
    data: Data,
    out: str | Path,
    *,
    parts: tuple[str, ...] = (),
    networks: tuple[str, ...] = (),
    seeds: int | None = None,
    settings: Mapping[str, object] | None = None,
    say: Callable[[str], None] = print,
    **how: Any,
) -> list[Row]:
    """Train all of an experiment, or the parts and networks named, and write `table.json` into `out`.

    settings change the recipe of every run; how goes to `fit` (device, compile, progress, ...).
    """
    bench, rows = _Bench(data, Path(out), say, how), []
    for name, part in _chosen(experiment, parts).items():
        for network in (n for n in part.networks if not networks or n in networks):
            for variant, changes in part.variants.items():
                base = _base_task(name, part, network, variant, {**changes, **(settings or {})}, data)
                tasks = bench.seeded(base, part, part.seeds if seeds is None else seeds)
                rows.append(_row(base, [bench.train(task) for task in tasks]))
                write_table(rows, Path(out))
    return rows


def write_table(rows: list[Row], out: Path) -> Path:
    """The table so far, with what it was measured with."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "table.json"
    table = {"kind": "reproduction", "rows": [row.to_dict() for row in rows], "environment": environment()}
    path.write_text(json.dumps(table, indent=2) + "\n")
    return path


def _chosen(experiment: str, parts: tuple[str, ...]) -> dict[str, Part]:
    if experiment not in EXPERIMENTS:
        raise LowRankError(f"there is no experiment {experiment!r}; {nearest(experiment, EXPERIMENTS)}")
    known = EXPERIMENTS[experiment]
    for part in parts:
        if part not in known:
            raise LowRankError(f"{experiment} has no part {part!r}; {nearest(part, known)}")
    return {name: part for name, part in known.items() if not parts or name in parts}


@dataclass(frozen=True)
class _Bench:
    """Where runs are made: on which images, into which directory, how."""

    data: Data
    out: Path
    say: Callable[[str], None]
    how: Mapping[str, Any]

    def seeded(self, base: Task, part: Part, seeds: int) -> list[Task]:
        """The runs of one line of the table; their schedule may first have to be decided on held-out images."""
        recipe = base.recipe
        if part.decide:
            recipe = _decided(recipe, self.train(replace(base, part=f"{base.part}-decide")))
        return [replace(base, seed=seed, recipe=recipe) for seed in range(1, 1 + seeds)]

    def train(self, task: Task) -> Record:
        self.say(f"{task.part}: {task.network} {task.variant} seed {task.seed}, {task.recipe.epochs} epochs")
        torch.manual_seed(task.seed)
        sizes = {"num_classes": len(self.data.classes), "in_channels": self.data.test.channels}
        model = create_model(task.network, **sizes, **task.options)
        directory = task.directory(self.out)
        record = fit(model, self.data, task.recipe, seed=task.seed, out=directory, resume=True, **self.how)
        self.say(f"  top-1 {100 * record.result['top1']:.2f}% in {record.result['seconds']:.0f} s")
        return record


def _base_task(
    name: str, part: Part, network: str, variant: str, overrides: Mapping[str, Any], data: Data
) -> Task:
    """A line of the table before its seeds: the recipe and the network's options, resolved."""
    options = {key: value for key, value in overrides.items() if key in NETWORK_OPTIONS}
    recipe = get_recipe(part.recipe, **{k: v for k, v in overrides.items() if k not in options or k == "norm"})
    options.setdefault("norm", recipe.norm)
    if part.equal_compute:
        recipe = _as_costly(recipe, network, part.networks[0], data)
    return Task(name, network, variant, 0, recipe, options)


def _as_costly(recipe: Recipe, network: str, dearest: str, data: Data) -> Recipe:
    """The recipe with as many more epochs as the network is cheaper than the dearest one."""
    ratio = _macs(dearest, recipe, data) / _macs(network, recipe, data)
    return get_recipe(recipe.name, **{**recipe.to_dict(), "epochs": round(recipe.epochs * ratio)})


def _macs(network: str, recipe: Recipe, data: Data) -> int:
    with torch.device("meta"):
        model = create_model(
            network, num_classes=len(data.classes), in_channels=data.test.channels, norm=recipe.norm
        )
    return count(model, (data.test.channels, recipe.crop or 32, recipe.crop or 32)).macs


def _decided(recipe: Recipe, record: Record) -> Recipe:
    """Replay on all images the drops that were found on a part of them."""
    decisions = {"drop_epochs": tuple(record.result["drop_epochs"]), "epochs": record.result["epochs"]}
    return get_recipe(recipe.name, **{**recipe.to_dict(), **decisions, "holdout": 0.0})


def _row(task: Task, records: list[Record]) -> Row:
    results = [record.result for record in records]
    row = published().get(task.network)
    return Row(
        task.part,
        task.network,
        task.variant,
        row.top1 if row else None,
        tuple(result["top1"] for result in results),
        tuple(result["top5"] for result in results),
        results[0]["macs"],
        results[0]["params"],
        mean(result["epochs"] for result in results),
        mean(result["seconds"] for result in results),
    )
