"""Accuracy against cost: points with intervals and labels, arrows from dense to low-rank, Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowrank_cnn.choose.frontier import DesignRow, Frontier, in_words
from lowrank_cnn.choose.frontier import kind_of as design_kind
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import mean_interval
from lowrank_cnn.core.text import counted, percent, ratio, si
from lowrank_cnn.paper.published import MAIN_TABLES, Published, rows
from lowrank_cnn.report import style
from lowrank_cnn.report.records import CPU, GPU, data_label
from lowrank_cnn.report.results import NetworkResult, kind_of
from lowrank_cnn.report.style import COLOURS, DENSE, LEARNED, LOW_RANK, THIN, Spec

OURS = (DENSE, THIN, LOW_RANK, LEARNED)
BASELINE, PAPER, AUGMENTED = "published, baseline", "published, low-rank", "published, more augmentation"
KINDS = {
    BASELINE: ("square", "#e8b080", "#e8b080"),
    PAPER: ("diamond", "#6fa8dc", "#6fa8dc"),
    AUGMENTED: ("triangle-up", "#9e7bb5", "#9e7bb5"),
    DENSE: ("circle", *COLOURS[DENSE]),
    THIN: ("square", *COLOURS[THIN]),
    LOW_RANK: ("diamond", *COLOURS[LOW_RANK]),
    LEARNED: ("triangle-up", *COLOURS[LEARNED]),
}
"""Shape of each kind of point, its colour and that on dark pages; our own are drawn last, over the published."""

SPEC = style.filled(style.template("trade"), {"{labels}": style.LABELS["layer"]})

PUBLISHED_TABLES = (*MAIN_TABLES, "vgg-places", "big-picture")
"""Those whose accuracies come from one view of each image, as ours do."""
AXES = {
    GPU: "Milliseconds per image on a GPU",
    CPU: "Milliseconds per image on a CPU",
    "batch": "Milliseconds for a batch",
    "macs": "Multiply-accumulates per image",
    "params": "Parameters",
}
COUNTS = ("macs", "params")
"""Costs that are counted and not timed."""
METRICS = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
BASELINES = ("vgg11", "vgg11-gmp", "googlenet", "nin", "alexnet")
WIDE = 20.0
"""A range of costs this wide, largest over smallest, is drawn on a logarithmic axis."""
LEAST_SPAN = 0.02
"""An axis of accuracies spans at least two percentage points, so that a small difference looks small,"""
SPAN_ERRORS = 6
"""and as many standard errors of an accuracy: what other test images might give."""


@dataclass(frozen=True)
class TradePoint:
    """A network in the chart. `protocol` says which points may share a Pareto front: one data set, one recipe."""

    label: str
    kind: str
    data: str
    protocol: str
    values: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)
    """Half the height of the interval around an accuracy: the standard deviation over seeds."""
    details: tuple[tuple[str, str], ...] = ()
    n: int | None = None
    twin: str = ""


def trade_points(results: Sequence[NetworkResult], *, paper: bool = True) -> list[TradePoint]:
    """Ours, behind them the published points on the same images, if they are shown."""
    ours = [our_point(result) for result in results if result.data and result.top1 is not None]
    published = [published_point(row) for row in rows() if paper and row.table in PUBLISHED_TABLES]
    shown = {point.data for point in ours}
    return [point for point in published if point.data in shown] + ours


def our_point(result: NetworkResult) -> TradePoint:
    measured = {name: getattr(result, name) for name in ("top1", "top5", "macs", "params")}
    measured |= {device: timing.ms_per_image for device in (CPU, GPU) if (timing := result.time(device))}
    return TradePoint(
        label=result.label,
        kind=kind_of(result),
        data=data_label(result.data),
        protocol=result.recipe,
        values=_known(measured),
        errors=_known({"top1": result.top1_spread}),
        details=tuple(_details(result)),
        n=result.n,
        twin=result.twin,
    )


def _known(measured: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in measured.items() if value is not None}


def _details(result: NetworkResult) -> Iterable[tuple[str, str]]:
    yield "recipe", result.recipe
    yield "seeds", f"{result.seeds}" if result.finished else f"{result.seeds}, not finished"
    if result.top1_spread is not None:
        yield "standard deviation over seeds", f"{100 * result.top1_spread:.2f} points"
    for key, name in {"macs": "MACs", "params": "parameters", CPU: "CPU time", GPU: "GPU time"}.items():
        if key in result.ratios:
            yield f"{name} beside the dense twin", ratio(result.ratios[key])


def published_point(row: Published) -> TradePoint:
    kind = BASELINE if row.network in BASELINES else PAPER
    kind = AUGMENTED if row.table == "big-picture-augmented" else kind
    measured = {"top1": row.top1, "top5": row.top5, "macs": row.macs_per_image, "params": row.params}
    details = (("table", row.table), ("crops per image", str(row.crops)))
    protocol = AUGMENTED if kind == AUGMENTED else "published"
    return TradePoint(row.network, kind, data_label(row.dataset), protocol, _known(measured), {}, details)


def trade_charts(points: Sequence[TradePoint]) -> list[dict[str, Any]]:
    """The charts of every data set, recipe, accuracy and cost. Recipes are never mixed in one chart."""
    found = []
    published_last = sorted(points, key=lambda point: point.kind not in OURS)
    for data in dict.fromkeys(point.data for point in published_last):
        within = [point for point in points if point.data == data]
        recipes = dict.fromkeys(point.protocol for point in within if point.kind in OURS) or {"": None}
        for recipe in recipes:
            chosen = [p for p in within if p.kind not in OURS or p.protocol == recipe]
            for metric in METRICS:
                for axis in AXES:
                    shown = [p for p in chosen if metric in p.values and axis in p.values]
                    if shown:
                        found.append(trade_chart(shown, axis, metric) | {"data": data, "recipe": recipe})
    return found


def trade_chart(points: Sequence[TradePoint], axis: str, metric: str, *, error: bool = False) -> dict[str, Any]:
    """One chart as plain data; with `error`, the share of images that are wrong takes the place of accuracy."""
    marks = [_row(point, axis, metric, error=error) for point in points]
    costs = [mark["x"] for mark in marks]
    low, high = min(costs), max(costs)
    arrows, fronts = _arrows(points, marks), _fronts(points, marks, -1 if error else 1)
    return {
        "axis": axis,
        "metric": metric,
        "x": AXES[axis],
        "format": "~s" if axis in COUNTS else "~r",
        "y": METRICS[metric].replace("accuracy", "error") if error else METRICS[metric],
        "log": low > 0 and high / low > WIDE,
        "domain": _domain(marks, [(point.values[metric], point.n) for point in points]),
        "costs": {"linear": [0.0, 1.15 * high or 1.0], "log": [low / 1.4, high * 1.4]},  # with room for labels
        "points": marks,
        "arrows": arrows,
        "labels": style.label_rows(marks),
        "fronts": fronts,
        "kinds": [kind for kind in KINDS if any(point.kind == kind for point in points)],
    }


def _row(point: TradePoint, axis: str, metric: str, *, error: bool) -> dict[str, Any]:
    x, accuracy, reach = point.values[axis], point.values[metric], point.errors.get(metric, 0.0)
    height = 1 - accuracy if error else accuracy
    cost = si(x) if axis in COUNTS else f"{x:.3g} ms"
    details = [(METRICS[metric], percent(accuracy)), (AXES[axis], cost), *point.details]
    spoken = ", ".join([f"{point.label} ({point.kind})", *(f"{name} {value}" for name, value in details)])
    place = {"x": x, "y": height, "low": max(0.0, height - reach), "high": min(1.0, height + reach)}
    return {"label": point.label, "kind": point.kind, **place, "details": details, "spoken": spoken}


def _arrows(points: Sequence[TradePoint], marks: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """From each dense network that was trained here to the thin and low-rank ones that it is compared with."""
    both = list(zip(points, marks, strict=True))
    dense = {(p.label, p.protocol): mark for p, mark in both if p.kind == DENSE}
    pairs = [(dense.get((p.twin, p.protocol)), mark) for p, mark in both if p.kind in (THIN, LOW_RANK)]
    return [{"x": a["x"], "y": a["y"], "x2": b["x"], "y2": b["y"]} for a, b in pairs if a]


def _fronts(points: Sequence[TradePoint], marks: Sequence[dict[str, Any]], sign: int) -> list[dict[str, Any]]:
    """A Pareto front for each protocol with more than one point on it: those that gain more than all cheaper ones.

    Costs count to the three digits that are shown: a hair's breadth below them saves nothing.
    """
    found: list[dict[str, Any]] = []
    for protocol in dict.fromkeys(point.protocol for point in points):
        mine = [mark for point, mark in zip(points, marks, strict=True) if point.protocol == protocol]
        places = [(float(f"{mark['x']:.3g}"), -sign * mark["y"]) for mark in mine]
        front, best = [], (0.0, math.inf)
        for place, mark in sorted(zip(places, mine, strict=True), key=lambda one: one[0]):
            if place[1] < best[1] or place == best:
                front.append(mark)
                best = place
        if len({(mark["x"], mark["y"]) for mark in front}) > 1:
            corners = sorted(front, key=lambda mark: mark["x"])
            found += [{"x": mark["x"], "y": mark["y"], "front": protocol} for mark in corners]
    return found


def _domain(marks: Sequence[dict[str, Any]], accuracies: Iterable[tuple[float, int | None]]) -> list[float]:
    """The ends of an axis of shares, with room around all marks; accuracies come with their number of images."""
    errors = [(accuracy * (1 - accuracy) / n) ** 0.5 for accuracy, n in accuracies if n]
    span = min(1.0, max([LEAST_SPAN, *(SPAN_ERRORS * error for error in errors)]))
    low, high = min(mark["low"] for mark in marks), max(mark["high"] for mark in marks)
    room = max(0.12 * (high - low), (span - (high - low)) / 2)
    top = min(1.0, high + room)
    return [max(0.0, min(low - room, top - span)), top]


def trade_spec(chart: dict[str, Any]) -> Spec:
    kinds = chart["kinds"]
    scales = {
        "{x}": chart["x"],
        "{y}": chart["y"],
        "{format}": chart["format"],
        "{colours}": {"domain": kinds, "range": [KINDS[kind][1] for kind in kinds]},
        "{shapes}": {"domain": kinds, "range": [KINDS[kind][0] for kind in kinds]},
    }
    spec: Spec = style.filled(SPEC, scales)
    kind = "log" if chart["log"] else "linear"
    spec["encoding"]["x"]["scale"] = {"type": kind, "nice": False, "domain": chart["costs"][kind]}
    spec["encoding"]["y"]["scale"] |= {"domain": chart["domain"]}
    spec["layer"] = [layer for layer in spec["layer"] if chart[layer.get("data", {"name": "points"})["name"]]]
    spec["datasets"] = {name: chart[name] for name in ("points", "arrows", "fronts", "labels")}
    return spec


def draw_frontier(found: Frontier, out: str | Path, costs: Sequence[str] = ("batch", "macs", "params")) -> Path:
    """Draw accuracy against time, MACs and parameters into a file whose name says the format: svg, pdf or png."""
    points = [_point(found, row) for row in found.rows if row.runs]
    if not points:
        raise LowRankError(f"nothing in {found.folder} is trained yet: there is nothing to draw.")
    costs = [cost for cost in costs if all(cost in point.values for point in points)]
    runs = sorted({len(row.runs) for row in found.rows if row.runs})
    count = f"{runs[0]} to {runs[-1]} runs" if len(runs) > 1 else counted(runs[0], "run")
    told = f"Mean of {count} with its 95% interval over seeds; dashed: the Pareto front"
    title = {"text": found.title, "subtitle": told}
    specs = [{**trade_spec(trade_chart(points, cost, "top1")), "title": title} for cost in costs]
    return style.save_charts(specs, Path(out))


def _point(found: Frontier, row: DesignRow) -> TradePoint:
    mean, _, high = mean_interval([run.correct / found.images for run in row.runs])
    values = {"top1": mean, "macs": float(row.macs), "params": float(row.params)}
    values |= {} if (ms := found.ms(row)) is None else {"batch": ms}
    return TradePoint(
        in_words(row), design_kind(row), "", "frontier", values, {"top1": high - mean}, n=found.images
    )
