"""The experiments that compare the paper's accuracies with ours: their networks and recipes, runs and tables.

A run has its own directory and uses the test set once, at its end: earlier decisions use held-out training images.
Several processes may share the work, with the same directory for all: each takes runs that are not locked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, nearest, option
from lowrank_cnn.core.files import HeldError, below, locked, write_json
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model, googlenet, nin, vgg
from lowrank_cnn.models.hub import save_pretrained
from lowrank_cnn.paper.claims import ClaimAnswer, RankAgreement, Scores, answer_claims, rank_agreement
from lowrank_cnn.paper.published import MAIN_TABLES, rows
from lowrank_cnn.train import fit, get_recipe
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import Recipe, differences, in_words, read_value
from lowrank_cnn.train.run_folder import Record, RunDirectory, load_record
from lowrank_cnn.train.trained import load_checkpoint

VGG, GOOGLENET, NIN = tuple(vgg.VARIANTS), tuple(googlenet.VARIANTS), tuple(nin.VARIANTS)
PLACES = ("vgg11-gmp", "vgg11-gmp-sf", "vgg11-gmp-lr-join", "vgg11-gmp-lr")


@dataclass(frozen=True)
class ExperimentPart:
    """A table of an experiment: networks by variants of one recipe, each over several seeds.

    variants: labels, each with its changes to the recipe and the network.
    own: changes for single networks; "recipe" names another recipe.
    as_costly_as: train cheaper networks for more epochs, up to the MACs of this one.
    tables: the published tables that it is compared with.
    note: a remark for readers of the table.
    """

    networks: tuple[str, ...]
    recipe: str
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"": {}})
    seeds: int = 3
    as_costly_as: str = ""
    own: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    tables: tuple[str, ...] = MAIN_TABLES
    note: str = ""


@dataclass(frozen=True)
class ExperimentLine:
    """A line of a table: a network of a part, with one variant of its recipe."""

    part: str
    network: str
    variant: str

    def directory(self, out: Path, seed: int) -> Path:
        variant = self.variant.replace(", ", "-").replace(" ", "-")
        return out / self.part / "-".join(filter(None, [self.network, variant, f"seed{seed}"]))


_INITS = {
    f"{init}, {'batch norm' if norm else 'no norm'}": {"init": init, "norm": norm}
    for norm in (None, "batch")
    for init in ("composite", "per-group", "torch")
}

_SMALL = (
    "Published: ILSVRC, 1000 classes, 224x224. Here: crops of 56 from images of 64 instead of 224 from 256, so "
    "feature maps have a quarter of the published side. vgg11 flattens 2x2 instead of 7x7 feature maps. "
    "GoogLeNet's first conv has stride 1 instead of 2, so its feature maps have half of the published side, "
    "and the last have 3x3 instead of 7x7 pixels."
)


_ONE_RUN = (
    "One run of each network. The learning rate is divided when accuracy on the held-out 2% of the training "
    "images levels off. The validation set is used once, at the end, with one centre crop per image."
)

_BY_HAND = (
    "The learning rate is divided after the same epochs in all networks, set by hand near the epochs at which "
    "accuracy on held-out training images had levelled off for nin and nin-c3. The test set is used once, at the "
    "end."
)

CLASSES = {"cifar10": 10}
"""Classes of data sets that are used whole; the others may be tried on some of their classes."""

_TINY = {network: {"recipe": "tiny-googlenet", "stride": 1} for network in GOOGLENET}
_FULL = {network: {"recipe": "googlenet-paper"} for network in GOOGLENET}
_DROPOUT = {"nin-c3": {"dropout": 0.4}, "nin-c3-lr": {"dropout": 0.2}}

EXPERIMENTS: dict[str, dict[str, ExperimentPart]] = {
    "cifar10": {
        "paper": ExperimentPart(NIN, "nin-paper", own=_DROPOUT, note=_BY_HAND),
        "modern": ExperimentPart(NIN, "nin-modern"),
        "modern-equal-compute": ExperimentPart(("nin-c3-lr",), "nin-modern", as_costly_as="nin"),
        "init": ExperimentPart(("nin-c3-lr",), "nin-init", _INITS),
    },
    "tiny-imagenet": {"paper": ExperimentPart(VGG + GOOGLENET, "tiny-vgg", seeds=2, own=_TINY, note=_SMALL)},
    "ilsvrc": {"paper": ExperimentPart(VGG + GOOGLENET, "vgg-paper", seeds=1, own=_FULL, note=_ONE_RUN)},
    "places": {
        "paper": ExperimentPart(
            PLACES, "vgg-paper", {"": {"stride": 2}}, seeds=1, tables=("vgg-places",), note=_ONE_RUN
        )
    },
}
"""Parts by experiment, in the order in which they run."""


def parts_of(experiment: str) -> dict[str, ExperimentPart]:
    if experiment not in EXPERIMENTS:
        raise LowRankError(f"there is no experiment {experiment!r}; {nearest(experiment, EXPERIMENTS)}")
    return EXPERIMENTS[experiment]


def lines(experiment: str, parts: Iterable[str] = (), networks: Iterable[str] = ()) -> list[ExperimentLine]:
    """Every line of an experiment, or those of the parts and networks named."""
    known = parts_of(experiment)
    _check(experiment, "part", parts, known)
    _check(experiment, "network", networks, {network for part in known.values() for network in part.networks})
    return [
        ExperimentLine(name, network, variant)
        for name, part in known.items()
        for network in part.networks
        for variant in part.variants
        if (not parts or name in parts) and (not networks or network in networks)
    ]


def _check(experiment: str, what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise LowRankError(f"{experiment} has no {what} {name!r}; {nearest(name, known)}")


MEASURES = ("top1", "top5", "overfit")
NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class AccuracyRow:
    """A line of the table: a network and variant, over its seeds. Accuracies are shares."""

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
        """The standard deviation over seeds, if there are several."""
        return stdev(self.top1) if len(self.top1) > 1 else None

    def scores(self, measure: str) -> Scores | None:
        """Our figures and the published ones; None if the paper or the records lack the measure."""
        stated = {"top1": self.published, "top5": self.published_top5}
        ours = getattr(self, measure)
        if not ours or (measure in stated and stated[measure] is None):
            return None
        return Scores(self.network, stated.get(measure), ours, self.macs, self.recipe)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": self.mean, "stdev": self.spread, "n": len(self.top1)}


@dataclass(frozen=True)
class Comparison:
    """Rows of one part and variant in one measure, with the published figures."""

    part: str
    variant: str
    measure: str
    order: RankAgreement
    gaps: Sequence[ClaimAnswer]


@dataclass(frozen=True)
class ExperimentTable:
    """All finished runs of an experiment, their verdicts on the paper's claims, and the state of the rest."""

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
                    yield Comparison(part, variant, measure, rank_agreement(scores[measure]), gaps)

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
    """The table of all finished runs in `out`; `seeds` is the wanted number of runs of each."""
    found: list[AccuracyRow] = []
    made_with: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    known, out = parts_of(experiment), Path(out)
    for line in lines(experiment, parts, networks):
        part, records = known[line.part], _records(line, out)
        finished = {seed: record for seed, record in records.items() if record.status == "finished"}
        for seed in range(1, 1 + (part.seeds if seeds is None else seeds)):
            if seed not in finished:
                missing[f"{line.part}/{line.directory(out, seed).name}"] = _state(records.get(seed))
        if finished:
            _check_alike(finished, line, out)
            found.append(_row(line, part, list(finished.values())))
            made_with += [record.environment for record in finished.values()]
    notes = {name: known[name].note for name in dict.fromkeys(row.part for row in found) if known[name].note}
    newest = {  # for each commit, device and torch
        tuple(one.get(key) for key in ("commit", "gpu", "cpu", "torch")): one
        for one in sorted(made_with, key=lambda one: one["date"])
    }
    return ExperimentTable(experiment, tuple(found), missing, notes, tuple(newest.values()))


def _records(line: ExperimentLine, out: Path) -> dict[int, Record]:
    """The records of a line by seed, from 1 up."""
    start = line.directory(out, 0).name.removesuffix("0")
    seeds = {path.name.removeprefix(start): path for path in (out / line.part).glob(f"{start}*")}
    runs = {int(seed): path for seed, path in seeds.items() if seed.isdigit() and (path / "record.json").exists()}
    return {seed: load_record(runs[seed]) for seed in sorted(runs)}


def _state(record: Record | None) -> str:
    if record is None:
        return NOT_BEGUN
    return f"{record.status}, {len(record.history)} of {counted(record.recipe['epochs'], 'epoch')}"


def _check_alike(records: dict[int, Record], line: ExperimentLine, out: Path) -> None:
    """Refuse to average runs that were trained in different ways."""
    first, one = next(iter(records.items()))
    for seed, record in records.items():
        fields = differences(one.recipe, record.recipe)
        if fields or _options(record) != _options(one):
            where = f"{line.directory(out, first)} and {line.directory(out, seed)}"
            what = f"the recipe's {', '.join(fields)}" if fields else "the network's options"
            raise LowRankError(f"{where} differ in {what}: move one of them away, then build the table again.")


def _options(record: Record) -> dict[str, Any]:
    """The network options that are set; older records lack newer options."""
    return {name: value for name, value in record.model.items() if value is not None}


def _row(line: ExperimentLine, part: ExperimentPart, records: list[Record]) -> AccuracyRow:
    results = [record.result for record in records]
    published = next((row for row in rows() if row.network == line.network and row.table in part.tables), None)
    return AccuracyRow(
        **asdict(line),
        published=published and published.top1,
        published_top5=published and published.top5,
        top1=tuple(result["top1"] for result in results),
        top5=tuple(result["top5"] for result in results),
        macs=results[0]["macs"],
        params=results[0]["params"],
        image_size=records[0].model.get("image_size"),
        epochs=mean(result["epochs"] for result in results),
        seconds=mean(result["seconds"] for result in results),
        overfit=tuple(
            trained - record.result["top1"]
            for record in records
            if record.history and (trained := record.history[-1].get("train_accuracy")) is not None
        ),
        recipe=str(records[0].recipe["name"]),
    )


NETWORK_OPTIONS = {"init": str, "width": float, "scheme": str, "stride": int}
NETWORK = "network"
"""The folder in a finished run's directory with the network to use, share and fine-tune."""


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
) -> ExperimentTable:
    """Train all of an experiment, or the parts and networks named, and write `table.json` into `out`.

    settings change the recipe and the network of every run; how goes to `fit` (device, compile, progress, ...).
    The table covers everything in `out`. If the loss of a run is not finite, this is printed, and the others
    continue.
    """
    out, known = Path(out), parts_of(experiment)
    if len(data.classes) != CLASSES.get(experiment, len(data.classes)):
        raise LowRankError(f"{experiment} has {CLASSES[experiment]} classes; {data.name} has {len(data.classes)}.")
    for line in lines(experiment, parts, networks):
        part = known[line.part]
        recipe, options = prepare(line, part, settings or {}, data)
        for seed in range(1, 1 + (part.seeds if seeds is None else seeds)):
            directory = below(out, line.directory(out, seed))
            try:
                with locked(directory):
                    _check_made_by(recipe, directory)
                    epochs = counted(recipe.epochs, "epoch")
                    say(f"{line.part}: {line.network} {line.variant} seed {seed}, {epochs}")
                    torch.manual_seed(seed)
                    network = build(line.network, recipe, options, data)
                    record = _train(network, data, recipe, directory, seed=seed, **how)
                    say(f"  top-1 {100 * record.result['top1']:.2f}% in {record.result['seconds']:.0f} s")
            except HeldError:  # another process runs it
                continue
            except NotFiniteError as error:
                say(f"  failed: {error}")
        if first_process():
            build_table(experiment, out, seeds=seeds).save(out)
    return build_table(experiment, out, seeds=seeds)


def prepare(
    line: ExperimentLine, part: ExperimentPart, settings: Mapping[str, object], data: Data
) -> tuple[Recipe, dict[str, object]]:
    wanted = {**part.own.get(line.network, {}), **part.variants[line.variant], **settings}
    name = str(wanted.pop("recipe", part.recipe))
    options = {k: read_value(k, NETWORK_OPTIONS[k], wanted.pop(k)) for k in NETWORK_OPTIONS if k in wanted}
    recipe = get_recipe(name, **wanted)
    if part.as_costly_as:  # more epochs for a cheaper network, at equal cost
        dear, own = (macs(network, recipe, options, data) for network in (part.as_costly_as, line.network))
        recipe = replace(recipe, epochs=round(recipe.epochs * dear / own))
    return recipe, options


def macs(network: str, recipe: Recipe, options: Mapping[str, object], data: Data) -> int:
    with torch.device("meta"):
        return count(build(network, recipe, options, data), image_size(data.test, augmentation(recipe))).macs


def build(network: str, recipe: Recipe, options: Mapping[str, object], data: Data) -> torch.nn.Module:
    channels, height, width = image_size(data.test, augmentation(recipe))
    chosen: dict[str, Any] = {**recipe.network(), "image_size": height if height == width else None, **options}
    return create_model(network, num_classes=len(data.classes), in_channels=channels, **chosen)


def _train(network: torch.nn.Module, data: Data, recipe: Recipe, directory: Path, **how: Any) -> Record:
    """Finish a run, and write the folder `network` that `from_pretrained` reads and `push_to_hub` publishes.

    A recipe that evaluates on the test set does so only at the end.
    """
    if not recipe.holdout:
        recipe = replace(recipe, evaluate_every=max(1, recipe.epochs))
    record = fit(network, data, recipe, out=directory, resume=RunDirectory(directory).holds_run(), **how)
    if first_process() and not (directory / NETWORK).exists() and any(directory.glob("step-*.json")):
        metrics = {name: record.result[name] for name in ("top1", "top5")}
        save_pretrained(load_checkpoint(directory).network, directory / NETWORK, metrics=metrics)
    return record


def _check_made_by(recipe: Recipe, directory: Path) -> None:
    """Refuse a run that another recipe started."""
    try:
        record = load_record(directory)
    except LowRankError:  # missing or unreadable: compare with the checkpoints
        return
    if differ := differences(record.recipe, recipe.to_dict()):
        raise LowRankError(f"{directory} was trained with {in_words(differ)}: choose another {option('out')}.")
