"""The charts of the page as plain data: the page's script only draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import StatisticsError, correlation
from typing import Any

from lowrank_cnn.paper.published import MAIN_TABLES, Published, rows, timings
from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.entry import Entry
from lowrank_cnn.report.numbers import as_shown
from lowrank_cnn.report.pareto import pareto_front
from lowrank_cnn.report.records import CPU, GPU, Run, Timing
from lowrank_cnn.system.text import si

PUBLISHED_TABLES = (*MAIN_TABLES, "vgg-places", "big-picture")
"""Those whose accuracies are of one view of each image, as ours are."""

AXES = {
    "macs": "Multiply-accumulates per image",
    "params": "Parameters",
    CPU: "Milliseconds per image on a CPU",
    GPU: "Milliseconds per image on a GPU",
}
METRICS = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
WIDE = 20.0
"""A range this wide, largest over smallest, is drawn on a logarithmic axis."""
MOST_POINTS = 400
LEAST_SPAN = 0.02
"""An axis of accuracies spans two percentage points at least: a difference that is small looks small."""
SPAN_ERRORS = 6
"""And so many standard errors of an accuracy: three up and three down is what other test images might give."""


@dataclass(frozen=True)
class Point:
    """A network in a scatter plot."""

    label: str
    source: str
    data: str
    recipe: str
    values: dict[str, float]
    spreads: dict[str, float]
    """Standard deviations over the seeds."""
    details: tuple[tuple[str, str], ...]
    n: int | None = None
    """The number of test images, where it is known."""


def points_of(entries: Sequence[Entry]) -> list[Point]:
    """Ours first, then the published."""
    ours = [_our_point(entry) for entry in entries if entry.data]
    return ours + [_published_point(row) for row in rows() if row.table in PUBLISHED_TABLES]


def scatters(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A chart for every data set, recipe, accuracy and cost; one without points says what would give it some."""
    charts = []
    for data in dict.fromkeys(point.data for point in points):
        within = [point for point in points if point.data == data]
        for recipe, chosen in _by_recipe(within).items():
            for metric in METRICS:
                if any(metric in point.values for point in chosen):
                    charts += [_scatter(chosen, data, recipe, metric, axis) for axis in AXES]
    return charts


def _by_recipe(points: Sequence[Point]) -> dict[str, Sequence[Point]]:
    """The points of each of our recipes beside the published; then all, where there are several recipes."""
    recipes = list(dict.fromkeys(point.recipe for point in points if point.source == "ours"))
    if len(recipes) < 2:
        return {"all": points}
    chosen = {r: [p for p in points if p.source != "ours" or p.recipe == r] for r in recipes}
    named = [replace(p, label=f"{p.label} ({p.recipe})") if p.source == "ours" else p for p in points]
    return {**chosen, "all": named}


def _scatter(points: Sequence[Point], data: str, recipe: str, metric: str, axis: str) -> dict[str, Any]:
    shown = [point for point in points if metric in point.values and axis in point.values]
    places = [(point.values[axis], point.values[metric]) for point in shown]
    costs = [cost for cost, _ in places]
    return {
        "data": data,
        "recipe": recipe,
        "metric": metric,
        "axis": axis,
        "x": AXES[axis],
        "y": METRICS[metric],
        "log": bool(costs) and min(costs) > 0 and max(costs) / min(costs) > WIDE,
        "span": least_span([(point.values[metric], point.n) for point in shown]),
        "front": sorted(pareto_front([(as_shown(cost), gain) for cost, gain in places]), key=costs.__getitem__),
        "points": [_drawn(point, axis, metric) for point in shown],
    }


def least_span(measured: Iterable[tuple[float, int | None]]) -> float:
    """The least height of an axis, by accuracies and the number of images that each was measured on."""
    errors = [(accuracy * (1 - accuracy) / n) ** 0.5 for accuracy, n in measured if n]
    return min(1.0, max([LEAST_SPAN, *(SPAN_ERRORS * error for error in errors)]))


def _drawn(point: Point, axis: str, metric: str) -> dict[str, Any]:
    place = {"x": point.values[axis], "y": point.values[metric], "spread": point.spreads.get(metric)}
    return {"label": point.label, "source": point.source, **place, "details": point.details}


def _our_point(entry: Entry) -> Point:
    measured = {"top1": entry.top1, "top5": entry.top5, "macs": entry.macs, "params": entry.params}
    for device in (CPU, GPU):
        timing = entry.time(device)
        measured[device] = timing.ms_per_image if timing else None
    values = {name: float(value) for name, value in measured.items() if value is not None}
    seeds = len(entry.scored)
    details = [("recipe", entry.recipe), ("runs", f"{seeds}" if entry.finished else f"{seeds}, not finished")]
    details += _ratio_details(entry)
    spreads = {"top1": entry.top1_spread} if entry.top1_spread is not None else {}
    if spreads:
        details.insert(2, ("top-1, deviation of the runs", f"{100 * spreads['top1']:.2f} points"))
    data = data_label(entry.data)
    return Point(entry.label, "ours", data, entry.recipe, values, spreads, tuple(details), entry.n)


def _ratio_details(entry: Entry) -> Iterable[tuple[str, str]]:
    names = {"macs": "MACs", "params": "parameters", CPU: "CPU time", GPU: "GPU time"}
    for key, name in names.items():
        if key in entry.ratios:
            yield f"{name} of the dense twin", f"{entry.ratios[key]:.3f}"


def _published_point(row: Published) -> Point:
    measured = {"top1": row.top1, "top5": row.top5, "macs": row.macs, "params": row.params}
    values = {name: float(value) for name, value in measured.items() if value is not None}
    return Point(row.network, "published", data_label(row.dataset), "", values, {}, (("table", row.table),))


def curves(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The history of every run that has one."""
    return [_curve(entry, run) for entry in entries for run in entry.runs if run.history]


def _curve(entry: Entry, run: Run) -> dict[str, Any]:
    step = -(-len(run.history) // MOST_POINTS)
    kept = [*run.history[:-1:step], run.history[-1]]
    seed = "" if run.seed is None else f", seed {run.seed}"
    known = [row.accuracy for row in kept if row.accuracy is not None]
    return {
        "label": f"{entry.label}{seed}",
        "group": entry.label,
        "data": data_label(run.data),
        "recipe": run.recipe,
        "watched": run.watched,
        "span": least_span((accuracy, run.n if run.watched == "test" else None) for accuracy in known[-1:]),
        "epochs": [row.epoch for row in kept],
        "accuracy": [row.accuracy for row in kept],
        "trained": [row.trained for row in kept],
        "loss": [row.loss for row in kept],
    }


def layer_charts(measured: Sequence[Timing]) -> list[dict[str, Any]]:
    """MACs beside time, per layer: each network timed here, then the paper's own."""
    detailed = sorted((t for t in measured if len(t.layers) > 1), key=_layer_key)
    ours = [_layers_of(list(group)) for _, group in groupby(detailed, key=_layer_key)]
    return [*ours, _published_layers()]


def _layer_key(timing: Timing) -> tuple[str, ...]:
    return timing.built.label, *(layer.name for layer in timing.layers)


def _layers_of(group: list[Timing]) -> dict[str, Any]:
    """One chart for the timings of the same layers: the fastest of each device."""
    fastest: dict[str, Timing] = {}
    for timing in sorted(group, key=lambda timing: -timing.ms_per_image):
        fastest[timing.device] = timing
    names = short_names([layer.name for layer in group[0].layers])
    layers = [(name, layer.macs) for name, layer in zip(names, group[0].layers, strict=True)]
    times = {device: [layer.ms for layer in fastest[device].layers] for device in (CPU, GPU) if device in fastest}
    notes = [f"{d}: {t.hardware}, {t.runtime}, batch {t.batch}" for d, t in sorted(fastest.items())]
    title = f"{group[0].built.label}, measured here"
    return _layer_chart(title, layers, times, "; ".join(notes))


def short_names(names: Sequence[str]) -> list[str]:
    """Layers' names without what all of them begin with."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared + 1 and part[: shared + 1] == parts[0][: shared + 1] for part in parts):
        shared += 1
    return [".".join(part[shared:]) for part in parts]


def _published_layers() -> dict[str, Any]:
    published = timings()
    times = {CPU: [t.cpu_ms for t in published], GPU: [t.gpu_ms for t in published]}
    layers = [(t.layer, t.macs) for t in published]
    return _layer_chart("vgg11-gmp-lr, published", layers, times, "Caffe, as published")


def _layer_chart(
    title: str, layers: Sequence[tuple[str, int]], times: dict[str, list[float]], note: str
) -> dict[str, Any]:
    macs = [macs for _, macs in layers]
    series = [_series("MACs", macs, [f"{si(value)} MACs" for value in macs])]
    series += [_series(f"{d} time", ms, [f"{value:.3g} ms" for value in ms]) for d, ms in times.items()]
    return {
        "title": title,
        "note": note,
        "layers": [name for name, _ in layers],
        "series": series,
        "correlations": {device: pearson(macs, ms) for device, ms in times.items()},
    }


def _series(name: str, values: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    total = sum(values)
    return {"name": name, "shares": [value / total for value in values], "texts": list(texts)}


def pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's r, where it is defined: over two layers and more that are not all alike."""
    try:
        return correlation([float(v) for v in one], [float(v) for v in other])
    except StatisticsError:
        return None
