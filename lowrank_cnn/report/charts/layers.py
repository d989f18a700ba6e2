"""MACs beside time, layer by layer, as shares of their totals: equal bars mean that time follows MACs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lowrank_cnn.paper.published import timings
from lowrank_cnn.report.charts.vega import Spec, filled, template
from lowrank_cnn.report.records import CPU, GPU, TimedNetwork
from lowrank_cnn.system.statistics import pearson
from lowrank_cnn.system.text import si

SPEC = template("layers")
COLOURS = {"MACs": "#7d8792", "CPU time": "#a94fd0", "GPU time": "#6aa121"}
"""None is a colour of a network."""


def layer_charts(measured: Sequence[TimedNetwork]) -> list[dict[str, Any]]:
    """The networks timed here, then the paper's own, as plain data."""
    detailed = sorted((timing for timing in measured if len(timing.layers) > 1), key=_same_layers)
    return [*(_layers_of(list(group)) for _, group in groupby(detailed, key=_same_layers)), _published_layers()]


def layers_spec(chart: dict[str, Any]) -> Spec:
    """The specification of a chart that is written to a file."""
    title = {"text": chart["title"], "subtitle": chart["note"]}
    return {
        **filled(SPEC, {"{height}": chart["height"], "{series}": chart["series"]}),
        "title": title,
        "datasets": {"layers": chart["layers"]},
    }


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
    """Layers' names without the prefix that all of them share."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared + 1 and part[: shared + 1] == parts[0][: shared + 1] for part in parts):
        shared += 1
    return [".".join(part[shared:]) for part in parts]


def _published_layers() -> dict[str, Any]:
    found = timings()
    times = {CPU: [t.cpu_ms for t in found], GPU: [t.gpu_ms for t in found]}
    names, macs = [t.layer for t in found], [t.macs for t in found]
    return _chart("vgg11-gmp-lr, published", names, macs, times, "Caffe, as published")


def _chart(
    title: str, names: Sequence[str], macs: Sequence[int], times: dict[str, list[float]], note: str
) -> dict[str, Any]:
    bars = _bars("MACs", names, macs, [f"{si(value)} MACs" for value in macs])
    for device, ms in times.items():
        bars += _bars(f"{device} time", names, ms, [f"{value:.3g} ms" for value in ms])
    found = {device: r for device, ms in times.items() if (r := pearson(macs, ms)) is not None}
    told = ", ".join(f"{device} r = {r:.2f}" for device, r in found.items())
    note = f"{note}. Correlation of time with MACs over the layers: {told}" if told else note
    shown = ["MACs", *(f"{device} time" for device in times)]
    series = {"domain": shown, "range": [COLOURS[name] for name in shown]}
    height = 11 * len(bars) + 6 * len(names) + 60
    return {"title": title, "note": note, "layers": bars, "series": series, "height": height}


def _bars(name: str, layers: Sequence[str], values: Sequence[float], texts: Sequence[str]) -> list[dict[str, Any]]:
    total = sum(values)
    found = []
    for layer, value, text in zip(layers, values, texts, strict=True):
        shown = f"{text}, {value / total:.1%} of the total"
        details = [(name, shown)]
        bar = {"layer": layer, "label": layer, "series": name, "share": value / total, "details": details}
        found.append(bar | {"spoken": f"{layer}, {name} {shown}"})
    return found
