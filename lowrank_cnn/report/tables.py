"""The tables of the page, as rows of cells that the template writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowrank_cnn.paper.auditing import (
    CONTRADICTED,
    MISSED,
    REPRODUCED,
    UNDECIDED,
    UNREPRODUCIBLE,
    UNTESTED,
    VERDICTS,
    Finding,
)
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report.comparing import is_twin, twin_id, twin_known
from lowrank_cnn.report.datasets import data_label, trained_label
from lowrank_cnn.report.fields import text
from lowrank_cnn.report.records import CPU, GPU, NetworkId, NetworkResult, Records
from lowrank_cnn.system.text import DASH, counted, duration, percent, points, ratio, si

VERDICT_COLOURS = {
    CONTRADICTED: "bad",
    UNREPRODUCIBLE: "warn",
    MISSED: "warn",
    UNDECIDED: "quiet",
    UNTESTED: "quiet",
    REPRODUCED: "good",
}


@dataclass(frozen=True)
class TableColumn:
    """A column's heading; numbers stand to the right and are sorted as such."""

    heading: str
    numeric: bool = True
    help: str = ""


@dataclass(frozen=True)
class TableCell:
    """A cell: its text, its sort key (None sorts last), a second line in small print, and a list to open."""

    shown: str
    value: float | str | None = None
    small: str = ""
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    name: str
    caption: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    sortable: bool = True


_SUMMARY = (
    TableColumn("network", numeric=False),
    TableColumn("top-1", help="mean over seeds, with the standard deviation"),
    TableColumn(
        "to twin", help="difference to the dense twin in percentage points, with its 95% interval over seeds"
    ),
    TableColumn("top-5"),
    TableColumn("MACs", help="multiply-accumulates for one image; below, the share of the dense twin's"),
    TableColumn("parameters", help="below, the share of the dense twin's"),
    TableColumn("CPU ms/image", help="at the best batch; below, the share of the dense twin's"),
    TableColumn("GPU ms/image", help="at the best batch; below, the share of the dense twin's"),
    TableColumn("training", help="wall-clock time of a run that had the device to itself"),
)
_PUBLISHED = tuple(
    TableColumn(name, numeric=name not in ("network", "data"))
    for name in ("network", "data", "top-1", "top-5", "MACs", "parameters")
)


def summary_table(results: Sequence[NetworkResult]) -> PageTable:
    """A row for each network, with the runs behind it; without top-5 where no network has one."""
    kept = [i for i, c in enumerate(_SUMMARY) if c.heading != "top-5" or any(r.top5 is not None for r in results)]
    body = tuple(tuple(row[i] for i in kept) for row in map(_summary_row, results))
    return PageTable("networks", "Networks of these records", tuple(_SUMMARY[i] for i in kept), body)


def _summary_row(result: NetworkResult) -> list[TableCell]:
    words = [trained_label(result.data, result.recipe), result.variant, runs_in_words(result)]
    origin = ", ".join(filter(None, words)) if result.runs else "timed only"
    spread = f"±{100 * result.top1_spread:.2f}" if result.top1_spread is not None else ""
    reach = f"±{result.gap_half_width:.2f}" if result.gap_half_width is not None else ""
    return [
        TableCell(result.network.label, result.label, origin, tuple(_named_runs(result))),
        TableCell(percent(result.top1), result.top1, spread),
        TableCell(_to_twin(result), result.ratios.get("top1"), reach if not is_twin(result) else ""),
        TableCell(percent(result.top5), result.top5),
        _cost(result, "macs"),
        _cost(result, "params"),
        _time(result, CPU),
        _time(result, GPU),
        _training(result),
    ]


def runs_in_words(result: NetworkResult) -> str:
    """The number of runs and of seeds; unfinished runs count only if none has finished."""
    runs, seeds = len(result.scored), result.seeds
    count = counted(runs, "run") if result.finished else f"{runs} unfinished"
    words = [count if seeds in (0, runs) else f"{count} of {counted(seeds, 'seed')}"]
    unsealed = sum(not run.sealed for run in result.scored)
    words += [f"{unsealed} unsealed" if unsealed < runs else "unsealed"] if unsealed else []
    return ", ".join(words)


def _named_runs(result: NetworkResult) -> Iterator[str]:
    """Every run by its file, with its seed and its accuracy."""
    for run in result.runs:
        seed = "" if run.seed is None else f", seed {run.seed}"
        state = "" if run.finished else f", {run.status}"
        seal = "" if run.sealed else ", unsealed"
        yield f"{run.path}{seed}: {percent(run.top1)}{state}{seal}"


def _to_twin(result: NetworkResult) -> str:
    if is_twin(result):
        return "twin"
    if not twin_known(result):
        return "not known"
    return points(result.ratios["top1"]) if "top1" in result.ratios else DASH


def _cost(result: NetworkResult, name: str) -> TableCell:
    value = getattr(result, name)
    return TableCell(DASH if value is None else si(value), value, _ratio(result, name))


def _time(result: NetworkResult, device: str) -> TableCell:
    timing = result.time(device)
    if timing is None:
        return TableCell(DASH)
    small = _ratio(result, device) or f"batch {timing.batch}"
    return TableCell(f"{timing.ms_per_image:.3g}", timing.ms_per_image, small)


def _training(result: NetworkResult) -> TableCell:
    """Times of runs that shared their device cannot be compared, and are not sorted by."""
    if result.seconds is None:
        return TableCell(DASH)
    if result.shared:
        return TableCell(duration(result.seconds), None, "shared device")
    return TableCell(duration(result.seconds), result.seconds)


def _ratio(result: NetworkResult, name: str) -> str:
    return ratio(result.ratios[name]) if name in result.ratios else ""


def published_table() -> PageTable:
    body = tuple(tuple(_published_row(row)) for row in rows())
    return PageTable("published", "Published figures", _PUBLISHED, body)


def _published_row(row: Published) -> list[TableCell]:
    augmented = "extra augmentation" if row.table == "big-picture-augmented" else ""
    base = next((r for r in rows() if r.table == row.table and r.network == _base(row)), None)
    macs, params = (
        ratio(getattr(row, name) / getattr(base, name)) if base and base is not row else ""
        for name in ("macs", "params")
    )
    crops = f"{row.crops} crops: {si(row.macs_per_image)}" if row.crops > 1 else macs
    return [
        TableCell(row.network, row.network, augmented),
        TableCell(data_label(row.dataset), row.dataset),
        TableCell(percent(row.top1), row.top1),
        TableCell(percent(row.top5), row.top5),
        TableCell(si(row.macs), row.macs, crops),
        TableCell(si(row.params), row.params, params),
    ]


def _base(row: Published) -> str:
    return twin_id(NetworkId(row.network)).name


def audit_table(findings: Sequence[Finding]) -> PageTable:
    """Every finding, disagreements first."""
    names = ("verdict", "subject", "quantity", "published", "computed here", "note", "table")
    columns = tuple(TableColumn(name, numeric=name in ("published", "computed here")) for name in names)
    ordered = sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict))
    return PageTable("audit", "Audit", columns, tuple(tuple(_audit_row(finding)) for finding in ordered))


def _audit_row(finding: Finding) -> list[TableCell]:
    shown = (finding.subject, finding.quantity, finding.published, finding.computed, finding.note, finding.table)
    verdict = TableCell(finding.verdict, VERDICTS.index(finding.verdict))
    return [verdict, *(TableCell(value, _sorted_by(value)) for value in shown)]


def _sorted_by(shown: str) -> float | str | None:
    """Counts are sorted as numbers, whatever separates their digits."""
    plain = shown.replace(",", "").removesuffix("%")
    return float(plain) if plain.replace(".", "", 1).isdigit() else shown or None


def environment_table(records: Records, here: Mapping[str, Any]) -> PageTable:
    """Every machine that a record was made on, and the one that made this page."""
    kinds = [*records.runs, *records.timings]
    known = {_essence(record.environment): record.environment for record in kinds if record.environment}
    machines = [*known.values(), here]
    headings = ["", *(f"records {number}" for number in range(1, len(machines))), "this page"]
    names = dict.fromkeys(name for machine in machines for name in machine)
    body = tuple(
        (TableCell(name), *(TableCell(_shown(name, machine) or DASH) for machine in machines))
        for name in names
        if any(machine.get(name) is not None for machine in machines)
    )
    columns = tuple(TableColumn(heading, numeric=False) for heading in headings)
    return PageTable("machines", "Environment", columns, body, sortable=False)


def _shown(name: str, machine: Mapping[str, Any]) -> str | None:
    """A field of an environment as text: a date to the minute, a commit by its first twelve digits."""
    value = text(machine.get(name))
    if value and name == "date":
        return value[:16].replace("T", " ")
    return value[:12] if value and name == "commit" else value


def _essence(environment: Mapping[str, Any]) -> str:
    """Records of one day's runs differ in their date alone: those share a column."""
    return repr(sorted((key, str(value)) for key, value in environment.items() if key != "date"))
