"""Depthwise layers, and networks of them or over volumes, on a GPU: by torch and by our kernels.

Without a record a page has no table.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tables.form import ROOT, JsonRecord, from_record, markdown, record, recorded, source, sources

from lowrank_cnn.report.style import OTHERS

LAYERS, NETWORKS, VOLUMES = "depthwise.json", "depthwise_networks.json", "volumes.json"
SHAPES = "modelnet10.json"
ACCURACIES = {"Tiny-ImageNet": "frontier/tiny-convnext", "CIFAR-10": "frontier/cifar10-convnext"}
PICTURE = "images/depthwise.svg"
KINDS = ("bands", "7x7", "3x3")
WAYS = ("torch", "ours")
PASSES = {"forward": "all forward", "both": "and backward"}
CASES = {"inference": "{batch} images", "one image": "1 image", "step": "step"}
"""What was timed of a network, and its name in the table."""
VOLUME_NETWORKS = {"r3d_18": "`r3d_18` by `lr`", "r2plus1d_18": "`r2plus1d_18` as it is"}


@from_record(LAYERS, without="")
def layers(found: JsonRecord) -> str:
    """The picture; the forward time over that of a copy of the map; and the time of all blocks of a network."""
    rows = found["layers"]
    by_map: dict[tuple[int, int], dict[str, JsonRecord]] = {}
    for row in rows:
        by_map.setdefault((row["channels"], row["side"]), {})[row["layer"]] = row
    lines: list[list[object]] = []
    for (channels, side), kinds in by_map.items():
        over = [f"{_over(kinds[kind], way):.1f}" for kind in KINDS for way in WAYS]
        lines.append([f"{channels}, {side}x{side}", *over])
    for what, name in PASSES.items():
        sums = [f"**{_all_blocks(rows, kind, f'{way} {what}'):.2f}**" for kind in KINDS for way in WAYS]
        lines.append([f"{name}, ms", *sums])
    blocks = ", ".join(str(next(iter(kinds.values()))["blocks"]) for kinds in by_map.values())
    error = max(row["error"] for row in rows)
    note = (
        f"\nForward time over that of a copy of the map; then the sum over {blocks} blocks (copies: "
        f"{_all_blocks(rows, KINDS[0], 'copy'):.2f} ms).\nbf16, batch {found['batch']}, in CUDA graphs; our "
        f"largest error against float64 is {error:.1g} of the norm.\n"
    )
    table = markdown(["channels, map", *(f"{kind}, {way}" for kind in KINDS for way in WAYS)], lines)
    return f"![Depthwise layers: time over that of a copy]({PICTURE})\n\n{table}{note}" + source(
        LAYERS, found["environment"]
    )


@from_record(NETWORKS, without="")
def networks(found: JsonRecord) -> str:
    """Milliseconds of whole networks, compiled by torch and by `optimize` or `fit`."""
    lines: list[list[object]] = []
    for row in found["networks"]:
        if not any("torch" in row.get(case, {}) for case in CASES):
            continue  # it was not compiled in time
        lines.append([f"`{row['network']}`", *(cell for case in CASES for cell in _cells(row.get(case, row)))])
    shown = [name.format(batch=found["batch"]) for name in CASES.values()]
    columns = ["network", *(f"{name}, {way}" for name in shown for way in WAYS)]
    note = (
        f"\nMilliseconds, bf16, 224x224 pixels; training steps of {found['batch']} images. *torch*: torch.compile "
        "in a CUDA graph, its weights\nfrozen for inference. *ours*: `optimize`, and `fit(compile=True)`.\n"
    )
    return markdown(columns, lines) + note + source(NETWORKS, *found.get("environments", [found["environment"]]))


def accuracy() -> str:
    """The trained ConvNeXts of both data sets: accuracy and time, with 95% intervals over seeds."""
    from lowrank_cnn.choose.frontier import load_frontier
    from lowrank_cnn.core.numbers import mean_interval

    records = {name: load_frontier(ROOT / "benchmarks" / "results" / place) for name, place in ACCURACIES.items()}
    names = dict.fromkeys(row.name for found in records.values() for row in found.rows if row.runs)
    lines: list[list[object]] = []
    for name in sorted(names, key=lambda name: (not name.startswith("dense@"), name)):
        cells: list[object] = [f"`{name}`"]
        for found in records.values():
            row = found.row(name)
            if row is None or not row.runs:
                cells += ["", ""]
                continue
            mean, low, _ = mean_interval([100 * run.correct / found.images for run in row.runs])
            cells += [f"{mean:.1f} ± {mean - low:.1f}", f"{found.ms(row):.2f}" if row.timing else ""]
        lines.append(cells)
    columns = ["filters", *(text for name in records for text in (f"{name} %", "ms"))]
    places = {
        place: found.environments for place, found in zip(ACCURACIES.values(), records.values(), strict=True)
    }
    return markdown(columns, lines) + sources(places)


@from_record(VOLUMES, without="")
def volumes(found: JsonRecord) -> str:
    """Milliseconds of networks over volumes: the compiler's faster format of two, ours, and the share."""
    lines: list[list[object]] = []
    for row in found["networks"]:
        cells = [
            text
            for case in ("inference", "step")
            for text in (*_cells(row[case]), f"**{row[case]['ratio']:.2f}**" if "ratio" in row[case] else "")
        ]
        lines.append([VOLUME_NETWORKS[row["network"]], *cells])
    columns = ["network", *(f"{case}, {what}" for case in ("inference", "step") for what in (*WAYS, "ratio"))]
    note = (
        f"\nMilliseconds, bf16, {found['batch']} clips of {found['frames']} x {found['side']} x {found['side']}.\n"
        "*torch*: the network as it is, by torch.compile in a CUDA graph, in the faster of two memory formats.\n"
    )
    return markdown(columns, lines) + note + source(VOLUMES, *found.get("environments", [found["environment"]]))


@from_record(SHAPES, without="")
def shapes(found: JsonRecord) -> str:
    """Each design over ModelNet10's voxels, and the thin dense network of its time: accuracy, and the gap."""
    networks, lines = {row["network"]: row for row in found["networks"]}, []
    for one in found["answers"]:
        pair = [networks[one[side]] for side in ("ours", "theirs")]
        cells = [f"{row['top1']:.1f}% in {row['ms']:.2f} ms" for row in pair]
        gap = f"{one['gap']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"
        lines.append([f"`{one['ours']}`", cells[0], f"`{one['theirs']}`", cells[1], gap, one["verdict"]])
    seeds, asked = len(found["networks"][0]["runs"]), found["answers"][0]
    note = (
        f"\nModelNet10, voxels of 30x30x30, {seeds} seeds each; inference of {found['batch']} through `optimize`. "
        f"Gap: points, 99% interval. The question: ahead by {asked['margin']:g} points?\n"
    )
    columns = ["design", "test, time", "thin dense of its time", "test, time", "gap", "ahead"]
    return markdown(columns, lines) + note + source(SHAPES, found["environment"])


def draw(path: Path) -> None:
    """Draw bars for each layer; the line is a copy of the map, which no layer can undercut."""
    values = [
        {"layer": row["layer"], "map": f"{row['channels']}, {row['side']}x{row['side']}", "by": way,
         "times": _over(row, way)}
        for row in record(LAYERS)["layers"]
        for way in WAYS
    ]  # fmt: skip
    config = {"font": "system-ui, sans-serif", "axis": {"labelFontSize": 12, "titleFontSize": 13}}
    config |= {"title": {"fontSize": 14}, "legend": {"labelFontSize": 12}, "background": "white"}
    chart = {"vconcat": [_chart(kind, values) for kind in KINDS], "config": config}
    path.write_text(importlib.import_module("vl_convert").vegalite_to_svg(chart))


def _chart(kind: str, values: list[dict[str, Any]]) -> dict[str, Any]:
    """The layers of one kind: all axes are alike, and begin at nothing."""
    longest = 1.05 * max(value["times"] for value in values)
    x = {"field": "map", "type": "nominal", "sort": None, "title": "channels, map", "axis": {"labelAngle": 0}}
    y = {"field": "times", "type": "quantitative", "title": "time / copy", "scale": {"domain": [0, longest]}}
    colours = {"domain": list(WAYS), "range": [OTHERS[1][0], OTHERS[0][0]]}
    colour = {"field": "by", "type": "nominal", "title": None, "scale": colours, "legend": {"orient": "top"}}
    bars = {
        "data": {"values": [value for value in values if value["layer"] == kind]},
        "mark": "bar",
        "encoding": {"x": x, "xOffset": {"field": "by", "sort": list(WAYS)}, "y": y, "color": colour},
    }
    copy = {"data": {"values": [{"times": 1}]}, "mark": {"type": "rule", "strokeDash": [4, 3]},
            "encoding": {"y": {"field": "times", "type": "quantitative"}}}  # fmt: skip
    return {"title": f"{kind}, forward", "width": 330, "height": 120, "layer": [bars, copy]}


def _over(row: JsonRecord, way: str) -> float:
    """The forward time of a layer over that of a copy of its map."""
    return _ms(row, f"{way} forward") / _ms(row, "copy")


def _all_blocks(rows: list[JsonRecord], kind: str, time: str) -> float:
    return sum(row["blocks"] * _ms(row, time) for row in rows if row["layer"] == kind)


def _ms(row: JsonRecord, time: str) -> float:
    return row[time]["ms"]


def _cells(times: JsonRecord) -> list[str]:
    return [f"{times[way]:.2f}" if way in times else "not ready" if "error" in times else "" for way in WAYS]


if __name__ == "__main__" and recorded(LAYERS):
    draw(ROOT / "docs" / PICTURE)
