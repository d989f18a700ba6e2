"""The figures, by name. A new one is a function of its name and options, and a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.paper.published import rows
from lowrank_cnn.report.charts import (
    DETAILS,
    NEEDED,
    curves_spec,
    details_charts,
    layer_charts,
    layers_spec,
    shapes_spec,
    training_curves,
)
from lowrank_cnn.report.network_figures import (
    FigureOptions,
    connections_figure,
    filters_figure,
    receptive_field_figure,
    spectra_figure,
)
from lowrank_cnn.report.records import NetworkResult, data_label
from lowrank_cnn.report.results import comparable, gather
from lowrank_cnn.report.style import Spec, check_format, save_charts
from lowrank_cnn.report.trade import TradePoint, our_point, published_point, trade_chart, trade_spec


@dataclass(frozen=True)
class TradeFigure:
    """A figure of the paper: which tables it shows, which error against which cost."""

    title: str
    tables: tuple[str, ...]
    family: tuple[str, ...]
    error: str = "top5"
    cost: str = "macs"
    size: tuple[int, int] = (620, 340)


_ILSVRC = ("vgg-ilsvrc", "googlenet-ilsvrc", "big-picture", "big-picture-augmented")
_BOTH = ("vgg11", "googlenet")
_LARGE = (900, 560)
"""Room for the labels of twenty networks."""
TRADE_FIGURES = {
    "vgg": TradeFigure("VGG-11 on ILSVRC", ("vgg-ilsvrc",), ("vgg11",)),
    "places": TradeFigure("VGG-11 on Places", ("vgg-places",), ("vgg11",)),
    "googlenet": TradeFigure("GoogLeNet on ILSVRC", ("googlenet-ilsvrc",), ("googlenet",)),
    "nin": TradeFigure("Network-in-Network on CIFAR-10", ("nin-cifar10",), ("nin",), error="top1"),
    "big-picture-macs": TradeFigure("Networks on ILSVRC: compute of all crops", _ILSVRC, _BOTH, size=_LARGE),
    "big-picture-params": TradeFigure("Networks on ILSVRC: size", _ILSVRC, _BOTH, cost="params", size=_LARGE),
}


def trade_figure(name: str, options: FigureOptions) -> list[Spec]:
    """The published points with ours on the same data, then a chart for each other data set of ours."""
    figure = TRADE_FIGURES[name]
    published = [published_point(row) for row in rows() if row.table in figure.tables]
    home = published[0].data
    ours = _ours(figure, options)
    charts = {home: [*published, *ours.pop(home, [])]} | ours
    specs = []
    for data, points in charts.items():
        shown = [p for p in points if figure.error in p.values and figure.cost in p.values]
        title = figure.title if data == home else f"The same networks trained here on {data}"
        spec = trade_spec(trade_chart(shown, figure.cost, figure.error, error=True))
        specs.append({**spec, "title": title, "width": figure.size[0], "height": figure.size[1]})
    return specs


def _ours(figure: TradeFigure, options: FigureOptions) -> dict[str, list[TradePoint]]:
    """Our networks of the figure's family, by data set; where several recipes trained them, labels name theirs."""
    results = comparable(gather(options.records)) if options.records else []
    found: dict[str, list[TradePoint]] = {}
    for result in results:
        if result.network.name.startswith(figure.family) and getattr(result, figure.error) is not None:
            found.setdefault(data_label(result.data), []).append(our_point(result))
    for data, points in found.items():
        if len({point.protocol for point in points}) > 1:
            found[data] = [
                replace(p, label=f"{p.label} ({p.protocol})", twin=f"{p.twin} ({p.protocol})") for p in points
            ]
    return found


def curves_figure(name: str, options: FigureOptions) -> list[Spec]:
    """A chart for each data set and recipe."""
    curves = training_curves(_results(name, options))
    if not curves:
        raise LowRankError("no run among these has an epoch to show.")
    panels = groupby(curves, key=lambda curve: (curve["recipe"], curve["data"]))
    return [curves_spec(f"{recipe} on {data}", list(panel)) for (recipe, data), panel in panels]


def _results(name: str, options: FigureOptions) -> list[NetworkResult]:
    if options.records is None:
        raise LowRankError(f"the figure {name} is of runs: give their folder (--runs runs).")
    return gather(options.records)


def shapes_figure(_name: str, options: FigureOptions) -> list[Spec]:
    """The shapes of a network's filters, layer by layer: of a run that learned them, say."""
    title, network = options.network("vgg11-gmp-lr-join-wfull")
    return [shapes_spec(f"Filters of {title}", network)]


def timings_figure(_name: str, options: FigureOptions) -> list[Spec]:
    """The paper's layer timings, then those of the records."""
    charts = layer_charts(options.records.timings if options.records else [])
    if options.records is not None and len(charts) == 1:
        raise LowRankError(
            "no record among these has times of layers: make one (`lowrank time NET --json > runs/time.json`), or "
            "leave --runs out for the paper's times alone."
        )
    return [layers_spec(chart) for chart in reversed(charts)]


def details_figure(name: str, options: FigureOptions) -> list[Spec]:
    """A chart of test images for each network of the records."""
    charts = [chart for chart in details_charts(_results(name, options)) if chart[NEEDED[name]]]
    if not charts:
        raise LowRankError(f"no record among these has what {name} shows: train or evaluate with this version.")
    return [DETAILS[name](chart) for chart in charts]


@dataclass(frozen=True)
class FigureKind:
    """A figure: its subject, the options it takes, and the function that draws it."""

    shows: str
    chart: Callable[[str, FigureOptions], list[Spec]]
    takes: str = ""


_NETWORK = "model, pretrained, checkpoint"
FIGURES = {
    "vgg": FigureKind("VGG-11 on ILSVRC, error against MACs", trade_figure, "runs"),
    "places": FigureKind("VGG-11 on Places, error against MACs", trade_figure, "runs"),
    "googlenet": FigureKind("GoogLeNet on ILSVRC, error against MACs", trade_figure, "runs"),
    "nin": FigureKind("Network-in-Network on CIFAR-10, error against MACs", trade_figure, "runs"),
    "big-picture-macs": FigureKind(
        "single networks on ILSVRC, error against MACs of all crops", trade_figure, "runs"
    ),
    "big-picture-params": FigureKind("single networks on ILSVRC, error against parameters", trade_figure, "runs"),
    "timings": FigureKind("MACs beside time, layer by layer", timings_figure, "runs"),
    "curves": FigureKind("accuracy by epoch, every network of a recipe", curves_figure, "runs"),
    "classes": FigureKind("accuracy by class on the test images", details_figure, "runs"),
    "confusion": FigureKind("which classes are taken for which, as a matrix", details_figure, "runs"),
    "pairs": FigureKind("the classes that are confused most", details_figure, "runs"),
    "calibration": FigureKind("confidence against the share of right answers", details_figure, "runs"),
    "shapes": FigureKind("the shapes of a network's filters, layer by layer", shapes_figure, _NETWORK),
    "filters": FigureKind("the filters of a first layer and their combinations", filters_figure, _NETWORK),
    "connections": FigureKind("which input pixel reaches which output pixel", connections_figure),
    "receptive-field": FigureKind("what dense and low-rank twins see", receptive_field_figure, _NETWORK),
    "spectra": FigureKind("singular values of dense filters", spectra_figure, _NETWORK),
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
    return save_charts(kind.chart(name, options), out)


__all__ = ["FIGURES", "FigureKind", "FigureOptions", "draw_figure"]
