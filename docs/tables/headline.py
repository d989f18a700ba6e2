"""The results of the first screen: dense, low-rank and thin dense networks, in milliseconds and points."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import form, frontier, gpu_models
from tables.form import ROOT, markdown, record

from lowrank_cnn.frontier.answering import control_of
from lowrank_cnn.frontier.record import DENSE_NAME, RECORD, DesignRow, Frontier, load_frontier

DENSE, LOW_RANK, THIN = "dense", "low-rank", "thin dense"
KEYS = {DENSE: "dense", LOW_RANK: "low-rank", THIN: "thin"}
"""The names of the three kinds in `gpu_models.json`."""
PAPER_SETS = {"vgg11-gmp": "VGG-11 on 100 classes of Tiny-ImageNet (56x56 pixels, two seeds; timed at 224x224)"}
FAMILY = {"vgg11-gmp": "vgg11", "resnet18": "resnet18"}
"""Families of `lowrank frontier`, by the name of their dense network."""
TODAY = ("lowrank:vgg11-gmp/lr", "torchvision:resnet18/lr")
ALIKE = 0.1
"""A thin network of a frontier stands for the timed one if their shares of the MACs differ by at most this."""
LEAST_RUNS = 4
"""A network of a frontier is shown if it was trained so often."""
TIMES = """Time: a batch of 256 images on one NVIDIA H200 in bf16; training is {training}.
Dense: the fastest dense network we could build, through our own kernels where these are faster.
"""
THIN_NOTE = """Thin dense: the same network with fewer filters, as fast as the low-rank one or with as many MACs.
"""


@dataclass
class Line:
    """One network of the table; lines of one group stand in one panel of the picture."""

    group: str
    kind: str
    name: str
    macs: int
    top1: float | None
    ms: float
    training: str


def headline() -> str:
    """Accuracy, MACs, inference and training of dense networks, low-rank twins and thin dense rivals."""
    lines, sources = _lines()
    rows: list[list[object]] = [
        [_label(line), f"{line.macs / 1e9:.2f} G", _points(line), _time(line, lines), line.training]
        for line in lines
    ]
    groups = dict.fromkeys(line.group for line in lines)
    about = "\nTop-1: " + "; ".join(groups) + ".\n"
    columns = ["network", "MACs", "top-1", "inference", "training"]
    runs = any(line.training.endswith(" s") for line in lines)
    times = TIMES.format(training="one step (ms) or a whole run (s)" if runs else "one step")
    note = about + times + (THIN_NOTE if any(line.kind == THIN for line in lines) else "")
    return markdown(columns, rows) + note + form.sources(sources)


def _label(line: Line) -> str:
    return f"`{line.name}`" if line.kind == LOW_RANK else f"`{line.name}`, {line.kind}"


def _points(line: Line) -> str:
    return "not trained" if line.top1 is None else f"{line.top1:.1f}%"


def _time(line: Line, lines: list[Line]) -> str:
    """Milliseconds; the fastest network of a group is bold."""
    fastest = min(other.ms for other in lines if other.group == line.group)
    return f"**{line.ms:.2f} ms**" if line.ms == fastest else f"{line.ms:.2f} ms"


def _lines() -> tuple[list[Line], dict[str, list[dict[str, Any]]]]:
    """The networks in the order of the table, and the environments of each record."""
    sources: dict[str, list[dict[str, Any]]] = {}
    found = [load_frontier(path.parent) for path in sorted((form.RESULTS / frontier.FOLDER).glob(f"*/{RECORD}"))]
    today = {name: list(_of_today(name, found, sources)) for name in TODAY}
    filled = {
        FAMILY[lines[0].name] for lines in today.values() if lines and lines[-1].kind == THIN and lines[-1].top1
    }
    trios = [line for one in found if one.about["family"] not in filled for line in _of_frontier(one, sources)]
    return [*(line for lines in today.values() for line in lines), *trios], sources


def _fastest_dense(row: dict[str, Any]) -> float:
    """The dense network by its fastest way without our kernels, or through them where that is faster."""
    return min(row["dense_ms"], row["ms"] / row["tricks_ratio"] if "tricks_ratio" in row else row["dense_ms"])


def _newest(runs: list[dict[str, Any]], name: str, mode: str, sources: dict[str, Any]) -> dict[str, Any]:
    for run in reversed(runs):
        for row in run["rows"]:
            if (row["network"], row["mode"], row["batch"]) == (name, mode, 256):
                _add(sources, "gpu_speed.json", run["environment"])
                return row
    raise KeyError(f"no {mode} time of {name}")


def _add(sources: dict[str, Any], name: str, environment: dict[str, Any]) -> None:
    known = sources.setdefault(name, [])
    if environment not in known:
        known.append(environment)


def _paper_step(network: str, scheme: str, kind: str, sources: dict[str, Any]) -> float | None:
    """Milliseconds of a training step of a network of the paper, from the record of these."""
    if network not in PAPER_SETS or kind == THIN:
        return None
    row = _newest(record("gpu_speed.json")["runs"], f"{network}-{scheme}", "training", sources)
    return _fastest_dense(row) if kind == DENSE else row["ms"]


def _accuracy(name: str) -> float:
    """The mean accuracy of the recorded runs, in percent."""
    rows = record("tiny-imagenet/table.json")["rows"]
    top1 = next(row["top1"] for row in rows if (row["part"], row["network"]) == ("paper", name))
    return 100 * sum(top1) / len(top1)


def _of_frontier(found: Frontier, sources: dict[str, Any]) -> Iterator[Line]:
    """The dense network, the low-rank one that does best against thin dense of its time, and that thin network."""
    rows = [row for row in found.rows if len(row.runs) >= LEAST_RUNS and row.timing]
    dense = next((row for row in rows if row.name == DENSE_NAME), None)
    thin = [row for row in rows if row.dense and row is not dense]
    low_rank = [row for row in rows if not row.dense and _ratio(row) < 1]
    pairs = [(row, rival) for row in low_rank if (rival := control_of(found, _ratio(row))) and rival in thin]
    if dense is None or not pairs:
        return
    best, rival = max(pairs, key=lambda pair: _mean(found, pair[0]) - _mean(found, pair[1]))
    family, data = found.about["family"], found.about["data"]["name"]
    least = min(len(row.runs) for row in (dense, best, rival))
    about = f"{family} on {data} (mean of at least {least} seeds)"
    for row, kind in ((dense, DENSE), (best, LOW_RANK), (rival, THIN)):
        seconds = "not measured" if row.seconds is None else f"{row.seconds:.1f} s"
        at = f" at {found.about['recipe']['crop']} px" if family in FAMILY.values() else ""
        name = family + at if row is dense else f"{family}{at}, {row.name}"
        yield Line(about, kind, name, row.macs, _mean(found, row), found.ms(row) or 0.0, seconds)
    for known in found.environments:
        _add(sources, f"{frontier.FOLDER}/{found.folder.name}/{RECORD}", known)


def _mean(found: Frontier, row: DesignRow) -> float:
    return 100 * sum(run.correct for run in row.runs) / len(row.runs) / found.images


def _ratio(row: DesignRow) -> float:
    return row.timing.ratio if row.timing else 0.0


def _trained(
    found: list[Frontier], network: str, scheme: str, share: float
) -> dict[str, tuple[Frontier, DesignRow]]:
    """The dense, the low-rank and the thin network of a frontier, by kind; nothing where one of them is missing.

    `share` is that of the thin network's MACs. Accuracies of different recipes would not be comparable.
    """
    for one in found:
        if one.about["family"] != FAMILY.get(network):
            continue
        rows = [row for row in one.rows if len(row.runs) >= LEAST_RUNS]
        dense = next((row for row in rows if row.name == DENSE_NAME), None)
        low_rank = next((row for row in rows if row.name == scheme), None)
        thin = [row for row in rows if row.dense and dense and abs(row.macs / dense.macs - share) <= ALIKE]
        if dense and low_rank and thin:
            rival = min(thin, key=lambda row: abs(row.macs / dense.macs - share))
            return {kind: (one, row) for kind, row in ((DENSE, dense), (LOW_RANK, low_rank), (THIN, rival))}
    return {}


def _of_today(name: str, found: list[Frontier], sources: dict[str, Any]) -> Iterator[Line]:
    """A network of `gpu_models.json`, dense, low-rank and thin, through `optimize` and `fit` in turns.

    Accuracies are those of a frontier that has all three, else the paper's part of our runs.
    """
    if not form.recorded(gpu_models.FILE):
        return
    times = {
        mode: {row["row"]: (run, row) for run, row in gpu_models.strictest(mode)}
        for mode in ("inference", "training")
    }
    if name not in times["inference"]:
        return
    run, row = times["inference"][name]
    _add(sources, gpu_models.FILE, run["environment"])
    network, scheme = name.partition(":")[2].split("/")
    trained = times["training"].get(name, ({}, {}))[1]
    group = PAPER_SETS.get(network, f"{network} was not trained (1000 classes, 224x224)")
    times_of = {key: gpu_models.milliseconds(row, "inference", f"{key}, optimize") for key in KEYS.values()}
    macs = {key: gpu_models.macs(row, "inference", f"{key}, optimize") for key, ms in times_of.items() if ms}
    accuracies = _trained(found, network, scheme, macs["thin"] / macs["dense"]) if "thin" in macs else {}
    if accuracies:
        one, best = accuracies[LOW_RANK]
        group = f"{network} on {one.about['data']['name']} (mean of {len(best.runs)} seeds; timed at 224x224)"
        for known in one.environments:
            _add(sources, f"{frontier.FOLDER}/{one.folder.name}/{RECORD}", known)
    for kind, key in KEYS.items():
        if time := times_of[key]:
            step = gpu_models.milliseconds(trained, "training", f"{key}, fit")
            step = step or _paper_step(network, scheme, kind, sources)
            label = f"{network}-{scheme}" if kind == LOW_RANK else network
            top1 = _accuracy(label) if network in PAPER_SETS and kind != THIN and not accuracies else None
            top1 = _mean(*accuracies[kind]) if accuracies else top1
            training = f"{step:.2f} ms" if step else "not measured"
            yield Line(group, kind, label, macs[key], top1, time, training)


def draw(path: Path) -> None:
    """Draw accuracy against milliseconds, with a line from each dense network to the others."""
    vl_convert = importlib.import_module("vl_convert")
    lines = [line for line in _lines()[0] if line.top1 is not None]
    charts = [_chart(group, [line for line in lines if line.group == group]) for group in _groups(lines)]
    config = {"font": "system-ui, sans-serif", "axis": {"labelFontSize": 12, "titleFontSize": 13}}
    config |= {"title": {"fontSize": 14}, "background": "white", "view": {"stroke": "#ccc"}}
    path.write_text(vl_convert.vegalite_to_svg({"hconcat": charts, "config": config}))


def _groups(lines: list[Line]) -> list[str]:
    return list(dict.fromkeys(line.group for line in lines))


def _chart(group: str, lines: list[Line]) -> dict[str, Any]:
    dense = next(line.name for line in lines)
    short = [THIN if line.kind == THIN and line.name == dense else line.name.rpartition(", ")[2] for line in lines]
    values = [
        {"name": name, "kind": line.kind, "ms": line.ms, "top1": line.top1}
        for line, name in zip(lines, short, strict=True)
    ]
    start, *ends = values
    arrows = [{"ms": start["ms"], "top1": start["top1"], "ms2": end["ms"], "top2": end["top1"]} for end in ends]
    tops, longest = [line.top1 or 0.0 for line in lines], max(line.ms for line in lines)
    times, shares = [0, 1.15 * longest], [min(tops) - 1, max(tops) + 1]  # so that a tenth of a point looks small
    x = {"field": "ms", "type": "quantitative", "title": "milliseconds for 256 images", "scale": {"domain": times}}
    x["axis"] = {"tickCount": 6}
    y = {"field": "top1", "type": "quantitative", "title": "top-1, %", "scale": {"domain": shares}}
    y["axis"] = {"titlePadding": 14}  # fonts of a browser are wider than the one that is measured here
    kinds = [DENSE, LOW_RANK, THIN]  # in every chart, as they share a legend
    shapes = {"domain": kinds, "range": ["circle", "square", "diamond"]}
    colours = {"domain": kinds, "range": ["#d55e00", "#0072b2", "#6a6a6a"]}
    beside = {"align": "right", "dx": -12}  # a thin network may lie on the low-rank one
    places = {DENSE: {"dy": -16}, LOW_RANK: {**beside, "dy": -6}, THIN: {**beside, "dy": 10}}
    shape = {"field": "kind", "type": "nominal", "title": None, "scale": shapes}
    colour = {"field": "kind", "type": "nominal", "title": None, "scale": colours}
    layers = [
        {"data": {"values": arrows}, "mark": {"type": "rule", "color": "#888", "strokeDash": [4, 3]},
         "encoding": {"x": x, "y": y, "x2": {"field": "ms2"}, "y2": {"field": "top2"}}},
        {"data": {"values": values}, "mark": {"type": "point", "filled": True, "size": 120, "opacity": 1},
         "encoding": {"x": x, "y": y, "color": colour, "shape": shape}},
        *({"data": {"values": [value]}, "mark": {"type": "text", "fontSize": 12, **places[value["kind"]]},
           "encoding": {"x": x, "y": y, "text": {"field": "name"}}} for value in values),
    ]  # fmt: skip
    return {"title": group.partition(" (")[0], "width": 330, "height": 220, "layer": layers}


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "headline.svg")
