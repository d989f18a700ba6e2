"""Accuracy by epoch: how networks of one recipe trained, every run of them, and where they ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.entries import gather
from lowrank_cnn.report.entry import Entry
from lowrank_cnn.report.figures.options import Options
from lowrank_cnn.report.records import Run
from lowrank_cnn.report.style import COLUMN, CYCLE, SOFT, new_figure, settle
from lowrank_cnn.system.errors import LowRankError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT, ROW = 2.7, 0.19
"""Inches of a panel, and of a row of its legend."""
LETTERS = 40
"""Of a label that leaves room for a second one beside it."""
EARLY = 0.1
"""The share of a run whose accuracies, all but chance, do not stretch the scale."""
BESIDE = 0.012
"""How far the marks of networks stand apart, of the longest run: equal accuracies would hide each other."""
DASHES = (0, (3, 2))
Point = tuple[int, float]


def draw_curves(name: str, options: Options) -> Figure:
    """A panel for each data set and recipe: training images by lines, watched ones dashed, the test by a mark."""
    if options.records is None:
        raise LowRankError(f"the figure {name} is of runs: give their folder (--runs runs).")
    entries = [entry for entry in gather(options.records) if any(map(_trained, entry.runs))]
    if not entries:
        raise LowRankError("no run among these has an epoch to show.")
    panels = [list(panel) for _, panel in groupby(entries, key=lambda entry: (entry.data, entry.recipe))]
    heights = [HEIGHT + ROW * (len(panel) + 3) / _columns(panel) for panel in panels]
    figure = new_figure(COLUMN, sum(heights))
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for place, panel in enumerate(panels):
        _panel(figure.add_subplot(grid[place]), panel)
    settle(figure)
    return figure


def _panel(axes: Axes, entries: Sequence[Entry]) -> None:
    axes.set_title(f"{entries[0].recipe} on {data_label(entries[0].data)}")
    axes.set_xlabel("Epochs")
    axes.set_ylabel("Accuracy")
    longest = max(epoch for entry in entries for run in entry.runs for epoch, _ in _trained(run))
    for place, entry in enumerate(entries):
        _entry(axes, entry, CYCLE[place % len(CYCLE)], BESIDE * place * longest)
    late = [value for entry in entries for run in entry.runs for value in _late(run)]
    late += [entry.top1 for entry in entries if entry.top1 is not None]
    axes.set_ylim(max(0.0, min(late) - 0.02), min(1.005, max(late) + 0.02))
    axes.set_xlim(0, longest * (1.03 + BESIDE * len(entries)))
    ticker = require("matplotlib.ticker", extra="plots", purpose="drawing a figure")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    axes.plot([], [], color=SOFT, linewidth=0.9, label="training images, every run")
    if any(len(_watched(run)) > 1 for entry in entries for run in entry.runs):
        axes.plot([], [], color=SOFT, linewidth=0.9, linestyle=DASHES, label="watched images")
    if any(entry.finished for entry in entries):
        axes.plot([], [], "o", color=SOFT, markersize=4.5, label="test images, at the end")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=_columns(entries))


def _columns(entries: Sequence[Entry]) -> int:
    """How many labels stand beside each other."""
    return 2 if max(len(entry.label) for entry in entries) < LETTERS else 1


def _entry(axes: Axes, entry: Entry, color: str, shift: float) -> None:
    for run in entry.runs:
        alone = "x" if len(_trained(run)) == 1 else None
        axes.plot(*_apart(_trained(run)), color=color, linewidth=0.9, alpha=0.75, marker=alone, markersize=5)
        if len(watched := _watched(run)) > 1:
            axes.plot(*_apart(watched), color=color, linewidth=0.9, linestyle=DASHES)
    if entry.top1 is None or not entry.finished:
        axes.plot([], [], color=color, label=f"{entry.label}: unfinished")
        return
    end = max(epoch for run in entry.runs for epoch, _ in _trained(run))
    spread = entry.top1_spread
    label = f"{entry.label}: {100 * entry.top1:.2f}%"
    axes.errorbar(
        end + shift, entry.top1, spread, fmt="o", color=color, markersize=4.5, capsize=2.5, zorder=3, label=label
    )


def _trained(run: Run) -> list[Point]:
    return [(epoch.epoch, epoch.trained) for epoch in run.history if epoch.trained is not None]


def _watched(run: Run) -> list[Point]:
    return [(epoch.epoch, epoch.accuracy) for epoch in run.history if epoch.accuracy is not None]


def _late(run: Run) -> list[float]:
    """The accuracies that the scale must hold."""
    points = [*_trained(run), *_watched(run)]
    begin = EARLY * max((epoch for epoch, _ in points), default=0)
    return [share for epoch, share in points if epoch >= begin]


def _apart(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [epoch for epoch, _ in points], [share for _, share in points]
