"""The page: one HTML file with everything in it, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import write_atomically
from lowrank_cnn.core.text import DASH, TIMES, counted, duration, percent, points, ratio, si
from lowrank_cnn.deploy.timing import TORCHS_CONVS
from lowrank_cnn.paper.claims import COMPARABLE
from lowrank_cnn.report import charts, style, trade
from lowrank_cnn.report.records import CPU, GPU, LONGEST_TEXT, Records, read_records, require_records
from lowrank_cnn.report.results import NetworkResult, comparable, gather, is_twin, kind_of, of_paper, twin_known

MOST_CARDS = 4
COSTS = {GPU: "GPU time", CPU: "CPU time", "macs": "MACs", "params": "parameters"}
"""What a network costs; a measured time tells more than a count."""


def cards(results: Sequence[NetworkResult]) -> list[dict[str, Any]]:
    """By data set, best recipe and kind: the network that gains most over its twin, and the cheapest near it."""
    found: list[dict[str, Any]] = []
    for group in _compared(results):
        kind, n = kind_of(group[0]), len(group)
        title = f"Best of {n} {kind} networks, beside its dense twin" if n > 1 else f"{kind.capitalize()} network"
        best = max(group, key=lambda result: result.ratios["top1"])
        near = [result for result in group if result.ratios["top1"] >= -COMPARABLE and _cost(result) < 1]
        found.append(_card(title, best))
        if (cheapest := min(near, key=_cost, default=best)) is not best:
            found.append(_card(f"Cheapest of these within {COMPARABLE:g} point", cheapest))
    return found[:MOST_CARDS]


def headline(results: Sequence[NetworkResult]) -> str:
    kinds = sorted({kind_of(result) for result in results}, key=list(style.COLOURS).index)
    return f"{' and '.join(filter(None, (', '.join(kinds[:-1]), kinds[-1])))} networks".capitalize()


def _compared(results: Sequence[NetworkResult]) -> list[list[NetworkResult]]:
    """Low-rank and thin networks with a trained twin, by data set; of each the first recipe, which is the best."""
    groups: dict[str, dict[str, list[NetworkResult]]] = {}
    for result in comparable(results):
        if "top1" in result.ratios and not is_twin(result) and "macs" in result.ratios:
            groups.setdefault(result.data, {}).setdefault(result.recipe, []).append(result)
    best = [next(iter(recipes.values())) for recipes in groups.values()]
    split = [[r for r in group if kind_of(r) == kind] for group in best for kind in (style.LOW_RANK, style.THIN)]
    return list(filter(None, split))


def _cost(result: NetworkResult) -> float:
    return next(result.ratios[name] for name in COSTS if name in result.ratios)


def _card(title: str, result: NetworkResult) -> dict[str, Any]:
    """One network beside its dense twin, in words. `mood` is good, bad or quiet: how the certainty is coloured."""
    gap, reach = result.ratios["top1"], result.gap_half_width
    costs = [f"{TIMES}{result.ratios[name]:.2f} {words}" for name, words in COSTS.items() if name in result.ratios]
    sure, mood = certainty(gap, reach)
    interval = "" if reach is None else f"Corrected 95% interval {points(gap - reach)} to {points(gap + reach)}: "
    otherwise = f"; the twin was trained {' and '.join(result.otherwise)}" if result.otherwise else ""
    return {
        "title": title,
        "network": result.label,
        "twin": result.twin,
        "data": result.trained,
        "difference": f"{points(gap)} points",
        "accuracy": f"{percent(result.top1)} top-1",
        "cost": ", ".join(costs),
        "sure": f"{interval}{sure}{otherwise}.",
        "mood": mood,
    }


def certainty(gap: float, reach: float | None) -> tuple[str, str]:
    """A verdict on a gap in accuracy from its interval, corrected for the networks compared, and its mood."""
    if reach is None:
        return "Too few seeds: the gap may be chance", "quiet"
    if gap - reach > 0:
        return "more accurate", "good"
    if gap - reach >= -COMPARABLE:
        return f"no loss of more than {COMPARABLE:g} point", "good"
    if gap + reach < 0:
        return "less accurate", "bad"
    return "not significant", "quiet"


@dataclass(frozen=True)
class TableCell:
    """A cell: its text, its sort key (None sorts last), a second line in small print, and a list to open."""

    shown: str
    value: float | str | None = None
    small: str = ""
    more: Sequence[str] = ()
    kind: str = ""
    """The kind of the network, which colours a dot."""


@dataclass(frozen=True)
class PageTable:
    """A table of the page: rows of cells by heading. Columns of `words` stand left, numbers right."""

    name: str
    caption: str
    rows: Sequence[Mapping[str, TableCell]]
    words: Sequence[str]
    help: Mapping[str, str] = field(default_factory=dict)
    sortable: bool = True


_OF_TWIN = "below, the share of the dense twin's"
_RUN_BY = {"torch": "as trained", "optimize": "optimized"}
"""How a network was timed, where its convs are not known: by its own layers, or as `optimize` makes it."""
_OPTIONAL = ("top-5", f"{CPU} ms/image", f"{GPU} ms/image")
_HELP = {
    "top-1": "mean over seeds, with the standard deviation",
    "to twin": "difference to the dense twin in points, with its 95% interval corrected for all networks",
    "MACs": f"multiply-accumulates for one image; {_OF_TWIN}",
    "parameters": _OF_TWIN,
    "CPU ms/image": f"at the best batch; {_OF_TWIN}",
    "GPU ms/image": f"at the best batch; {_OF_TWIN}",
    "training": "wall-clock time of a run",
}


def summary_table(results: Sequence[NetworkResult]) -> PageTable:
    """A row for each network, with the runs behind it; without top-5 and times that no network has."""
    found = [_summary_row(result) for result in results]
    empty = [name for name in _OPTIONAL if all(row[name].value is None for row in found)]
    found = [{name: cell for name, cell in row.items() if name not in empty} for row in found]
    return PageTable("networks", "Networks of these records", found, ["network"], _HELP)


def _summary_row(result: NetworkResult) -> dict[str, TableCell]:
    kind = kind_of(result)
    words = [kind, result.trained, result.variant, runs_in_words(result)]
    origin = ", ".join(filter(None, words)) if result.runs else f"{kind}, timed only"
    spread = f"±{100 * result.top1_spread:.2f}" if result.top1_spread is not None else ""
    known = result.gap_half_width is not None and not is_twin(result)
    reach = f"±{result.gap_half_width:.2f}" if known else ""
    shares = {name: ratio(value) for name, value in result.ratios.items()}
    return {
        "network": TableCell(result.network.label, result.label, origin, list(_named_runs(result)), kind),
        "top-1": _cell(result.top1, percent, spread),
        "to twin": TableCell(_to_twin(result), result.ratios.get("top1"), reach),
        "top-5": _cell(result.top5, percent),
        "MACs": _cell(result.macs, si, shares.get("macs", "")),
        "parameters": _cell(result.params, si, shares.get("params", "")),
        "CPU ms/image": _time(result, CPU),
        "GPU ms/image": _time(result, GPU),
        "training": _cell(result.seconds, duration),
    }


def _cell(value: float | None, show: Callable[[float], str], small: str = "") -> TableCell:
    return TableCell(DASH if value is None else show(value), value, small)


def _time(result: NetworkResult, device: str) -> TableCell:
    timing = result.time(device)
    if timing is None:
        return TableCell(DASH)
    share = ratio(result.ratios[device]) if device in result.ratios else f"batch {timing.batch}"
    convs = timing.convs or (TORCHS_CONVS if device == CPU else "")
    by = f"by {convs}" if timing.runtime == "torch" and convs else _RUN_BY.get(timing.runtime, timing.runtime)
    return _cell(timing.ms_per_image, "{:.3g}".format, f"{share} {by}")


def runs_in_words(result: NetworkResult) -> str:
    """The number of runs and of seeds; unfinished runs count only if none has finished."""
    runs, seeds = len(result.scored), result.seeds
    count = counted(runs, "run") if result.finished else f"{runs} unfinished"
    return count if seeds in (0, runs) else f"{count} of {counted(seeds, 'seed')}"


def _named_runs(result: NetworkResult) -> Iterator[str]:
    for run in result.runs:
        seed = "" if run.seed is None else f", seed {run.seed}"
        state = "" if run.finished else f", {run.status}"
        yield f"{run.path}{seed}: {percent(run.top1)}{state}"


def _to_twin(result: NetworkResult) -> str:
    if is_twin(result):
        return "twin"
    if not twin_known(result):
        return "not known"
    return points(result.ratios["top1"]) if "top1" in result.ratios else DASH


def environment_table(records: Records, here: Mapping[str, Any]) -> PageTable:
    """Every machine that a record was made on, and the one that made this page."""
    made = [record.environment for record in (*records.runs, *records.timings) if record.environment]
    # Records of one day's runs differ in their date alone: those share a column.
    different = {repr(sorted((k, str(v)) for k, v in one.items() if k != "date")): one for one in made}
    machines = {f"records {number}": one for number, one in enumerate(different.values(), 1)} | {"this page": here}
    names = dict.fromkeys(name for machine in machines.values() for name in machine)
    found = [
        {"": TableCell(name), **{title: TableCell(_shown(name, machine)) for title, machine in machines.items()}}
        for name in names
        if any(machine.get(name) is not None for machine in machines.values())
    ]
    return PageTable("machines", "Environment", found, ["", *machines], sortable=False)


def _shown(name: str, machine: Mapping[str, Any]) -> str:
    """A field of an environment as text: a date to the minute, a commit by its first twelve digits."""
    value = machine.get(name)
    if value is None or isinstance(value, bool):
        return DASH
    length = {"date": 16, "commit": 12}.get(name, LONGEST_TEXT)
    shown = str(value).strip()[:length]
    return (shown.replace("T", " ") if name == "date" else shown) or DASH


SCRIPTS = ("vega/vega.js", "base.js", "drawing.js", "trade.js", "curves.js", "details.js", "page.js")


def write_report(run_paths: Sequence[str | Path], out: str | Path, *, answer: str = "") -> Path:
    """Write the page about the records in these files and folders, and return the path that it was written to.

    Example:
        >>> write_report(["runs"], "report.html")  # doctest: +SKIP
    """
    records = read_records(run_paths)
    require_records(run_paths, records)
    return write_page(records, out, answer=answer)


def write_page(records: Records, out: str | Path, *, answer: str = "") -> Path:
    """Write the page about records that were read before, in one move."""
    out = Path(out)
    if out.is_dir():
        raise LowRankError(f"{out} is a folder: name a file, such as {out / 'report.html'}.")
    write_atomically(out, render(records, answer).encode())
    return out


def render(records: Records, answer: str = "") -> str:
    """The page as text; an `answer` stands first, and what is before its colon is the title."""
    results, here, paper = gather(records), environment(), of_paper(records.runs)
    css, script = style.asset("page.css"), "\n".join(map(style.asset, SCRIPTS))
    jinja2: Any = require("jinja2", extra="plots", purpose="writing a report")
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
    template.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return template.from_string(style.asset("page.html")).render(
        policy=_policy(css, script),
        style=css,
        script=script,
        made=f"{str(here['date'])[:16].replace('T', ' ')} UTC by lowrank-cnn {here['lowrank_cnn']}",
        found=found_in(records),
        headline=answer.partition(":")[0] or headline(results),
        answer=answer,
        cards=cards(results),
        networks=summary_table(results),
        timed=any(result.timings for result in results),
        paper=paper,
        machines=environment_table(records, here),
        skipped=records.skipped,
        data=_chart_data(records, results, paper=paper),
    )


def _chart_data(records: Records, results: Sequence[NetworkResult], *, paper: bool) -> dict[str, Any]:
    return {
        "trade": trade.trade_charts(trade.trade_points(results, paper=paper)),
        "curves": charts.training_curves(results),
        "layers": charts.layer_charts(records.timings, paper=paper and _has_vgg(results)),
        "details": charts.details_data(results),
        "specs": {"trade": trade.SPEC, "curves": charts.CURVES_SPEC, "layers": charts.LAYERS_SPEC},
        "labels": {name: style.LABELS[name] for name in ("transform", "leaders", "halo")},
        "themes": {"light": style.theme(), "dark": style.theme(dark=True)},
        "kinds": {
            kind: dict(zip(("shape", "light", "dark"), look, strict=True)) for kind, look in trade.KINDS.items()
        },
        "measures": charts.MEASURES,
        "axes": trade.AXES,
    }


def _has_vgg(results: Sequence[NetworkResult]) -> bool:
    """Whether a network is one of those whose layers the paper timed."""
    return any(result.label.startswith("vgg11") for result in results)


def found_in(records: Records) -> str:
    counts = [(len(records.runs), "training run"), (len(records.timings), "timing")]
    return " and ".join(counted(n, name) for n, name in counts if n)


def _policy(*texts: str) -> str:
    """Only this style and this script may run, and nothing may be fetched, whatever a record holds."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    style, script = (f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; img-src data:; style-src {style}; script-src {script}; "
        "base-uri 'none'; form-action 'none'"
    )
