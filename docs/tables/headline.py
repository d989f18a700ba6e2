"""The results of the first screen: four dense networks, each with a low-rank and a thin one of the same speed.

A row shows the judged low-rank design that is furthest ahead of its rival, and the strongest of its thin rivals.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tables import form, frontier
from tables.form import ROOT, markdown

from lowrank_cnn.choose.frontier import DENSE_NAME, LOW_RANK, RECORD, THIN, DesignRow, Frontier, load_frontier
from lowrank_cnn.choose.verdict import BETTER, EARLY, SEARCHED, paired_gap
from lowrank_cnn.report.style import COLOURS, GRID, INK, SOFT, VERSION, Spec, theme

SHOWN = ("cifar10-nin-rivals", "cifar10-vgg", "tiny", "tiny-convnext")
"""The records of the rows."""
NAMES = {"nin": "NiN", "vgg11": "VGG-11", "resnet18": "ResNet-18", "convnext": "ConvNeXt"}
IMAGES = {"cifar10": "CIFAR-10", "tiny-imagenet-100": "Tiny-ImageNet"}
KINDS = (DENSE_NAME, LOW_RANK, THIN)
NOTE = """
<details>
<summary>256 images, bf16, one {gpu}. Verdict: low-rank against thin or 3x3, by
<code>lowrank frontier {family} --out benchmarks/results/frontier/{folder}</code></summary>

{epochs} epochs, {least} to {most} runs. Beside that folder are {others} for the other rows. torch {torch}, each
network in its fastest form without torch.compile. Thin or 3x3 is the strongest rival of about the same speed: with
fewer filters (VGG-11, ResNet-18) or with 3x3 filters (NiN, ConvNeXt). Undecided: the difference may be chance. Not
tuned: all networks trained at one learning rate, so there is no verdict. In the picture, lines are 95% intervals
over runs and test images, and the 7% by which times repeat.
</details>
"""


@dataclass(frozen=True)
class Trio:
    """Three networks of one record: dense, low-rank and its thin rival, with the verdict between these two."""

    found: Frontier
    rows: dict[str, DesignRow]
    answer: dict[str, Any]

    @property
    def title(self) -> str:
        about = self.found.about
        return f"{NAMES[about['family']]}, {IMAGES[about['data']['name']]}"

    def ms(self, kind: str) -> float:
        """Milliseconds on one clock: the share of the dense network's time, as that stands in the record."""
        return self.share(kind) * self.times[DENSE_NAME][0]

    def share(self, kind: str) -> float:
        return self.times[self.rows[kind].name][1]

    @cached_property
    def times(self) -> dict[str, tuple[float, float]]:
        """Milliseconds, and the share of the dense network's."""
        return {row.name: (row.timing.ms, row.timing.ratio) for row in self.found.rows if row.timing}

    def ahead(self, kind: str) -> tuple[float, float, float]:
        """Points ahead of the dense network, with the 95% interval over runs and test images."""
        ours, dense = (self.found.right_answers(self.rows[one]) for one in (kind, DENSE_NAME))
        gap = paired_gap(ours, dense, margin=0, alpha=0.05)
        return gap.points, gap.low, gap.high


def headline() -> str:
    """Accuracy and time of the networks, one number in a cell, and the commands that compute them again."""
    shown = trios()
    if not shown:
        return form.NO_RUNS
    rows: list[list[object]] = []
    for trio in shown:
        cells = [cell for kind in KINDS for cell in (f"{_top1(trio, kind):.1f}", f"{trio.ms(kind):.2f}")]
        rows.append([trio.title.replace("-", "&#8209;"), *cells, frontier.verdict(trio.answer)])
    runs = [len(row.runs) for trio in shown for row in trio.rows.values()]
    epochs = sorted({trio.found.about["recipe"]["epochs"] for trio in shown})
    environment = shown[-1].found.environments[-1]
    told = {"gpu": environment["gpu"] or environment["cpu"], "torch": environment["torch"].partition("+")[0]}
    told |= {"least": str(min(runs)), "most": str(max(runs)), "epochs": f"{epochs[0]} to {epochs[-1]}"}
    told["family"], told["folder"] = shown[0].found.about["family"], shown[0].found.folder.name
    told["others"] = ", ".join(f"<code>{trio.found.folder.name}</code>" for trio in shown[1:])
    columns = [
        "network, images",
        "dense&nbsp;%",
        "ms",
        "low&#8209;rank&nbsp;%",
        "ms",
        "thin&nbsp;or&nbsp;3x3&nbsp;%",
        "ms",
        "<verdict",
    ]
    return markdown(columns, rows) + NOTE.format(**told)


def _top1(trio: Trio, kind: str) -> float:
    return trio.found.top1(trio.rows[kind])


def trios() -> list[Trio]:
    folders = [form.RESULTS / frontier.FOLDER / name for name in SHOWN]
    return [_trio(load_frontier(folder)) for folder in folders if (folder / RECORD).exists()]


def _trio(found: Frontier) -> Trio:
    """The design whose smallest gap is the largest, against the rival of that gap."""
    asked = [one for one in found.answers if one["question"] in (BETTER, SEARCHED) and one["verdict"] != EARLY]
    hardest: dict[str, dict[str, Any]] = {}
    for one in sorted(asked, key=lambda one: -one["gap"]):
        hardest[one["design"]] = one
    best = max(hardest.values(), key=lambda one: one["gap"])
    names = zip(KINDS, (DENSE_NAME, best["design"], best["control"]), strict=True)
    rows = {row.name: row for row in found.rows}
    return Trio(found, {kind: rows[name] for kind, name in names}, best)


BAND, NAME, FIRST, STEP = 58, 9, 27, 16
"""Pixels of a network in the picture, and down to its name, to its low-rank row and from there to its thin row."""
REPEATS = 0.07
"""The time of one network differs by up to this share between processes."""


def draw(path: Path) -> None:
    """Draw points ahead of the dense network, with intervals, beside the share of its time."""
    vl_convert = importlib.import_module("vl_convert")
    shown = trios()
    marks = [mark for place, trio in enumerate(shown) for mark in _marks(trio, BAND * place + FIRST)]
    panels = [_accuracies(marks, [trio.title for trio in shown]), _times(len(shown))]
    spec = {"data": {"values": marks}, "hconcat": panels, "spacing": 18, "config": theme()}
    path.write_text(for_dark_pages(vl_convert.vegalite_to_svg(spec, vl_version=VERSION)))


def _marks(trio: Trio, place: int) -> Iterator[Spec]:
    for kind in (LOW_RANK, THIN):
        points, low, high = trio.ahead(kind)
        accuracy = {"points": points, "low": low, "high": high}
        share = trio.share(kind)
        time = {"zero": 0, "share": share, "least": (1 - REPEATS) * share, "most": (1 + REPEATS) * share}
        yield {"kind": kind, "place": place + STEP * (kind == THIN), **accuracy, **time}


def _accuracies(marks: list[Spec], titles: list[str]) -> Spec:
    """The axis is cut, so it is marked with points above the dense network, which stands at zero."""
    domain = [min(-1.0, *(mark["low"] for mark in marks)) - 0.3, max(1.0, *(mark["high"] for mark in marks)) + 0.4]
    axis = {"title": ["points of top-1", "above the dense network"], "tickMinStep": 1, "tickCount": 5}
    axis["labelExpr"] = "datum.value ? format(datum.value, '+d') : 'dense'"
    panel = _panel({"scale": {"domain": domain, "nice": False}, "axis": axis}, ("low", "high"), 0, len(titles))
    names = [{"name": title, "place": BAND * place + NAME} for place, title in enumerate(titles)]
    text = {"type": "text", "align": "left", "fontSize": 13, "fontWeight": "bold"}
    where = {"x": {"value": 0}, "text": {"field": "name"}, "color": {"value": INK}}
    point = {"type": "point", "filled": True, "size": 90, "opacity": 1}
    panel["layer"] += [
        {"mark": point, "encoding": {"x": {"field": "points"}, "shape": _by_kind(["diamond", "square"])}},
        {"data": {"values": names}, "mark": text, "encoding": where},
    ]
    return {**panel, "width": 190}


def _times(networks: int) -> Spec:
    """Bars from zero to the share of the dense network's time."""
    axis = {"title": ["share of", "its time"], "values": [0, 0.5, 1]}
    axis["labelExpr"] = "datum.value < 1 ? format(datum.value, '.0%') : 'dense'"
    panel = _panel({"scale": {"domain": [0, 1.15], "nice": False}, "axis": axis}, ("least", "most"), 1, networks)
    bar = {"type": "rule", "strokeWidth": 9, "opacity": 0.45}
    panel["layer"] += [{"mark": bar, "encoding": {"x": {"field": "zero"}, "x2": {"field": "share"}}}]
    return {**panel, "width": 120}


def _panel(x: Spec, ends: tuple[str, str], dense: float, networks: int) -> Spec:
    """The intervals of all networks, and a dashed line at the dense one beside each pair."""
    height = BAND * networks
    scale = {"domain": [height, 0], "nice": False}
    y = {"field": "place", "type": "quantitative", "axis": None, "scale": scale}
    colour = _by_kind([COLOURS[kind][0] for kind in (LOW_RANK, THIN)])
    middles = [BAND * place + FIRST + STEP / 2 for place in range(networks)]
    lines = [{"top": middle - STEP, "foot": middle + STEP} for middle in middles]
    across = {"x": {"datum": dense}, "y": {"field": "top"}, "y2": {"field": "foot"}, "color": {"value": SOFT}}
    dashed = {"data": {"values": lines}, "mark": {"type": "rule", "strokeDash": [4, 3]}, "encoding": across}
    low, high = ends
    interval = {"type": "rule", "strokeWidth": 2}
    layers = [dashed, {"mark": interval, "encoding": {"x": {"field": low}, "x2": {"field": high}}}]
    encoding = {"x": {"type": "quantitative", **x}, "y": y, "color": colour}
    return {"height": height, "encoding": encoding, "layer": layers}


def _by_kind(values: list[str]) -> Spec:
    scale = {"domain": [LOW_RANK, THIN], "range": values}
    legend = {"labelFontSize": 13, "labelExpr": f"datum.label == '{THIN}' ? 'thin or 3x3' : datum.label"}
    return {"field": "kind", "type": "nominal", "title": None, "scale": scale, "legend": legend}


def for_dark_pages(svg: str) -> str:
    """The same picture with its colours exchanged where the page is dark."""
    exchanged = {INK: "#eceff3", SOFT: "#b3bcc7", GRID: "#323a44", "white": "#0d1117"} | dict(COLOURS.values())
    rules = "".join(
        f'[{what}="{light}"]{{{what}:{dark}}}' for light, dark in exchanged.items() for what in ("fill", "stroke")
    )
    return re.sub("(<svg[^>]*>)", rf"\1<style>@media (prefers-color-scheme:dark){{{rules}}}</style>", svg, count=1)


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "headline.svg")
