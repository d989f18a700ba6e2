"""Training curves: one line per network, the mean over its runs, in a band from the lowest run to the highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowrank_cnn.report.charts.colours import Look, network_looks
from lowrank_cnn.report.charts.vega import Spec, filled, template
from lowrank_cnn.report.comparing import is_twin
from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.records import NetworkResult, Run
from lowrank_cnn.system.arithmetic import ceil_div

MOST_EPOCHS = 400
"""Epochs of a run that are shown: of longer ones, every n-th."""
MEASURES = {
    "accuracy": "Accuracy on watched images",
    "train_accuracy": "Accuracy on training images",
    "train_loss": "Mean training loss of an epoch",
}
EARLY = 0.1
"""The first share of a run, whose accuracies are near chance and do not stretch the axis of a figure."""

SPEC = template("curves")


def training_curves(results: Sequence[NetworkResult]) -> list[dict[str, Any]]:
    """The history of every run that has one, as plain data for the page."""
    shown = [(result, run) for result in results for run in result.runs if run.history]
    charts: dict[tuple[str, str], dict[str, bool]] = {}
    for result, run in shown:
        charts.setdefault((result.data, run.recipe), {})[result.label] = is_twin(result)
    looks = {chart: network_looks(networks) for chart, networks in charts.items()}
    return [_curve(result, run, looks[result.data, run.recipe][result.label]) for result, run in shown]


def _curve(result: NetworkResult, run: Run, look: Look) -> dict[str, Any]:
    step = ceil_div(len(run.history), MOST_EPOCHS)
    kept = [*run.history[:-1:step], run.history[-1]]
    values = {measure: [getattr(epoch, measure) for epoch in kept] for measure in MEASURES}
    return {
        "group": result.label,
        "look": look,
        "seed": run.seed,
        "data": data_label(result.data),
        "recipe": run.recipe,
        "watched": run.watched,
        "epochs": [epoch.epoch for epoch in kept],
        "test": run.top1 if run.finished else None,
        **values,
    }


def best_measure(curves: Sequence[dict[str, Any]]) -> str:
    """Watched accuracy where some run was watched on the way; else accuracy on training images."""
    watched = any(sum(value is not None for value in curve["accuracy"]) > 1 for curve in curves)
    return "accuracy" if watched else "train_accuracy"


def curves_spec(title: str, curves: Sequence[dict[str, Any]]) -> Spec:
    """The specification of the curves of one data set and recipe, for a file; dots are test accuracies."""
    measure = best_measure(curves)
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
    looks = {curve["group"]: curve["look"] for curve in curves}
    scales = {
        "{colours}": {"domain": list(looks), "range": [look["light"] for look in looks.values()]},
        "{dashes}": {"domain": list(looks), "range": [look["dash"] for look in looks.values()]},
    }
    spec: Spec = filled(SPEC, {"{y}": MEASURES[measure], "{format}": ".0%", **scales})
    last = max((row["epoch"] for row in rows), default=1)
    late = [row["value"] for row in [*rows, *ends] if row["epoch"] >= EARLY * last]
    if late:
        spec["layer"][1]["encoding"]["y"]["scale"]["domain"] = [
            max(0.0, min(late) - 0.02),
            min(1.0, max(late) + 0.02),
        ]
    subtitle = "Lines: mean over runs; bands: lowest to highest run; dots: test accuracy of each run"
    return {**spec, "title": {"text": title, "subtitle": subtitle}, "datasets": {"curves": rows, "ends": ends}}
