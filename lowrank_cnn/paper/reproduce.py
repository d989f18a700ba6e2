"""Run an experiment of the paper: train what is not trained yet, go on where a run was cut, write the table.

A run lives in a directory of its own, named after its network, variant and seed. It uses the test set once, at
its end: decisions on the way are made on training images that are held out.

Several processes may share the work, with the same directory for all: each takes the runs that no other holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import HeldError, below, locked, write_json
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model
from lowrank_cnn.models.hub import save_pretrained
from lowrank_cnn.paper.claims import Scores, answer_claims, rank_agreement
from lowrank_cnn.paper.experiments import CLASSES, ExperimentLine, ExperimentPart, lines, parts_of
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.train import fit, get_recipe
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import Recipe, differences, in_words
from lowrank_cnn.train.run_folder import Record, RunDirectory, load_record
from lowrank_cnn.train.trained import load_checkpoint

MEASURES = ("top1", "top5", "overfit")
NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class AccuracyRow:
    """A line of the table: a network by a variant, over its seeds. Accuracies are shares."""

    part: str
    network: str
    variant: str
    published: float | None
    published_top5: float | None
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    macs: int
    params: int
    image_size: int | None
    epochs: float
    seconds: float
    overfit: tuple[float, ...] = ()
    """Accuracy on the augmented training images of the last epoch, minus accuracy on the test images."""
    recipe: str = ""

    @property
    def mean(self) -> float:
        return mean(self.top1)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, where there are several."""
        return stdev(self.top1) if len(self.top1) > 1 else None

    def scores(self, measure: str) -> Scores | None:
        """What is compared with the paper; None where it states nothing, or the records lack the measure."""
        stated = {"top1": self.published, "top5": self.published_top5}
        ours = getattr(self, measure)
        if not ours or (measure in stated and stated[measure] is None):
            return None
        return Scores(self.network, stated.get(measure), ours, self.macs, self.recipe)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": self.mean, "stdev": self.spread, "n": len(self.top1)}


@dataclass(frozen=True)
class Comparison:
    """Rows of one part and variant in one measure, beside the published figures."""

    part: str
    variant: str
    measure: str
    order: dict[str, Any]
    gaps: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ExperimentTable:
    """All finished runs of an experiment, what they say of the paper, and how the others stand."""

    experiment: str
    rows: tuple[AccuracyRow, ...]
    missing: dict[str, str]
    notes: dict[str, str]
    environments: tuple[dict[str, Any], ...] = ()

    def comparisons(self) -> Iterator[Comparison]:
        """For each part and variant: the claims answered in every measure, corrected together."""
        for part, variant in dict.fromkeys((row.part, row.variant) for row in self.rows):
            mine = [row for row in self.rows if (row.part, row.variant) == (part, variant)]
            scores = {m: [score for row in mine if (score := row.scores(m))] for m in MEASURES}
            for measure, gaps in answer_claims(scores).items():
                if len(scores[measure]) > 1:
                    agreement = rank_agreement(scores[measure]).to_dict()
                    yield Comparison(part, variant, measure, agreement, tuple(gap.to_dict() for gap in gaps))

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "reproduction",
            "experiment": self.experiment,
            "notes": self.notes,
            "rows": [row.to_dict() for row in self.rows],
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
            "missing": self.missing,
            "environments": list(self.environments),
            "environment": self.environments[-1] if self.environments else environment(),
        }

    def save(self, out: Path) -> Path:
        """Write `table.json`, with what its runs were made with."""
        write_json(out / "table.json", self.to_dict())
        return out / "table.json"


def build_table(
    experiment: str,
    out: str | Path,
    *,
    parts: Iterable[str] = (),
    networks: Iterable[str] = (),
    seeds: int | None = None,
) -> ExperimentTable:
    """The table of all runs that have finished in `out`; `seeds` says how many of each are wanted."""
    found: list[AccuracyRow] = []
    made_with: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    known = parts_of(experiment)
    for line in lines(experiment, parts, networks):
        part = known[line.part]
        wanted = part.seeds if seeds is None else seeds
        records = _finished(line, Path(out))
        missing |= _unfinished(line, Path(out), [seed for seed in range(1, 1 + wanted) if seed not in records])
        if records:
            found.append(_row(line, part, list(records.values())))
            made_with += [record.environment for record in records.values()]
    notes = {name: known[name].note for name in dict.fromkeys(row.part for row in found) if known[name].note}
    return ExperimentTable(experiment, tuple(found), missing, notes, _distinct(made_with))


def _distinct(made_with: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What runs were made with, oldest first: the newest of each code, device and torch."""
    ordered = sorted(made_with, key=lambda known: known["date"])
    return tuple(
        {tuple(known.get(key) for key in ("commit", "gpu", "cpu", "torch")): known for known in ordered}.values()
    )


def _finished(line: ExperimentLine, out: Path) -> dict[int, Record]:
    """The records of a line by seed, from 1 up; all by the same recipe."""
    records: dict[int, Record] = {}
    start = line.directory(out, 0).name.removesuffix("0")
    for path in sorted((out / line.part).glob(f"{start}*/record.json")):
        seed = path.parent.name.removeprefix(start)
        if seed.isdigit() and (record := load_record(path)).status == "finished":
            records[int(seed)] = record
    _check_alike(records, line, out)
    return dict(sorted(records.items()))


def _check_alike(records: dict[int, Record], line: ExperimentLine, out: Path) -> None:
    """Refuse to average runs that were trained in different ways."""
    for seed, record in records.items():
        first, one = next(iter(records.items()))
        fields = differences(one.recipe, record.recipe)
        if fields or _options(record) != _options(one):
            where = f"{line.directory(out, first)} and {line.directory(out, seed)}"
            what = f"the recipe's {', '.join(fields)}" if fields else "the network's options"
            raise LowRankError(f"{where} differ in {what}: move one of them away, then build the table again.")


def _options(record: Record) -> dict[str, Any]:
    """Those of its network that are set; older records lack some that were added since."""
    return {name: value for name, value in record.model.items() if value is not None}


def _unfinished(line: ExperimentLine, out: Path, seeds: Iterable[int]) -> dict[str, str]:
    """How the runs with these seeds stand, by the name of their directory."""
    found: dict[str, str] = {}
    for directory in (line.directory(out, seed) for seed in seeds):
        found[f"{line.part}/{directory.name}"] = NOT_BEGUN
        if (directory / "record.json").exists():
            record = load_record(directory)
            stands = f"{record.status}, {len(record.history)} of {counted(record.recipe['epochs'], 'epoch')}"
            found[f"{line.part}/{directory.name}"] = stands
    return found


def _row(line: ExperimentLine, part: ExperimentPart, records: list[Record]) -> AccuracyRow:
    results = [record.result for record in records]
    published = _published(line.network, part)
    return AccuracyRow(
        line.part,
        line.network,
        line.variant,
        published.top1 if published else None,
        published.top5 if published else None,
        tuple(result["top1"] for result in results),
        tuple(result["top5"] for result in results),
        results[0]["macs"],
        results[0]["params"],
        records[0].model.get("image_size"),
        mean(result["epochs"] for result in results),
        mean(result["seconds"] for result in results),
        tuple(gap for record in records if (gap := _overfit(record)) is not None),
        str(records[0].recipe["name"]),
    )


def _overfit(record: Record) -> float | None:
    trained = record.history[-1].get("train_accuracy") if record.history else None
    return None if trained is None else trained - record.result["top1"]


def _published(network: str, part: ExperimentPart) -> Published | None:
    return next((row for row in rows() if row.network == network and row.table in part.tables), None)


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
