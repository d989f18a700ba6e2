"""The picture of a frontier: accuracy against time, multiply-accumulates and parameters, dense beside low-rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.frontier.record import Frontier, Row
from lowrank_cnn.frontier.statistics import seed_interval
from lowrank_cnn.system.errors import LowRankError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DENSE, LOW_RANK, INK, GRID = "#d55e00", "#0072b2", "#4a525c", "#dfe3e8"
"""After Okabe and Ito: readers with any of the common colour deficiencies tell them apart; so do the marks."""
MARKS = {True: (DENSE, "s", "dense"), False: (LOW_RANK, "o", "low-rank")}

Cost = Callable[[Row], float | None]
COSTS: dict[str, Cost] = {
    "ms for a batch": lambda row: row.timing.ms if row.timing else None,
    "multiply-accumulates": lambda row: row.macs,
    "parameters": lambda row: row.params,
}


def draw_frontier(found: Frontier, out: str | Path) -> Path:
    """Draw a record into a file whose name says the format: svg, pdf or png."""
    matplotlib = require("matplotlib", extra="plots", purpose="drawing a frontier")
    figures = require("matplotlib.figure", extra="plots", purpose="drawing a frontier")
    trained = [row for row in found.rows if row.runs]
    if not trained:
        raise LowRankError(f"nothing in {found.folder} is trained yet: there is nothing to draw.")
    costs = {label: cost for label, cost in COSTS.items() if all(cost(row) for row in trained)}
    style = {"svg.fonttype": "none", "svg.hashsalt": "lowrank-cnn", "font.size": 9, "axes.axisbelow": True}
    with matplotlib.rc_context(style):
        figure: Figure = figures.Figure(figsize=(3.6 * len(costs), 3.4), layout="constrained")
        for place, (label, cost) in enumerate(costs.items(), start=1):
            _panel(figure.add_subplot(1, len(costs), place), found, trained, label, cost)
        figure.axes[0].set_ylabel("top-1 on the test images, %")
        figure.axes[0].legend(loc="lower right", frameon=False)
        runs = sorted({len(row.runs) for row in trained})
        count = f"{runs[0]} to {runs[-1]}" if len(runs) > 1 else str(runs[0])
        title = f"{found.about['family']} on {found.about['data']['name']}: mean of {count} runs, 95% over seeds"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        out = Path(out)
        dateless = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(out.suffix)
        figure.savefig(out, metadata=dateless, dpi=200)
    return out


def _panel(axes: Axes, found: Frontier, rows: list[Row], label: str, cost: Cost) -> None:
    points = []
    for place, row in enumerate(sorted(rows, key=lambda row: (row.dense, cost(row) or 0))):
        colour, mark, name = MARKS[row.dense]
        mean, low, high = seed_interval([100 * run.correct / found.images for run in row.runs])
        x = float(cost(row) or 0)
        points.append((x, mean))
        reach = [[mean - low], [high - mean]]
        drawn = {"fmt": mark, "color": colour, "capsize": 2, "markersize": 5, "markeredgecolor": "white"}
        known = axes.get_legend_handles_labels()[1]
        axes.errorbar([x], [mean], yerr=reach, label=None if name in known else name, **drawn)
        # Neighbours by turns above and below, so that their names do not meet.
        offset = (4, 4) if place % 2 else (4, -9)
        axes.annotate(row.name, (x, mean), xytext=offset, textcoords="offset points", fontsize=6, color=INK)
    front = _stairs(points)
    axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, zorder=0, label="front")
    axes.set_xlabel(label)
    axes.margins(x=0.14, y=0.1)
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if label != "ms for a batch":
        ticker = require("matplotlib.ticker", extra="plots", purpose="drawing a frontier")
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))


def front_of(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, gain) that no other beats in both, by rising cost."""
    front: list[tuple[float, float]] = []
    for cost, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((cost, gain))
    return front


def _stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the front."""
    front = front_of(points)
    corners = front[:1]
    for cost, gain in front[1:]:
        corners += [(cost, corners[-1][1]), (cost, gain)]
    return corners
