"""Shared by all charts: colours, axes, the placing of labels, and writing a chart to a file.

A chart is a Vega-Lite specification with its data. The page hands it to Vega in the browser; figures go through
vl-convert, which runs the same Vega without a browser. Vega-Lite cannot keep labels from overlapping, Vega can:
`with_labels` adds that to the compiled chart, as the page's script does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowrank_cnn.choose.frontier import DENSE_NAME as DENSE
from lowrank_cnn.choose.frontier import LOW_RANK, THIN
from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import write_atomically

Spec = dict[str, Any]

INK, SOFT, GRID = "#16191d", "#4a525c", "#dfe3e8"
VERSION = "6.4"
HEAT, DARK_HEAT = ("#f4f7fa", "#9ecae1", "#08519c"), ("#1c232b", "#2f6f9f", "#c6e4ff")
"""Shares from none to all, on white and on dark pages."""


def asset(name: str) -> str:
    """A file of the folder `assets` as text."""
    return (files("lowrank_cnn.report") / "assets" / name).read_text(encoding="utf-8")


def template(name: str) -> Spec:
    """A specification of the folder `assets/charts`; values in braces are placeholders for `filled`."""
    return json.loads(asset(f"charts/{name}.json"))


def filled(value: Any, parts: dict[str, Any]) -> Any:
    if isinstance(value, str):
        return parts.get(value, value)
    if isinstance(value, dict):
        return {key: filled(inner, parts) for key, inner in value.items()}
    return [filled(inner, parts) for inner in value] if isinstance(value, list) else value


_OFFSETS = (6, 12, 20, 30, 42, 56)
_ANCHORS = ("top-right", "bottom-right", "top-left", "bottom-left", "right", "left", "top", "bottom")
LABELS: Spec = filled(
    template("labels"),
    {
        "{anchors}": [anchor for _ in _OFFSETS for anchor in _ANCHORS],
        "{offsets}": [offset for offset in _OFFSETS for _ in _ANCHORS],
    },
)
"""How labels are placed: `transform` is Vega's, which finds the first free place around a point, from near to far.

`layer` places the labels, and invisible ones on points, so that no label is placed there. Vega can avoid marks by
itself, but needs a browser for it. A label goes to the upper right first, beside the steps of a Pareto front. An
invisible label is shifted back by as much, and so stands on the mark. `leaders` are lines from points to labels
far from them. `halo` writes labels on an edge in the colour of the page: no line strikes through them.
"""
MOST_LABELS = 30
"""Charts of more points label none: they would all be lost in the crowd."""
BLOCK = "\N{BLACK CIRCLE}"
LOST_LABEL = re.compile(rf'labels_marks"[^>]*>(?:<text[^>]*>[^<]*</text>)*?<text[^>]* opacity="0"[^>]*>[^{BLOCK}]')
"""In an SVG, a label without a place."""


def label_rows(points: Sequence[Spec]) -> list[Spec]:
    """The data of the labels: one for each point, and an invisible one on it, which keeps others away."""
    if len(points) > MOST_LABELS:
        return []
    places = [{"label": point["label"], "x": point["x"], "y": point["y"]} for point in points]
    blocks = [{**place, "label": BLOCK, "block": 1} for place in places]
    return [*blocks, *({**place, "block": 0} for place in places)]


def theme(*, dark: bool = False) -> Spec:
    """Vega's config: type, grid and colours that fit the page."""
    ink, soft, grid = ("#eceff3", "#b3bcc7", "#323a44") if dark else (INK, SOFT, GRID)
    text = {"labelColor": soft, "titleColor": soft, "labelFontSize": 12, "titleFontSize": 12}
    lines = {"gridColor": grid, "domainColor": soft, "tickColor": soft}
    axis = {**text, **lines, "titleFontWeight": "normal", "titlePadding": 9}
    return {
        "background": None if dark else "white",
        "font": "system-ui, 'DejaVu Sans', Arial, sans-serif",
        "view": {"stroke": None},
        "axis": axis,
        "legend": {**text, "orient": "bottom", "columns": 3, "labelLimit": 320, "symbolOpacity": 1},
        "title": {"color": ink, "fontSize": 14, "anchor": "start"},
        "range": {"heatmap": list(DARK_HEAT if dark else HEAT)},
        "text": {"color": ink},
        "style": {
            "label": {"fill": ink},
            "leader": {"stroke": soft},
            "halo": {"stroke": "#181d23" if dark else "white", "strokeWidth": 4},
        },
    }


def with_labels(compiled: Spec) -> Spec:
    """A compiled chart whose labels keep clear of marks and of each other; far ones get a line to their point."""
    marks: list[Spec] = []
    for mark in compiled.get("marks", []):
        if mark.get("type") == "group":
            marks.append(with_labels(mark))
        elif mark.get("name") == "labels_marks":
            marks += [{**mark, "transform": [LABELS["transform"]]}, LABELS["leaders"], *LABELS["halo"]]
        else:
            marks.append(mark)
    return {**compiled, "marks": marks}


def save_charts(specs: Sequence[Spec], out: Path) -> Path:
    """Write charts, one below the other, in the format of the file's name: svg, pdf or png."""
    kind = check_format(out)
    drawn = _stacked([_drawn(spec, place) for place, spec in enumerate(specs)])
    if kind == "pdf":
        payload = _vl_convert().svg_to_pdf(drawn)
    elif kind == "png":
        payload = _vl_convert().svg_to_png(drawn, scale=2)
    else:
        payload = drawn.encode()
    write_atomically(out, payload)
    return out


def _drawn(spec: Spec, place: int) -> str:
    """A chart as SVG. Ids are renumbered, since Vega counts them over all charts of the process.

    If a label finds no place, none is drawn.
    """
    compiled = _vl_convert().vegalite_to_vega(json.dumps({**spec, "config": theme()}), vl_version=VERSION)
    picture = _vl_convert().vega_to_svg(with_labels(compiled))
    if LOST_LABEL.search(picture):
        return _drawn({**spec, "datasets": {**spec["datasets"], "labels": []}}, place)
    for i, name in enumerate(dict.fromkeys(re.findall(r'id="(\w+)"', picture))):
        picture = re.sub(rf'(id="|url\(#){name}\b', rf"\g<1>chart{place}-{i}", picture)
    return picture


def _vl_convert() -> Any:
    return require("vl_convert", extra="plots", purpose="drawing a chart")


def _stacked(pictures: Sequence[str]) -> str:
    if len(pictures) == 1:
        return pictures[0]
    sizes = [[float(size) for size in re.findall(r' (?:width|height)="([\d.]+)"', p)[:2]] for p in pictures]
    tops = [sum(height for _, height in sizes[:i]) for i in range(len(pictures))]
    inner = [p.replace("<svg ", f'<svg y="{top}" ', 1) for p, top in zip(pictures, tops, strict=True)]
    width, height = max(width for width, _ in sizes), sum(height for _, height in sizes)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(inner)}</svg>'


Look = dict[str, str | list[int]]
"""How a network is drawn: its colour on light and on dark pages, and its dash."""

LEARNED = "learned shapes"
COLOURS = {
    DENSE: ("#d55e00", "#ff9a52"),
    THIN: ("#7f00ff", "#9d5cff"),
    LOW_RANK: ("#0072b2", "#56b4e9"),
    LEARNED: ("#009e73", "#35d3a3"),
}
"""Of each kind of network trained here, on light and on dark pages."""
LIKE_DENSE = ("#a67c00", "#e8d800")
"""Too close to the dense networks' colour for colour-blind readers."""
OTHERS = (COLOURS[LOW_RANK], LIKE_DENSE, COLOURS[LEARNED], ("#222222", "#f5f5f5"), COLOURS[THIN])
OTHERS += (("#8b2500", "#9c6b6b"),)
"""Of networks of one kind; distinct to readers with any of the common colour deficiencies, as are the kinds."""
DASHES = ([1, 0], [7, 4], [2, 3], [9, 3, 2, 3], [12, 4], [1, 5])
"""Networks of the same colour differ in their dash."""


def kind_colours(kind: str) -> dict[str, str]:
    return dict(zip(("light", "dark"), COLOURS[kind], strict=True))


def network_looks(networks: Mapping[str, str]) -> dict[str, Look]:
    """A look of its own for each network of a chart, from its name and kind: the kind's colour, and a dash.

    Low-rank networks, which may be many, first take the colours that no other kind of the chart has.

    >>> network_looks({"nin": "dense", "nin-c3": "low-rank"})["nin"]
    {'light': '#d55e00', 'dark': '#ff9a52', 'dash': [1, 0]}
    """
    found: dict[str, Look] = {}
    kinds = dict.fromkeys(networks.values())
    for kind in kinds:
        hues = (COLOURS[kind],)
        if kind != DENSE and len(kinds) == 1:
            hues = OTHERS
        elif kind == LOW_RANK:
            taken = [COLOURS[other] for other in kinds if other != kind]
            hues = tuple(hue for hue in OTHERS if hue not in (*taken, LIKE_DENSE))
        for place, name in enumerate(name for name, one in networks.items() if one == kind):
            light, dark = hues[place % len(hues)]
            found[name] = {"light": light, "dark": dark, "dash": DASHES[place // len(hues) % len(DASHES)]}
    return {name: found[name] for name in networks}


FORMATS = ("svg", "pdf", "png")


def check_format(out: Path) -> str:
    """The format that a file's name asks for; refused where figures are not written in it."""
    kind = "svg" if str(out) == "-" else out.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise LowRankError(f"a figure is written as {', '.join(FORMATS)}: {out} ends in none of them.")
    return kind
