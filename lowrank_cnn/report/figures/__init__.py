"""The figures, by name. A new one is a function that takes its name and options, and a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.report.figures.connections import draw_connections
from lowrank_cnn.report.figures.curves import draw_curves
from lowrank_cnn.report.figures.filters import draw_filters
from lowrank_cnn.report.figures.options import Options
from lowrank_cnn.report.figures.receptive import draw_receptive_field
from lowrank_cnn.report.figures.spectra import draw_spectra
from lowrank_cnn.report.figures.timings import draw_timings
from lowrank_cnn.report.figures.trade import draw_trade
from lowrank_cnn.report.style import save, style
from lowrank_cnn.system.errors import LowRankError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """A figure: how it is drawn, what it shows, and what it can be given."""

    draw: Callable[[str, Options], Figure]
    shows: str
    takes: str = ""


NETWORK = "model, pretrained, checkpoint"
FIGURES = {
    "vgg": Kind(draw_trade, "VGG-11 on ILSVRC, error against MACs", "runs"),
    "places": Kind(draw_trade, "VGG-11 on Places, error against MACs", "runs"),
    "googlenet": Kind(draw_trade, "GoogLeNet on ILSVRC, error against MACs", "runs"),
    "nin": Kind(draw_trade, "Network-in-Network on CIFAR-10, error against MACs", "runs"),
    "big-picture-macs": Kind(draw_trade, "single networks on ILSVRC, error against MACs", "runs"),
    "big-picture-params": Kind(draw_trade, "single networks on ILSVRC, error against parameters", "runs"),
    "timings": Kind(draw_timings, "MACs beside time, layer by layer", "runs"),
    "curves": Kind(draw_curves, "accuracy by epoch, every run of a recipe", "runs"),
    "filters": Kind(draw_filters, "the filters of a first layer and their combinations", NETWORK),
    "connections": Kind(draw_connections, "which input pixel reaches which output pixel"),
    "receptive-field": Kind(draw_receptive_field, "what dense and low-rank twins see", NETWORK),
    "spectra": Kind(draw_spectra, "singular values of dense filters", NETWORK),
}


def draw_figure(name: str, out: str | Path, options: Options | None = None) -> Path:
    """Draw a figure into a file whose name says the format: svg, pdf or png."""
    if name not in FIGURES:
        raise LowRankError(f"there is no figure {name!r}; {nearest(name, FIGURES)}")
    kind, options = FIGURES[name], options or Options()
    if options.records is not None and "runs" not in kind.takes:
        raise LowRankError(f"the figure {name} takes no runs.")
    if (options.model or options.checkpoint or options.pretrained) and "model" not in kind.takes:
        raise LowRankError(f"the figure {name} takes no model, checkpoint or weights.")
    with style():
        return save(kind.draw(name, options), out)


__all__ = ["FIGURES", "Options", "draw_figure"]
