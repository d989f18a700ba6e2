"""Charts of the page and of figures: training curves, test images and times of layers.

Each is made in two steps: plain data for the page's script, and a Vega-Lite specification for a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.numbers import ceil_div, pearson
from lowrank_cnn.core.text import counted, percent, si
from lowrank_cnn.paper.published import timings
from lowrank_cnn.report.records import CPU, GPU, data_label, pool_answers
from lowrank_cnn.report.results import NetworkResult, kind_of
from lowrank_cnn.report.style import Spec, filled, kind_colours, network_looks, template

if TYPE_CHECKING:
    from lowrank_cnn.report.records import AnswerDetails, TimedNetwork
    from lowrank_cnn.train.find_lr import RateTest

MOST_EPOCHS = 400
"""Epochs of a run that are shown: of longer ones, every n-th."""
MEASURES = {
    "accuracy": "Accuracy on watched images",
    "train_accuracy": "Accuracy on training images",
    "train_loss": "Mean training loss of an epoch",
}
EARLY = 0.1
"""The first share of a run, whose accuracies are near chance and do not stretch the axis of a figure."""

CURVES_SPEC = template("curves")


def training_curves(results: Sequence[NetworkResult]) -> list[dict[str, Any]]:
    """The history of every run that has one, as plain data for the page."""
    shown = [(result, run) for result in results for run in result.runs if run.history]
    charts: dict[tuple[str, str], dict[str, str]] = {}
    for result, run in shown:
        charts.setdefault((result.data, run.recipe), {})[result.label] = kind_of(result)
    looks = {chart: network_looks(networks) for chart, networks in charts.items()}
    curves = []
    for result, run in shown:
        step = ceil_div(len(run.history), MOST_EPOCHS)
        kept = [*run.history[:-1:step], run.history[-1]]
        about = {
            "group": result.label,
            "look": looks[result.data, run.recipe][result.label],
            "seed": run.seed,
            "data": data_label(result.data),
            "recipe": run.recipe,
            "watched": run.watched,
            "epochs": [epoch.epoch for epoch in kept],
            "test": run.top1 if run.finished else None,
        }
        values = {measure: [getattr(epoch, measure) for epoch in kept] for measure in MEASURES}
        curves.append(about | values)
    return curves


def curves_spec(title: str, curves: Sequence[dict[str, Any]]) -> Spec:
    """The specification of the curves of one data set and recipe, for a file; dots are test accuracies.

    Lines are accuracies on training images if no run was watched on the way: the subtitle says so.
    """
    watched = any(sum(value is not None for value in curve["accuracy"]) > 1 for curve in curves)
    measure = "accuracy" if watched else "train_accuracy"
    rows = [
        {"group": curve["group"], "epoch": epoch, "value": value}
        for curve in curves
        for epoch, value in zip(curve["epochs"], curve[measure], strict=True)
        if value is not None
    ]
    ends = [
        {"group": curve["group"], "epoch": curve["epochs"][-1], "value": curve["test"]}
        for curve in curves
        if curve["test"] is not None
    ]
    lines = MEASURES[measure].removeprefix("Accuracy on ")
    subtitle = f"Lines: {lines}, mean over runs; bands: lowest to highest run"
    subtitle += "; dots: test images, each run" if ends else ""
    epochs = {curve["group"]: set[int]() for curve in curves}
    for row in rows:
        epochs[row["group"]].add(row["epoch"])
    ends += [row for row in rows if len(epochs[row["group"]]) == 1]  # no line
    looks = {curve["group"]: curve["look"] for curve in curves}
    scales = {
        "{colours}": {"domain": list(looks), "range": [look["light"] for look in looks.values()]},
        "{dashes}": {"domain": list(looks), "range": [look["dash"] for look in looks.values()]},
    }
    spec: Spec = filled(CURVES_SPEC, {"{y}": "Accuracy", "{format}": ".0%", **scales})
    last = max((row["epoch"] for row in rows), default=1)
    late = [row["value"] for row in [*rows, *ends] if row["epoch"] >= EARLY * last]
    if late:
        domain = [max(0.0, min(late) - 0.02), min(1.0, max(late) + 0.02)]
        spec["layer"][1]["encoding"]["y"]["scale"]["domain"] = domain
    return {**spec, "title": {"text": title, "subtitle": subtitle}, "datasets": {"curves": rows, "ends": ends}}


def rates_spec(tested: RateTest) -> Spec:
    """The loss over the rates of a range test; a dashed line is the suggested rate."""
    rows = [{"rate": rate, "loss": loss} for rate, loss in zip(tested.rates, tested.losses, strict=True)]
    suggested = [] if tested.rate is None else [{"rate": tested.rate}]
    spec: Spec = filled(template("rates"), {"{rates}": rows, "{suggested}": suggested})
    told = "No rate is suggested" if tested.rate is None else f"Suggested rate: {tested.rate:g}"
    return {**spec, "title": {"text": "Learning-rate range test", "subtitle": told}}


MOST_BARS = 25
"""Of more classes, those that are recognised least."""
MOST_PAIRS = 15
MOST_NAMED = 40
"""A confusion matrix of more classes has no room for their names."""
SPECS = {name: template(name) for name in ("bars", "confusion", "calibration")}


def details_data(results: Sequence[NetworkResult]) -> list[dict[str, Any]]:
    """For every network whose runs have details: the answers of all its runs together, as complete charts.

    The page fills in the colour of its theme, and the cells of a confusion matrix, which would be megabytes.
    """
    found = []
    for result in results:
        if details := [run.details for run in result.scored if run.details]:
            answers = pool_answers(details)
            about = {
                "network": result.label,
                "trained": result.trained,
                "colours": kind_colours(kind_of(result)),
                "classes": list(answers.classes),
                "confusion": answers.confusion.tolist(),
                "charts": dict(_details_specs(answers)),
                "worst": [vars(image) for image in answers.worst],
            }
            found.append(about)
    return found


def _details_specs(answers: AnswerDetails) -> Iterator[tuple[str, Spec]]:
    """The charts that there is data for, by name."""
    images, right = answers.per_class.T.tolist()
    totals = dict(zip(answers.classes, images, strict=True))
    if len(answers.confusion):
        parts = {"{classes}": list(answers.classes), "{named}": len(answers.classes) <= MOST_NAMED}
        cells = {"title": "Confusion matrix", "datasets": {"cells": []}}
        yield "confusion", filled(SPECS["confusion"], parts) | cells
    by_class = zip(answers.classes, images, right, strict=True)
    known = sorted(((one / n, name, n) for name, n, one in by_class if n), key=lambda row: row[0])
    if bars := [_bar(name, share, counted(int(n), "image")) for share, name, n in known[:MOST_BARS]]:
        most = "" if len(bars) == len(known) else f", the {len(bars)} hardest of {len(known)}"
        yield "classes", _bars(f"Accuracy by class{most}", "Share of the class that is recognised", bars)
    pairs = [(n / totals[true], true, said) for true, said, n in answers.pairs if totals.get(true)]
    if pairs:
        told = [
            _bar(f"{true} taken for {said}", share, f"{counted(int(totals[true]), 'image')} of {true}")
            for share, true, said in sorted(pairs, key=lambda row: -row[0])[:MOST_PAIRS]
        ]
        yield "pairs", _bars("Classes confused most", "Share of the class", told)
    if bins := [_bin(*counts) for counts in answers.bins.tolist() if counts[0]]:
        title = f"Calibration: off by {percent(answers.calibration_error)} on average"
        yield "calibration", {**SPECS["calibration"], "title": title, "datasets": {"bins": bins}}


def _bars(title: str, x: str, bars: list[dict[str, Any]]) -> Spec:
    spec = filled(SPECS["bars"], {"{x}": x, "{height}": 17 * len(bars) + 75})
    return {**spec, "title": title, "datasets": {"bars": bars}}


def _bar(name: str, share: float, of: str) -> dict[str, Any]:
    shown = {"details": [("share", percent(share)), ("of", of)], "spoken": f"{name}, {percent(share)} of {of}"}
    return {"name": name, "label": name, "share": share, **shown}


def _bin(n: float, confidence: float, right: float) -> dict[str, Any]:
    told = [("images", f"{int(n):,}"), ("confidence", percent(confidence / n)), ("right", percent(right / n))]
    spoken = ", ".join(f"{name} {value}" for name, value in told)
    place = {"n": int(n), "confidence": confidence / n, "accuracy": right / n}
    return {**place, "label": "Bin of confidence", "details": told, "spoken": spoken}


LAYERS_SPEC = template("layers")
LAYER_COLOURS = {"MACs": "#7d8792", "CPU time": "#a94fd0", "GPU time": "#6aa121"}
"""None is a colour of a network."""


def layer_charts(measured: Sequence[TimedNetwork], *, paper: bool = True) -> list[dict[str, Any]]:
    """MACs beside time as shares of their totals: the networks timed here, then the paper's own, as plain data."""
    detailed = sorted((timing for timing in measured if len(timing.layers) > 1), key=_same_layers)
    charts = [_layers_of(list(group)) for _, group in groupby(detailed, key=_same_layers)]
    if paper:
        found = timings()
        times = {CPU: [t.cpu_ms for t in found], GPU: [t.gpu_ms for t in found]}
        names, macs = [t.layer for t in found], [t.macs for t in found]
        charts.append(_chart("vgg11-gmp-lr, published", names, macs, times, "Caffe, as published"))
    return charts


def layers_spec(chart: dict[str, Any]) -> Spec:
    spec: Spec = filled(LAYERS_SPEC, {"{height}": chart["height"], "{series}": chart["series"]})
    title = {"text": chart["title"], "subtitle": chart["note"]}
    return {**spec, "title": title, "datasets": {"layers": chart["layers"]}}


def _same_layers(timing: TimedNetwork) -> tuple[str, ...]:
    return timing.network.label, *(layer.name for layer in timing.layers)


def _layers_of(group: list[TimedNetwork]) -> dict[str, Any]:
    """One chart for the timings of the same layers: the fastest of each device."""
    fastest: dict[str, TimedNetwork] = {}
    for timing in sorted(group, key=lambda timing: -timing.ms_per_image):
        fastest[timing.device] = timing
    names = short_names([layer.name for layer in group[0].layers])
    macs = [layer.macs for layer in group[0].layers]
    times = {device: [layer.ms for layer in fastest[device].layers] for device in (CPU, GPU) if device in fastest}
    notes = [f"{d}: {t.hardware}, {t.runtime}, batch {t.batch}" for d, t in sorted(fastest.items())]
    return _chart(f"{group[0].network.label}, measured here", names, macs, times, "; ".join(notes))


def short_names(names: Sequence[str]) -> list[str]:
    """Layers' names by their last parts, as many as it takes to tell them apart.

    >>> short_names(["stages.1.conv", "stages.2.conv"])
    ['1.conv', '2.conv']
    """
    parts = [name.split(".") for name in names]
    for kept in range(1, max(map(len, parts), default=1)):
        short = [".".join(part[-kept:]) for part in parts]
        if len(set(short)) == len(names):
            return short
    return list(names)


def _chart(
    title: str, names: Sequence[str], macs: Sequence[int], times: dict[str, list[float]], note: str
) -> dict[str, Any]:
    bars: list[dict[str, Any]] = []
    series = {"MACs": macs, **{f"{device} time": ms for device, ms in times.items()}}
    for kind, values in series.items():
        total = sum(values)
        for name, value in zip(names, values, strict=True):
            cost = f"{si(value)} MACs" if kind == "MACs" else f"{value:.3g} ms"
            told = f"{cost}, {value / total:.1%} of the total"
            shown = {"details": [(kind, told)], "spoken": f"{name}, {kind} {told}"}
            bars.append({"layer": name, "label": name, "series": kind, "share": value / total, **shown})
    found = {device: r for device, ms in times.items() if (r := pearson(macs, ms)) is not None}
    told = ", ".join(f"{device} r = {r:.2f}" for device, r in found.items())
    return {
        "title": title,
        "note": f"{note}. Correlation of time with MACs over the layers: {told}" if told else note,
        "layers": bars,
        "series": {"domain": list(series), "range": [LAYER_COLOURS[kind] for kind in series]},
        "height": 11 * len(bars) + 6 * len(names) + 60,
    }
