"""The parts of the page that are text and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowrank_cnn.paper.auditing import (
    CONTRADICTED,
    MISSED,
    REPRODUCED,
    UNDECIDED,
    UNREPRODUCIBLE,
    UNTESTED,
    Finding,
    summary,
)
from lowrank_cnn.paper.claims import COMPARABLE
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.entries import comparable
from lowrank_cnn.report.entry import Entry
from lowrank_cnn.report.fields import text
from lowrank_cnn.report.markup import Cell, Column, Markup, join, table, tag
from lowrank_cnn.report.numbers import DASH, duration, percent, points, ratio
from lowrank_cnn.report.records import CPU, GPU, Built, Problem, Records
from lowrank_cnn.report.twins import dense_twin, is_twin, twin_known
from lowrank_cnn.system.text import si

VERDICTS = {
    REPRODUCED: "good",
    CONTRADICTED: "bad",
    UNREPRODUCIBLE: "warn",
    MISSED: "warn",
    UNDECIDED: "quiet",
    UNTESTED: "quiet",
}
MOST_SENTENCES = 4

_SUMMARY = (
    Column("network", numeric=False),
    Column("top-1", help="mean over the runs, with the standard deviation"),
    Column("to twin", help="difference to the dense twin, in percentage points, where it was trained too"),
    Column("top-5"),
    Column("MACs", help="multiply-accumulates for one image; below, the share of the dense twin's"),
    Column("parameters", help="below, the share of the dense twin's"),
    Column("CPU ms", help="milliseconds per image at the best batch; below, the share of the dense twin's"),
    Column("GPU ms", help="milliseconds per image at the best batch; below, the share of the dense twin's"),
    Column("training", help="wall-clock time of a run"),
)
_PUBLISHED = (
    Column("network", numeric=False),
    Column("data", numeric=False),
    Column("top-1"),
    Column("top-5"),
    Column("MACs"),
    Column("parameters"),
)


def headline(entries: Sequence[Entry]) -> Markup:
    """What was gained, in a few sentences: each low-rank network at its best, the most frugal first.

    Those that lost much accuracy by it come after the others: a network at a tenth of the cost is no gain as such.
    """
    saving = [entry for entry in comparable(entries) if entry.top1 is not None and _saves(entry)]
    best: dict[tuple[Built, str], Entry] = {}
    for entry in sorted(saving, key=_weight):
        best[entry.built, entry.data] = entry
    told = sorted(best.values(), key=lambda entry: (_lost(entry), entry.ratios["macs"]))
    sentences = [tag("li", _sentence(entry)) for entry in told[:MOST_SENTENCES]]
    return tag("ul", *sentences, class_="headline") if sentences else Markup("")


def _saves(entry: Entry) -> bool:
    return entry.ratios.get("macs", 1.0) < 1.0


def _lost(entry: Entry) -> bool:
    """Whether accuracy is further below the twin's than what the paper calls comparable."""
    return entry.ratios.get("top1", 0.0) < -COMPARABLE


def _weight(entry: Entry) -> tuple[bool, bool, float]:
    """What is held against a twin that was trained as well, and alike, says the most; then the more accurate."""
    return "top1" in entry.ratios, not entry.otherwise, entry.top1 or 0.0


def _sentence(entry: Entry) -> Markup:
    costs = [f"{100 * entry.ratios['macs']:.0f}% of the MACs"]
    for key, name in (("params", "parameters"), (CPU, "CPU time"), (GPU, "GPU time")):
        if key in entry.ratios:
            costs.append(f"{100 * entry.ratios[key]:.0f}% of the {name}")
    cost = costs[0] if len(costs) == 1 else f"{', '.join(costs[:-1])} and {costs[-1]}"
    parts = [tag("strong", entry.label), f" reaches {percent(entry.top1)} on {data_label(entry.data)}"]
    if "top1" in entry.ratios:
        twin = dense_twin(entry.built).label
        otherwise = f", which was trained {' and '.join(entry.otherwise)}" if entry.otherwise else ""
        parts.append(f" ({points(entry.ratios['top1'])} to {twin}{otherwise})")
    return join([*parts, f" with {cost}."])


def summary_table(entries: Sequence[Entry]) -> Markup:
    """A row for each network; without top-5 where none has it, all being of few classes."""
    kept = [i for i, c in enumerate(_SUMMARY) if c.heading != "top-5" or any(e.top5 is not None for e in entries)]
    rows = [[row[i] for i in kept] for row in map(_summary_row, entries)]
    return table("Networks of these records", [_SUMMARY[i] for i in kept], rows)


def _summary_row(entry: Entry) -> list[Cell]:
    runs = len(entry.scored)
    count = f"{runs} run{'s' * (runs > 1)}" if entry.finished else f"{runs} unfinished"
    words = [data_label(entry.data), entry.recipe, entry.variant, count] if runs else ["timed only"]
    origin = ", ".join(filter(None, words))
    spread = f"±{100 * entry.top1_spread:.2f}" if entry.top1_spread is not None else ""
    difference = entry.ratios.get("top1")
    return [
        Cell(entry.built.label, entry.label, origin),
        Cell(percent(entry.top1), entry.top1, spread),
        Cell(_to_twin(entry), difference),
        Cell(percent(entry.top5), entry.top5),
        _cost(entry, "macs"),
        _cost(entry, "params"),
        _time(entry, CPU),
        _time(entry, GPU),
        Cell(duration(entry.seconds), entry.seconds),
    ]


def _to_twin(entry: Entry) -> str:
    if is_twin(entry):
        return "twin"
    if not twin_known(entry):
        return "not known"
    return points(entry.ratios["top1"]) if "top1" in entry.ratios else DASH


def _cost(entry: Entry, name: str) -> Cell:
    value = getattr(entry, name)
    return Cell(DASH if value is None else si(value), value, _ratio(entry, name))


def _time(entry: Entry, device: str) -> Cell:
    timing = entry.time(device)
    if timing is None:
        return Cell(DASH)
    small = _ratio(entry, device) or f"batch {timing.batch}"
    return Cell(f"{timing.ms_per_image:.3g}", timing.ms_per_image, small)


def _ratio(entry: Entry, name: str) -> str:
    return ratio(entry.ratios[name]) if name in entry.ratios else ""


def published_table() -> Markup:
    return table("Published figures", _PUBLISHED, [_published_row(row) for row in rows()])


def _published_row(row: Published) -> list[Cell]:
    augmented = "extra augmentation" if row.table == "big-picture-augmented" else ""
    base = next((r for r in rows() if r.table == row.table and r.network == _base(row)), None)
    macs, params = (
        ratio(getattr(row, name) / getattr(base, name)) if base and base is not row else ""
        for name in ("macs", "params")
    )
    return [
        Cell(row.network, row.network, augmented),
        Cell(data_label(row.dataset), row.dataset),
        Cell(percent(row.top1), row.top1),
        Cell(percent(row.top5), row.top5),
        Cell(si(row.macs), row.macs, macs),
        Cell(si(row.params), row.params, params),
    ]


def _base(row: Published) -> str:
    return dense_twin(Built(row.network)).name


def audit_part(findings: Sequence[Finding]) -> Markup:
    """How the published figures fared, at a glance, and each of them."""
    counts = summary(list(findings))
    chips = [
        tag("li", tag("b", str(counts.get(v, 0))), f" {v}", class_=f"verdict {c}") for v, c in VERDICTS.items()
    ]
    names = ("table", "subject", "quantity", "published", "computed here", "verdict", "note")
    columns = [Column(name, numeric=name in ("published", "computed here")) for name in names]
    cells = [[Cell(value, _sorted_by(value)) for value in finding.to_dict().values()] for finding in findings]
    details = tag("summary", f"All {len(findings)} figures and claims")
    return join([tag("ul", *chips, class_="verdicts"), tag("details", details, table("Audit", columns, cells))])


def _sorted_by(shown: str) -> float | str | None:
    """Counts are sorted as numbers, whatever separates their digits."""
    plain = shown.replace(",", "").removesuffix("%")
    return float(plain) if plain.replace(".", "", 1).isdigit() else shown or None


def environment_part(records: Records, here: Mapping[str, Any]) -> Markup:
    """Every machine that a record was made on, and the one that made this page."""
    kinds = [*records.runs, *records.timings]
    known = {_essence(record.environment): record.environment for record in kinds if record.environment}
    columns = [*known.values(), here]
    headings = [f"records {number}" for number in range(1, len(columns))] + ["this page"]
    body = [
        [Cell(name), *(Cell(text(column.get(name)) or DASH) for column in columns)] for name in _names(columns)
    ]
    heads = [Column("", numeric=False), *(Column(heading, numeric=False) for heading in headings)]
    return table("Environment", heads, body, sortable=False)


def _essence(environment: Mapping[str, Any]) -> str:
    """Records of one day's runs differ by their date alone: those share a column."""
    return repr(sorted((k, str(v)) for k, v in environment.items() if k != "date"))


def _names(columns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(name for column in columns for name in column):
        if any(column.get(name) is not None for column in columns):
            yield name


def skipped(problems: Sequence[Problem]) -> Markup:
    """A word at the top of the page about files that are missing from it."""
    if not problems:
        return Markup("")
    count = len(problems)
    return join([" ", tag("a", f"{count} file{'s' * (count > 1)} could not be shown.", href="#problems")])


def problems_part(problems: Sequence[Problem]) -> Markup:
    if not problems:
        return Markup("")
    lines = [tag("li", tag("code", problem.path), f": {problem.reason}") for problem in problems]
    title = tag("h2", "Files that are not shown")
    return tag("section", title, tag("ul", *lines), id="problems", class_="card warn")
