"""The results of the first screen: dense beside low-rank, in milliseconds and points."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from tables.form import ROOT, markdown, record, source

from lowrank_cnn.method.counting import count
from lowrank_cnn.models import create_model

_PAIRS = (("nin", "nin-c3-lr"), ("vgg11-gmp", "vgg11-gmp-lr"), ("vgg11-gmp", "vgg11-gmp-lr-join"))
_PANELS = {"Network-in-Network, CIFAR-10": _PAIRS[:1], "VGG-11, Tiny-ImageNet accuracy, 224x224 time": _PAIRS[1:]}


def headline() -> str:
    """Accuracy, MACs, inference and training step of the dense network and of its low-rank twins."""
    runs = record("gpu_speed.json")["runs"]
    accuracy = _accuracies()
    rows: list[list[object]] = []
    shown: set[str] = set()
    used: list[dict[str, Any]] = []
    for dense, low_rank in _PAIRS:
        found = {mode: _newest(runs, low_rank, mode, used) for mode in ("inference", "training")}
        for name in (dense, low_rank):
            if name not in shown:
                shown.add(name)
                rows.append(_row(name, name == dense, found, accuracy))
    columns = ["network", "MACs", "top-1", "inference", "training step"]
    note = (
        "\nTop-1: NiN on CIFAR-10, VGG-11 on 100 classes of Tiny-ImageNet (56x56 pixels); three and two seeds.\n"
        "Time: one NVIDIA H200, bf16, 256 images (NiN 32x32, VGG-11 224x224). Dense times are those of the\n"
        "fastest dense network without our kernels (cuDNN, torch.compile).\n"
    )
    return markdown(columns, rows) + note + source("gpu_speed.json", *used)


def _newest(runs: list[dict[str, Any]], name: str, mode: str, used: list[dict[str, Any]]) -> dict[str, Any]:
    for run in reversed(runs):
        for row in run["rows"]:
            if (row["network"], row["mode"], row["batch"]) == (name, mode, 256):
                if run["environment"] not in used:
                    used.append(run["environment"])
                return row
    raise KeyError(f"no {mode} time of {name}")


def _row(name: str, dense: bool, found: dict[str, dict[str, Any]], accuracy: dict[str, Any]) -> list[object]:
    macs, top1 = accuracy[name]
    label = f"`{name}`, dense" if dense else f"`{name}`"
    times = [f"{found[mode]['dense_ms' if dense else 'ms']:.2f} ms" for mode in ("inference", "training")]
    times = times if dense else [f"**{time}**" for time in times]
    return [label, f"{macs / 1e9:.2f} G", f"{100 * top1:.1f}%", *times]


def _accuracies() -> dict[str, tuple[int, float]]:
    """MACs at the size that is timed, and the mean accuracy of the recorded runs."""
    found: dict[str, tuple[int, float]] = {}
    for folder in ("cifar10", "tiny-imagenet"):
        for row in record(f"{folder}/table.json")["rows"]:
            if row["part"] == "paper":
                with torch.device("meta"):
                    network = create_model(row["network"])
                size = (3, 32, 32) if row["network"].startswith("nin") else network.input_size
                mean = sum(row["top1"]) / len(row["top1"])
                found[row["network"]] = count(network, size).macs, mean
    return found


def draw(path: Path) -> None:
    """Draw accuracy against milliseconds, with a line from each dense network to its low-rank twins."""
    vl_convert = importlib.import_module("vl_convert")
    runs, accuracy = record("gpu_speed.json")["runs"], _accuracies()
    charts = [_chart(title, pairs, runs, accuracy) for title, pairs in _PANELS.items()]
    config = {"font": "system-ui, sans-serif", "axis": {"labelFontSize": 12, "titleFontSize": 13}}
    config |= {"title": {"fontSize": 14}, "background": "white", "view": {"stroke": "#ccc"}}
    path.write_text(vl_convert.vegalite_to_svg({"hconcat": charts, "config": config}))


def _chart(title: str, pairs: Any, runs: list[dict[str, Any]], accuracy: dict[str, Any]) -> dict[str, Any]:
    points, arrows = {}, []
    for dense, low_rank in pairs:
        row = _newest(runs, low_rank, "inference", [])
        ends = [(dense, "dense", row["dense_ms"]), (low_rank, "low-rank", row["ms"])]
        for name, kind, ms in ends:
            points[name] = {"name": name, "kind": kind, "ms": ms, "top1": 100 * accuracy[name][1]}
        start, end = points[dense], points[low_rank]
        arrows.append({"ms": start["ms"], "top1": start["top1"], "ms2": end["ms"], "top2": end["top1"]})
    tops, longest = [point["top1"] for point in points.values()], max(point["ms"] for point in points.values())
    times, shares = [0, 1.15 * longest], [min(tops) - 1, max(tops) + 1]  # so that a tenth of a point looks small
    x = {"field": "ms", "type": "quantitative", "title": "milliseconds for 256 images", "scale": {"domain": times}}
    y = {"field": "top1", "type": "quantitative", "title": "top-1, %", "scale": {"domain": shares}}
    shapes = {"domain": ["dense", "low-rank"], "range": ["circle", "square"]}
    shape = {"field": "kind", "type": "nominal", "title": None, "scale": shapes}
    colours = {"domain": ["dense", "low-rank"], "range": ["#d55e00", "#0072b2"]}
    colour = {"field": "kind", "type": "nominal", "title": None, "scale": colours}
    values = list(points.values())
    text = {"type": "text", "dy": -12, "fontSize": 12}
    layers = [
        {"data": {"values": arrows}, "mark": {"type": "rule", "color": "#888", "strokeDash": [4, 3]},
         "encoding": {"x": x, "y": y, "x2": {"field": "ms2"}, "y2": {"field": "top2"}}},
        {"data": {"values": values}, "mark": {"type": "point", "filled": True, "size": 120, "opacity": 1},
         "encoding": {"x": x, "y": y, "color": colour, "shape": shape}},
        {"data": {"values": values}, "mark": text,
         "encoding": {"x": x, "y": y, "text": {"field": "name"}}},
    ]  # fmt: skip
    return {"title": title, "width": 330, "height": 220, "layer": layers}


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "headline.svg")
