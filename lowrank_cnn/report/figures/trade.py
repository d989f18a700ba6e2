"""Error against cost: the plots of the paper's results, with networks trained here where records are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.entries import comparable, gather
from lowrank_cnn.report.entry import Entry
from lowrank_cnn.report.figures.options import Options
from lowrank_cnn.report.labels import place_labels
from lowrank_cnn.report.numbers import as_shown
from lowrank_cnn.report.pareto import pareto_front
from lowrank_cnn.report.style import COLUMN, GREEN, LEGEND, MARKS, SOFT, new_figure, settle
from lowrank_cnn.system.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINES = ("vgg11", "vgg11-gmp", "vgg11-gmp-sf", "googlenet", "nin", "nin-c3", "alexnet")
COSTS = {"macs": "Multiply-accumulates per image", "params": "Parameters"}
OURS, PUBLISHED = "ours", "published"
FRONTS = {PUBLISHED: SOFT, OURS: GREEN}
"""The fronts are drawn apart: what was trained by other recipes is no step on the way to ours."""
ERRORS = {"top1": "Top-1 error", "top5": "Top-5 error"}


@dataclass(frozen=True)
class Plot:
    """A figure of the paper: which tables it shows, which error against which cost."""

    title: str
    tables: tuple[str, ...]
    family: tuple[str, ...]
    error: str = "top5"
    cost: str = "macs"
    log: bool = False
    height: float = 3.3


_ILSVRC = ("vgg-ilsvrc", "googlenet-ilsvrc", "big-picture", "big-picture-augmented")
PLOTS = {
    "vgg": Plot("VGG-11 on ILSVRC", ("vgg-ilsvrc",), ("vgg11",)),
    "places": Plot("VGG-11 on Places", ("vgg-places",), ("vgg11",)),
    "googlenet": Plot("GoogLeNet on ILSVRC", ("googlenet-ilsvrc",), ("googlenet",)),
    "nin": Plot("Network-in-Network on CIFAR-10", ("nin-cifar10",), ("nin",), error="top1"),
    "big-picture-macs": Plot(
        "Single networks on ILSVRC: compute", _ILSVRC, ("vgg11", "googlenet"), log=True, height=5.2
    ),
    "big-picture-params": Plot(
        "Single networks on ILSVRC: size", _ILSVRC, ("vgg11", "googlenet"), cost="params", log=True, height=5.2
    ),
}


@dataclass(frozen=True)
class Mark:
    """A network in a plot."""

    name: str
    kind: str
    cost: float
    error: float
    spread: float | None = None
    """The standard deviation of the error over the seeds."""

    @property
    def source(self) -> str:
        return OURS if self.kind == OURS else PUBLISHED

    @property
    def reach(self) -> list[tuple[float, float]]:
        """The ends of its error bar."""
        spread = self.spread or 0.0
        return [(self.cost, self.error - spread), (self.cost, self.error + spread)]


def draw_trade(name: str, options: Options) -> Figure:
    """The published points, ours on the same data among them, and a panel for each other data set of ours."""
    plot = PLOTS[name]
    published = [row for row in rows() if row.table in plot.tables]
    home = data_label(published[0].dataset)
    ours = _ours(plot, comparable(gather(options.records))) if options.records else {}
    panels = {home: [*_published(plot, published), *ours.pop(home, [])]} | ours
    figure = new_figure(COLUMN, plot.height * len(panels))
    for place, (data, marks) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(len(panels), 1, place)
        title = plot.title if data == home else f"The same networks trained here on {data}"
        _panel(axes, plot, title, marks)
    settle(figure)
    for axes, marks in zip(figure.axes, panels.values(), strict=True):
        lines = [*_fronts(marks).values(), *(mark.reach for mark in marks)]
        place_labels(axes, _points(marks), [mark.name for mark in marks], lines=lines)
    return figure


def _published(plot: Plot, published: Sequence[Published]) -> list[Mark]:
    marks = []
    for row in published:
        accuracy = getattr(row, plot.error)
        kind = "baseline" if row.network in BASELINES else "low-rank"
        kind = "augmented" if row.table == "big-picture-augmented" else kind
        if accuracy is not None:
            marks.append(Mark(row.network, kind, getattr(row, plot.cost), 1 - accuracy))
    return marks


def _ours(plot: Plot, entries: Sequence[Entry]) -> dict[str, list[Mark]]:
    """Our networks of the plot's family, by data set."""
    found: dict[str, list[Mark]] = {}
    recipes: dict[str, set[str]] = {}
    for entry in entries:
        recipes.setdefault(entry.data, set()).add(entry.recipe)
    for entry in entries:
        accuracy, cost = getattr(entry, plot.error), getattr(entry, plot.cost)
        if entry.built.name.startswith(plot.family) and accuracy is not None and cost:
            spread = entry.top1_spread if plot.error == "top1" else None
            name = f"{entry.label} ({entry.recipe})" if len(recipes[entry.data]) > 1 else entry.label
            mark = Mark(name, OURS, cost, 1 - accuracy, spread)
            found.setdefault(data_label(entry.data), []).append(mark)
    return found


def _panel(axes: Axes, plot: Plot, title: str, marks: Sequence[Mark]) -> None:
    axes.set_title(title)
    axes.set_xlabel(COSTS[plot.cost] + (", logarithmic" if plot.log else ""))
    axes.set_ylabel(ERRORS[plot.error])
    for kind, look in MARKS.items():
        of_kind = [mark for mark in marks if mark.kind == kind]
        if of_kind:
            costs, errors = [mark.cost for mark in of_kind], [mark.error for mark in of_kind]
            size = 150 if kind == "ours" else 34 if kind == "augmented" else 46
            axes.scatter(costs, errors, s=size, linewidth=1.2, zorder=3, label=LEGEND[kind], **look)
    for mark in marks:
        if mark.spread:
            axes.errorbar(mark.cost, mark.error, mark.spread, color=GREEN, linewidth=1.2, capsize=2.5, zorder=2)
    fronts = _fronts(marks)
    for source, stairs in fronts.items():
        line = {"color": FRONTS[source], "linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 2}
        name = "Pareto front" if len(fronts) == 1 else f"Pareto front, {LEGEND.get(source, source)}"
        axes.plot(*zip(*stairs, strict=True), label=name, **line)
    _scales(axes, plot, [end for mark in marks for end in mark.reach])
    below = -0.17 if plot.height < 4 else -0.09
    names = axes.get_legend_handles_labels()[1]
    wide = len(names) > 4 or LEGEND["augmented"] in names
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, below), ncols=3 if wide else 4)


def _scales(axes: Axes, plot: Plot, points: Sequence[tuple[float, float]]) -> None:
    """Room at the sides for the labels, and ticks that say 2G and 12%."""
    ticker = require("matplotlib.ticker", extra="plots", purpose="drawing a figure")
    costs, errors = [cost for cost, _ in points], [error for _, error in points]
    if plot.log:
        axes.set_xscale("log")
        axes.set_xlim(min(costs) / 1.7, max(costs) * 2.4)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        span = (max(costs) - min(costs)) or max(costs)
        axes.set_xlim(max(0, min(costs) - 0.15 * span), max(costs) + 0.22 * span)
    room = 0.14 * ((max(errors) - min(errors)) or max(errors) or 1)
    axes.set_ylim(max(0, min(errors) - room), max(errors) + room)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.{_decimals(axes)}f}%")


def _decimals(axes: Axes) -> int:
    """Digits after the point that the ticks of the errors need: all of them are written with as many."""
    written = [f"{100 * tick:.4f}".rstrip("0") for tick in axes.yaxis.get_majorticklocs()]
    return max(len(text.partition(".")[2]) for text in written)


def _points(marks: Sequence[Mark]) -> list[tuple[float, float]]:
    return [(mark.cost, mark.error) for mark in marks]


def _fronts(marks: Sequence[Mark]) -> dict[str, list[tuple[float, float]]]:
    """The Pareto front of the published points and that of ours, where there is more to it than one point."""
    found = {source: _stairs(_points([mark for mark in marks if mark.source == source])) for source in FRONTS}
    return {source: stairs for source, stairs in found.items() if len(stairs) > 1}


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the Pareto front: the least error at each cost."""
    front = sorted(points[i] for i in pareto_front([(as_shown(cost), -error) for cost, error in points]))
    stairs = front[:1]
    for cost, error in front[1:]:
        stairs += [(cost, stairs[-1][1]), (cost, error)]
    return stairs
