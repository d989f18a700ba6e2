"""The page: one HTML file with everything in it, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import write_atomically
from lowrank_cnn.core.text import DASH, TIMES, counted, duration, percent, points, ratio, si
from lowrank_cnn.paper.audit import (
    CONTRADICTED,
    MISSED,
    REPRODUCED,
    UNDECIDED,
    UNREPRODUCIBLE,
    UNTESTED,
    VERDICTS,
    Finding,
    audit,
    summary,
)
from lowrank_cnn.paper.claims import COMPARABLE
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report import charts, style, trade
from lowrank_cnn.report.reading import read_records, require_records
from lowrank_cnn.report.records import CPU, GPU, NetworkId, NetworkResult, Records, data_label, text, trained_label
from lowrank_cnn.report.results import accuracies, comparable, gather, is_twin, layer_times, twin_id, twin_known

MOST_CARDS = 4
MOST_ACCURATE, CHEAPEST = "Most accurate low-rank network", f"Cheapest within {COMPARABLE:g} point"
COSTS = {GPU: "GPU time", CPU: "CPU time", "macs": "MACs", "params": "parameters"}
"""What a network costs; a measured time tells more than a count."""


@dataclass(frozen=True)
class Card:
    """One low-rank network beside its dense twin, in words."""

    title: str
    network: str
    twin: str
    data: str
    difference: str
    accuracy: str
    cost: str
    sure: str
    mood: str
    """good, bad or quiet: how the certainty is coloured."""
    gain: bool
    """Surely more accurate, or cheaper and surely as good."""


def cards(results: Sequence[NetworkResult]) -> list[Card]:
    """By data set and its best recipe: the most accurate low-rank network, and the cheapest comparable one."""
    found: list[Card] = []
    for group in _compared(results):
        best = max(group, key=lambda result: result.ratios["top1"])
        near = [result for result in group if result.ratios["top1"] >= -COMPARABLE and _cost(result) < 1]
        cheapest = min(near, key=_cost, default=best)
        if cheapest is not best:
            found += [_card(MOST_ACCURATE, best), _card(CHEAPEST, cheapest)]
        else:
            found.append(_card(f"{MOST_ACCURATE}, and {CHEAPEST.lower()}" if near else MOST_ACCURATE, best))
    return found[:MOST_CARDS]


def headline(found: Sequence[Card]) -> str:
    """The title of the page: it speaks of a gain only where every card shows one."""
    if not found:
        return "Networks trained and timed"
    return (
        "What low rank gained"
        if all(card.gain for card in found)
        else "Low-rank networks beside their dense twins"
    )


def _compared(results: Sequence[NetworkResult]) -> list[list[NetworkResult]]:
    """The low-rank networks with a trained twin, by data set; of each the first recipe, which is the best."""
    groups: dict[str, dict[str, list[NetworkResult]]] = {}
    for result in comparable(results):
        if "top1" in result.ratios and not is_twin(result) and "macs" in result.ratios:
            groups.setdefault(result.data, {}).setdefault(result.recipe, []).append(result)
    return [next(iter(recipes.values())) for recipes in groups.values()]


def _cost(result: NetworkResult) -> float:
    return next(result.ratios[name] for name in COSTS if name in result.ratios)


def _card(title: str, result: NetworkResult) -> Card:
    gap, reach = result.ratios["top1"], result.gap_half_width
    costs = [f"{TIMES}{result.ratios[name]:.2f} {words}" for name, words in COSTS.items() if name in result.ratios]
    sure, mood = certainty(gap, reach)
    interval = "" if reach is None else f"95% interval {points(gap - reach)} to {points(gap + reach)}: "
    otherwise = f"; the twin was trained {' and '.join(result.otherwise)}" if result.otherwise else ""
    return Card(
        title=title,
        network=result.label,
        twin=result.twin,
        data=trained_label(result.data, result.recipe),
        difference=f"{points(gap)} points",
        accuracy=f"{percent(result.top1)} top-1",
        cost=", ".join(costs),
        sure=f"{interval}{sure}{otherwise}.",
        mood=mood,
        gain=mood == "good" and (gap - (reach or 0) > 0 or _cost(result) < 1),
    )


def certainty(gap: float, reach: float | None) -> tuple[str, str]:
    """What an interval over seeds says about a gap in accuracy, and its mood."""
    if reach is None:
        return "Too few seeds: the gap may be chance", "quiet"
    if gap - reach > 0:
        return "surely more accurate", "good"
    if gap - reach >= -COMPARABLE:
        return f"surely no loss of more than {COMPARABLE:g} point", "good"
    if gap + reach < 0:
        return "surely less accurate", "bad"
    return "the seeds do not decide", "quiet"


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
        _cost_cell(result, "macs"),
        _cost_cell(result, "params"),
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


def _cost_cell(result: NetworkResult, name: str) -> TableCell:
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


SCRIPTS = ("vega/vega.js", "base.js", "drawing.js", "trade.js", "curves.js", "details.js", "page.js")
"""In the order in which the page runs them."""


def write_report(run_paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page about the records in these files and folders, and return the path that it was written to.

    Example:
        >>> write_report(["runs"], "report.html")  # doctest: +SKIP
    """
    records = read_records(run_paths)
    require_records(run_paths, records)
    return write_page(records, out)


def write_page(records: Records, out: str | Path) -> Path:
    """Write the page about records that were read before, in one move."""
    out = Path(out)
    if out.is_dir():
        raise LowRankError(f"{out} is a folder: give the name of a file, like {out / 'report.html'}.")
    write_atomically(out, render(records).encode())
    return out


def render(records: Records) -> str:
    """The page as text."""
    results, here = gather(records), environment()
    told = cards(results)
    findings = audit(accuracies(records.runs), layer_times(records.timings))
    css, script = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    return _template().render(
        policy=_policy(css, script),
        style=css,
        script=script,
        made=f"{str(here['date'])[:16].replace('T', ' ')} UTC by lowrank-cnn {here['lowrank_cnn']}",
        found=found_in(records),
        unsealed=sum(not run.sealed for run in records.runs),
        headline=headline(told),
        cards=told,
        networks=summary_table(results),
        published=published_table(),
        findings=len(findings),
        verdicts=[(verdict, n, VERDICT_COLOURS[verdict]) for verdict, n in summary(findings).items()],
        audit=audit_table(findings),
        machines=environment_table(records, here),
        skipped=records.skipped,
        data=_chart_data(records, results),
    )


def _chart_data(records: Records, results: Sequence[NetworkResult]) -> dict[str, Any]:
    """The charts' data, and once for all of them their specifications."""
    return {
        "trade": trade.trade_charts(trade.trade_points(results)),
        "curves": charts.training_curves(results),
        "layers": charts.layer_charts(records.timings),
        "details": charts.details_data(results),
        "specs": {"trade": trade.SPEC, "curves": charts.CURVES_SPEC, "layers": charts.LAYERS_SPEC},
        "labels": {"transform": style.LABELS, "leaders": style.LEADERS},
        "themes": {"light": style.theme(), "dark": style.theme(dark=True)},
        "kinds": {
            kind: dict(zip(("shape", "light", "dark"), look, strict=True)) for kind, look in trade.KINDS.items()
        },
        "measures": charts.MEASURES,
        "axes": trade.AXES,
    }


def found_in(records: Records) -> str:
    """How many runs and timings there are, in words."""
    counts = [(len(records.runs), "training run"), (len(records.timings), "timing")]
    return " and ".join(counted(n, name) for n, name in counts if n)


def _template() -> Any:
    """The template, which escapes whatever it is given."""
    jinja2: Any = require("jinja2", extra="plots", purpose="writing a report")
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made.from_string(_asset("page.html"))


def _asset(name: str) -> str:
    return (files("lowrank_cnn.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Only this style and this script may run, and nothing may be fetched, whatever a record holds."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
