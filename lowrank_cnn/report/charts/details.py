"""Test images in pictures: accuracy by class, the confusion matrix, the most confused pairs, calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowrank_cnn.report.charts.colours import kind_colours
from lowrank_cnn.report.charts.vega import Spec, filled, template
from lowrank_cnn.report.comparing import is_twin
from lowrank_cnn.report.datasets import trained_label
from lowrank_cnn.report.details import AnswerDetails, pool_answers
from lowrank_cnn.report.records import NetworkResult
from lowrank_cnn.system.text import counted, percent

MOST_BARS = 25
"""Of more classes, those that are recognised least."""
MOST_PAIRS = 15
MOST_NAMED = 40
"""A confusion matrix of more classes has no room for their names."""
SPECS = {name: template(name) for name in ("bars", "confusion", "calibration")}


def details_charts(results: Sequence[NetworkResult]) -> list[dict[str, Any]]:
    """For every network whose runs have details: the answers of all its runs together, as plain data."""
    found = []
    for result in results:
        details = [run.details for run in result.scored if run.details is not None]
        if details:
            trained = trained_label(result.data, result.recipe)
            colours = kind_colours(dense=is_twin(result))
            about = {"network": result.label, "trained": trained, "runs": len(details), "colours": colours}
            found.append(about | _plain(pool_answers(details)))
    return found


def _plain(details: AnswerDetails) -> dict[str, Any]:
    rows = zip(details.classes, details.per_class, strict=True)
    known = sorted(((right / n, name, n) for name, (n, right) in rows if n), key=lambda row: row[0])
    return {
        "classes": list(details.classes),
        "images": int(sum(n for n, _ in details.per_class)),
        "by_class": [_bar(name, right, f"{counted(int(n), 'image')}") for right, name, n in known[:MOST_BARS]],
        "known": len(known),
        "pairs": _pairs(details)[:MOST_PAIRS],
        "confusion": details.confusion,
        "bins": [_bin(*counts) for counts in details.bins if counts[0]],
        "error": details.calibration_error,
        "worst": [vars(image) for image in details.worst],
    }


def _bar(name: str, share: float, of: str) -> dict[str, Any]:
    shown = [("share", percent(share)), ("of", of)]
    return {
        "name": name,
        "label": name,
        "share": share,
        "details": shown,
        "spoken": f"{name}, {percent(share)} of {of}",
    }


def _pairs(details: AnswerDetails) -> list[dict[str, Any]]:
    totals = {name: n for name, (n, _) in zip(details.classes, details.per_class, strict=True)}
    found = [
        _bar(f"{true} taken for {said}", n / totals[true], f"{counted(int(totals[true]), 'image')} of {true}")
        for true, said, n in details.pairs
        if totals.get(true)
    ]
    return sorted(found, key=lambda bar: -bar["share"])


def _cells(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of the confusion matrix that hold an image, each with its share of the true class."""
    return [
        {"true": chart["classes"][i], "predicted": chart["classes"][j], "n": n, "share": n / sum(row)}
        for i, row in enumerate(chart["confusion"])
        for j, n in enumerate(row)
        if n
    ]


def _bin(n: float, confidence: float, right: float) -> dict[str, Any]:
    told = [("images", f"{int(n):,}"), ("confidence", percent(confidence / n)), ("right", percent(right / n))]
    spoken = ", ".join(f"{name} {value}" for name, value in told)
    place = {"n": int(n), "confidence": confidence / n, "accuracy": right / n}
    return {**place, "label": "Bin of confidence", "details": told, "spoken": spoken}


def classes_spec(chart: dict[str, Any]) -> Spec:
    """Accuracy by class, the hardest first."""
    shown = len(chart["by_class"])
    most = "" if shown == chart["known"] else f", the {shown} hardest of {chart['known']}"
    spec = _bars(chart, "Share of the class that is recognised", shown)
    return _titled(spec, chart, f"Accuracy by class{most}", {"bars": chart["by_class"]})


def pairs_spec(chart: dict[str, Any]) -> Spec:
    spec = _bars(chart, "Share of the class", len(chart["pairs"]))
    return _titled(spec, chart, "Classes confused most", {"bars": chart["pairs"]})


def _bars(chart: dict[str, Any], x: str, rows: int) -> Spec:
    return filled(SPECS["bars"], {"{x}": x, "{colour}": chart["colours"]["light"], "{height}": 17 * rows + 75})


def confusion_spec(chart: dict[str, Any]) -> Spec:
    parts = {"{classes}": chart["classes"], "{named}": len(chart["classes"]) <= MOST_NAMED}
    return _titled(filled(SPECS["confusion"], parts), chart, "Confusion matrix", {"cells": _cells(chart)})


def calibration_spec(chart: dict[str, Any]) -> Spec:
    """A reliability diagram: on the dashed line, confidence equals accuracy."""
    words = f"Calibration: off by {percent(chart['error'])} on average"
    return _titled(
        filled(SPECS["calibration"], {"{colour}": chart["colours"]["light"]}),
        chart,
        words,
        {"bins": chart["bins"]},
    )


def _titled(spec: Spec, chart: dict[str, Any], title: str, data: dict[str, Any]) -> Spec:
    answers = f"{counted(chart['images'], 'answer')} of {counted(chart['runs'], 'run')}"
    subtitle = f"{chart['network']} on {chart['trained']}: {answers}"
    return {**spec, "title": {"text": title, "subtitle": subtitle}, "datasets": data}


DETAILS: dict[str, Callable[[dict[str, Any]], Spec]] = {
    "confusion": confusion_spec,
    "classes": classes_spec,
    "pairs": pairs_spec,
    "calibration": calibration_spec,
}
"""The charts of test images by name, each with the function that specifies it."""
NEEDED = {"confusion": "confusion", "classes": "by_class", "pairs": "pairs", "calibration": "bins"}
"""What a chart cannot be drawn without."""


def details_data(results: Sequence[NetworkResult]) -> list[dict[str, Any]]:
    """For the page: each network's charts, of those that there is data for, and its worst images.

    The cells of a confusion matrix would be megabytes: the page makes them from the matrix. It also fills in the
    colour, which depends on its theme.
    """
    found = []
    for chart in details_charts(results):
        open_chart = {**chart, "colours": {"light": "{colour}"}}
        charts = {name: specify(open_chart) for name, specify in DETAILS.items() if chart[NEEDED[name]]}
        if "confusion" in charts:
            charts["confusion"]["datasets"] = {"cells": []}
        kept = {key: chart[key] for key in ("network", "trained", "colours", "classes", "confusion", "worst")}
        found.append(kept | {"charts": charts})
    return found
