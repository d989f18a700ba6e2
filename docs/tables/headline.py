"""The results of the first screen: dense, low-rank and thin dense networks, in points and milliseconds.

The first table has only networks whose accuracy and time are in one record, on the same images. Networks that were
timed but not trained on larger images have a table of their own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import form, frontier, gpu_models
from tables.form import ROOT, markdown, record

from lowrank_cnn.choose.frontier import DENSE_NAME, RECORD, DesignRow, Frontier, in_words, load_frontier
from lowrank_cnn.choose.verdict import BETTER, YES, control_of, read_questions
from lowrank_cnn.report.style import COLOURS

DENSE, LOW_RANK, THIN = "dense", "low-rank", "thin dense"
KEYS = {DENSE: "dense", LOW_RANK: "low-rank", THIN: "thin"}
"""The names of the three kinds in `gpu_models.json`."""
TIMED = {"lowrank:vgg11-gmp/lr": "`vgg11-gmp`", "torchvision:resnet18/lr": "torchvision's `resnet18`"}
"""Networks of `gpu_models.json`, and their names in the table."""
FULL = (DENSE_NAME, "dense-branches")
LEAST_RUNS = 4
"""Fewest runs of a network in the table."""
NOTE = """
Thin dense: the same network with fewer filters (`64s`: in multiples of 64), as fast as the low-rank one, and
trained in the same way. Bold, if any: better than it by our pre-registered margin, and nothing weakens the
verdict. The rows of Tiny-ImageNet are not tuned: all networks trained at one learning rate. Branches:
training-only convs, folded into the layers afterwards (RepVGG style); the dense column names the widest network
that was trained with them. Teacher: all networks are distilled from a dense one. A batch of 256 images on one
NVIDIA H200 in bf16, each network in its fastest form.
"""
SPEED = """
Speed only, at 224 x 224 pixels: inference, and a training step if it was measured.

"""

Sources = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Trio:
    """Three networks of one frontier, trained in the same way: the low-rank one with the largest gain over thin
    dense, that thin dense one, and the full dense network, or the widest that was trained in that way."""

    found: Frontier
    rows: dict[str, DesignRow]

    @property
    def network(self) -> str:
        about = self.found.about
        return f"`{about['family']}` on {about['data']['name']}, {about['recipe']['crop']} px"

    @property
    def training(self) -> str:
        ways = {"branches": self.rows[LOW_RANK].branched, "a teacher": bool(self.found.about["teacher"])}
        told = " and ".join(way for way, taken in ways.items() if taken)
        return f", with {told}" if told else ""

    @property
    def title(self) -> str:
        return self.network + self.training

    @property
    def gap(self) -> float:
        """Points that low rank is ahead of thin dense."""
        return self.top1(LOW_RANK) - self.top1(THIN)

    @property
    def is_better(self) -> bool:
        """Whether the verdict on the pre-registered question is yes, and nothing weakens it."""
        asked = (BETTER, self.rows[LOW_RANK].name, YES, [])
        return asked in [
            (one["question"], one["design"], one["verdict"], one["notes"]) for one in self.found.answers
        ]

    def top1(self, kind: str) -> float:
        return self.found.top1(self.rows[kind])

    def ms(self, kind: str) -> float:
        return self.found.ms(self.rows[kind]) or 0.0

    def cell(self, kind: str) -> str:
        if kind not in self.rows:
            return "not trained"
        text = f"{self.top1(kind):.1f}% in {self.ms(kind):.2f} ms"
        text = f"**{text}**" if kind == LOW_RANK and self.is_better else text
        name = self.rows[kind].name
        return text if name in FULL else f"`{name}`: {text}"


def headline() -> str:
    """Accuracy and time of dense networks, low-rank twins and thin dense rivals, then times of larger images."""
    sources: Sources = {}
    rows: list[list[object]] = []
    for trio in trios():
        runs = min(len(row.runs) for row in trio.rows.values())
        rows.append([trio.title, *(trio.cell(kind) for kind in KEYS), runs])
        for known in trio.found.environments:
            _add(sources, f"{frontier.FOLDER}/{trio.found.folder.name}/{RECORD}", known)
    columns = ["network and images", "<dense", "<low-rank", "<thin dense of the same speed", "runs of each"]
    trained = markdown(columns, rows) + NOTE if rows else ""
    timed = [row for name in TIMED if (row := _timed(name, sources))]
    speed = SPEED + markdown(["network", *(f"<{kind}" for kind in KEYS)], timed) if timed else ""
    return trained + speed + form.sources(sources)


def trios() -> list[Trio]:
    """The trios of all frontiers, by network; the largest gain over thin dense first."""
    folders = [path.parent for path in sorted((form.RESULTS / frontier.FOLDER).glob(f"*/{RECORD}"))]
    records = [load_frontier(folder) for folder in folders]
    found = [trio for one in records for branched in (False, True) if (trio := _trio(one, branched))]
    best = {trio.network: max(other.gap for other in found if other.network == trio.network) for trio in found}
    return sorted(found, key=lambda trio: (-best[trio.network], trio.network, -trio.gap))


def _trio(found: Frontier, branched: bool) -> Trio | None:
    """The networks that trained with branches, or those without."""
    rows = [row for row in found.rows if row.branched is branched and len(row.runs) >= LEAST_RUNS and row.timing]
    dense = next((row for row in rows if row.name in FULL), None)
    within = 1 - read_questions()["timing"]["tolerance"]
    pairs = [
        (row, rival)
        for row in rows
        if not row.dense and row.timing and (rival := control_of(found, row, within)) in rows
        if rival is not dense
    ]
    if not pairs:
        return None
    best, rival = max(pairs, key=lambda pair: found.top1(pair[0]) - found.top1(pair[1]))
    wider = [row for row in rows if row.dense and row.macs > rival.macs]
    dense = dense or max(wider, key=lambda row: row.macs, default=None)
    return Trio(found, ({DENSE: dense} if dense else {}) | {LOW_RANK: best, THIN: rival})


def _timed(name: str, sources: Sources) -> list[object]:
    """A network of `gpu_models.json`, dense, low-rank and thin, through `optimize` and `fit` in turns."""
    if not form.recorded(gpu_models.FILE):
        return []
    times = {
        mode: {row["row"]: (run, row) for run, row in gpu_models.strictest(mode)}
        for mode in ("inference", "training")
    }
    if name not in times["inference"]:
        return []
    run, row = times["inference"][name]
    _add(sources, gpu_models.FILE, run["environment"])
    network, scheme = name.partition(":")[2].split("/")
    trained = times["training"].get(name, ({}, {}))[1]
    cells = []
    for kind, key in KEYS.items():
        step = gpu_models.milliseconds(trained, "training", f"{key}, fit")
        step = step or _paper_step(f"{network}-{scheme}", kind, sources)
        cells.append(_times(gpu_models.milliseconds(row, "inference", f"{key}, optimize"), step))
    return [TIMED[name], *cells]


def _times(inference: float | None, step: float | None) -> str:
    told = [f"{inference:.2f} ms"] if inference else ["not measured"]
    return ", ".join([*told, *([f"step {step:.1f} ms"] if step else [])])


def _paper_step(name: str, kind: str, sources: Sources) -> float | None:
    """Milliseconds of a training step of a network of the paper, from the record of these."""
    if kind == THIN or not form.recorded("gpu_speed.json"):
        return None
    for run in reversed(record("gpu_speed.json")["runs"]):
        for row in run["rows"]:
            if (row["network"], row["mode"], row["batch"]) == (name, "training", 256):
                _add(sources, "gpu_speed.json", run["environment"])
                return _fastest_dense(row) if kind == DENSE else row["ms"]
    return None


def _fastest_dense(row: dict[str, Any]) -> float:
    """The fastest time of the dense network, with or without our kernels."""
    return min(row["dense_ms"], row["ms"] / row["tricks_ratio"] if "tricks_ratio" in row else row["dense_ms"])


def _add(sources: Sources, name: str, environment: dict[str, Any]) -> None:
    known = sources.setdefault(name, [])
    if environment not in known:
        known.append(environment)


def draw(path: Path) -> None:
    """Draw accuracy against milliseconds, with a line from each dense network to the others."""
    vl_convert = importlib.import_module("vl_convert")
    config = {"font": "system-ui, sans-serif", "axis": {"labelFontSize": 12, "titleFontSize": 13}}
    config |= {"title": {"fontSize": 14}, "background": "white", "view": {"stroke": "#ccc"}}
    chart = {"concat": [_chart(trio) for trio in trios()], "columns": 3, "config": config}
    path.write_text(vl_convert.vegalite_to_svg(chart))


def _chart(trio: Trio) -> dict[str, Any]:
    values = [
        {
            "name": in_words(row).replace("thin", KEYS[kind]),
            "kind": kind,
            "ms": trio.ms(kind),
            "top1": trio.top1(kind),
        }
        for kind, row in trio.rows.items()
    ]
    arrows = [
        {"ms": start["ms"], "top1": start["top1"], "ms2": end["ms"], "top2": end["top1"]}
        for start in values
        for end in values
        if start["kind"] == DENSE != end["kind"]
    ]
    tops, longest = [value["top1"] for value in values], max(value["ms"] for value in values)
    times, shares = [0, 1.15 * longest], [min(tops) - 1, max(tops) + 1]  # so that a tenth of a point looks small
    x = {"field": "ms", "type": "quantitative", "title": "milliseconds for 256 images", "scale": {"domain": times}}
    x["axis"] = {"tickCount": 4}
    y = {"field": "top1", "type": "quantitative", "title": "top-1, %", "scale": {"domain": shares}}
    y["axis"] = {"titlePadding": 14}  # fonts of a browser are wider than the one that is measured here
    kinds = list(KEYS)
    shapes = {"domain": kinds, "range": ["circle", "diamond", "square"]}
    colours = {"domain": kinds, "range": [COLOURS[kind][0] for kind in ("dense", "low-rank", "thin")]}
    beside = {"align": "right", "dx": -12}  # a thin network may lie on the low-rank one
    low, thin = (-6, 10) if trio.gap > 0 else (10, -6)
    full = trio.rows[DENSE].name in FULL if DENSE in trio.rows else True  # a longer name would leave the chart
    places = {
        DENSE: {"dy": -16} if full else {"dy": -16, "align": "right", "dx": 12},
        LOW_RANK: {**beside, "dy": low},
        THIN: {**beside, "dy": thin},
    }
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
    title = [trio.network.replace("`", ""), *([trio.training.removeprefix(", ")] if trio.training else [])]
    return {"title": title, "width": 240, "height": 190, "layer": layers}


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "headline.svg")
