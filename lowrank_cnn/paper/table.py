"""The table of an experiment, built from the records of finished runs alone.

Several processes may train into one directory at the same time: each run writes its own record, and whoever looks
sees all that have finished so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from lowrank_cnn.paper.claims import Scores, answer_claims, rank_agreement
from lowrank_cnn.paper.experiments import ExperimentLine, ExperimentPart, lines, parts_of
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import write_json
from lowrank_cnn.system.text import counted
from lowrank_cnn.train.recipe import differences
from lowrank_cnn.train.record import Record, load_record

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
