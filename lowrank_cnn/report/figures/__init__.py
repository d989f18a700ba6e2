"""The figures, by name. A new one is a function of its name and options, and a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.report.charts.vega import Spec, save_charts
from lowrank_cnn.report.figures.charts import (
    curves_figure,
    details_figure,
    shapes_figure,
    timings_figure,
    trade_figure,
)
from lowrank_cnn.report.figures.connections import draw_connections
from lowrank_cnn.report.figures.filters import draw_filters
from lowrank_cnn.report.figures.options import FigureOptions
from lowrank_cnn.report.figures.receptive import draw_receptive_field
from lowrank_cnn.report.figures.spectra import draw_spectra
from lowrank_cnn.report.figures.style import check_format, save, style
from lowrank_cnn.system.errors import LowRankError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureKind:
    """A figure: its subject, the options it takes, and the function that draws it."""

    shows: str
    takes: str = ""
    chart: Callable[[str, FigureOptions], list[Spec]] | None = None
    draw: Callable[[str, FigureOptions], Figure] | None = None


_NETWORK = "model, pretrained, checkpoint"
FIGURES = {
    "vgg": FigureKind("VGG-11 on ILSVRC, error against MACs", "runs", trade_figure),
    "places": FigureKind("VGG-11 on Places, error against MACs", "runs", trade_figure),
    "googlenet": FigureKind("GoogLeNet on ILSVRC, error against MACs", "runs", trade_figure),
    "nin": FigureKind("Network-in-Network on CIFAR-10, error against MACs", "runs", trade_figure),
    "big-picture-macs": FigureKind(
        "single networks on ILSVRC, error against MACs of all crops", "runs", trade_figure
    ),
    "big-picture-params": FigureKind("single networks on ILSVRC, error against parameters", "runs", trade_figure),
    "timings": FigureKind("MACs beside time, layer by layer", "runs", timings_figure),
    "curves": FigureKind("accuracy by epoch, every network of a recipe", "runs", curves_figure),
    "classes": FigureKind("accuracy by class on the test images", "runs", details_figure),
    "confusion": FigureKind("which classes are taken for which, as a matrix", "runs", details_figure),
    "pairs": FigureKind("the classes that are confused most", "runs", details_figure),
    "calibration": FigureKind("confidence against the share of right answers", "runs", details_figure),
    "shapes": FigureKind("the shapes of a network's filters, layer by layer", _NETWORK, shapes_figure),
    "filters": FigureKind("the filters of a first layer and their combinations", _NETWORK, draw=draw_filters),
    "connections": FigureKind("which input pixel reaches which output pixel", draw=draw_connections),
    "receptive-field": FigureKind("what dense and low-rank twins see", _NETWORK, draw=draw_receptive_field),
    "spectra": FigureKind("singular values of dense filters", _NETWORK, draw=draw_spectra),
}


def draw_figure(name: str, out: str | Path, options: FigureOptions | None = None) -> Path:
    """Draw a figure into a file whose name says the format: svg, pdf or png.

    Example:
        >>> draw_figure("vgg", "vgg.svg")  # doctest: +SKIP
    """
    if name not in FIGURES:
        raise LowRankError(f"there is no figure {name!r}; {nearest(name, FIGURES)}")
    kind, options, out = FIGURES[name], options or FigureOptions(), Path(out)
    if options.records is not None and "runs" not in kind.takes:
        raise LowRankError(f"the figure {name} takes no runs.")
    if (options.model or options.checkpoint or options.pretrained) and "model" not in kind.takes:
        raise LowRankError(f"the figure {name} takes no model, checkpoint or weights.")
    check_format(out)
    if kind.chart is not None:
        return save_charts(kind.chart(name, options), out)
    assert kind.draw is not None
    with style():
        return save(kind.draw(name, options), out)


__all__ = ["FIGURES", "FigureKind", "FigureOptions", "draw_figure"]
