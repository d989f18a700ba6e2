"""MACs beside time, layer by layer: the paper's figure, and the same from timings made here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowrank_cnn.report.charts import layer_charts
from lowrank_cnn.report.figures.options import Options
from lowrank_cnn.report.numbers import percent_tick
from lowrank_cnn.report.style import BLUE, COLUMN, GREEN, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS: tuple[dict[str, Any], ...] = (
    {"color": BLUE},
    {"color": ORANGE, "hatch": "////"},
    {"color": GREEN, "hatch": "...."},
)
"""Hatched as well as coloured, for print without colour."""


def draw_timings(_name: str, options: Options) -> Figure:
    """A panel per network: each layer's share of all MACs, and of the time on each device."""
    panels = layer_charts(options.records.timings if options.records else [])
    figure = new_figure(COLUMN, 2.9 * len(panels))
    for place, chart in enumerate(reversed(panels), start=1):
        _panel(figure.add_subplot(len(panels), 1, place), chart)
    return figure


def _panel(axes: Axes, chart: dict[str, Any]) -> None:
    width = 0.8 / len(chart["series"])
    middle = (len(chart["series"]) - 1) / 2
    for place, (series, look) in enumerate(zip(chart["series"], LOOKS, strict=False)):
        spots = [index + (place - middle) * width for index in range(len(chart["layers"]))]
        r = chart["correlations"].get(series["name"].removesuffix(" time"))
        label = series["name"] + ("" if r is None else f" (r = {r:.2f})")
        axes.bar(spots, series["shares"], width, label=label, edgecolor="white", linewidth=0.4, **look)
    axes.set_title(chart["title"])
    axes.set_xlabel(chart["note"], fontsize=8)
    axes.set_ylim(0, 1.2 * max(share for series in chart["series"] for share in series["shares"]))
    axes.set_ylabel("Share of the total")
    axes.yaxis.set_major_formatter(percent_tick)
    axes.set_xticks(range(len(chart["layers"])), chart["layers"], rotation=35, ha="right", rotation_mode="anchor")
    axes.grid(False, axis="x")
    axes.set_xlim(-0.6, len(chart["layers"]) - 0.4)
    axes.legend(ncols=len(chart["series"]), loc="upper right")
