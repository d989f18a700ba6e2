"""The figures, drawn from published numbers, records or networks: a function each, and a row of `FIGURES`."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError, check_choice
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import TIMES, counted
from lowrank_cnn.models import filters
from lowrank_cnn.paper.published import rows
from lowrank_cnn.report.charts import curves_spec, layer_charts, layers_spec, short_names, training_curves
from lowrank_cnn.report.records import Records, data_label
from lowrank_cnn.report.results import comparable, gather
from lowrank_cnn.report.style import GRID, Spec, check_format, filled, save_charts, template
from lowrank_cnn.report.trade import AUGMENTED, TradePoint, our_point, published_point, trade_chart, trade_spec

Titled = Sequence[tuple[str, nn.Module]]


def trade_figure(
    title: str,
    tables: tuple[str, ...],
    family: tuple[str, ...],
    *,
    records: Records | None,
    error: str = "top5",
    cost: str = "macs",
    size: tuple[int, int] = (620, 340),
) -> list[Spec]:
    """The published points of tables with ours on the same data, then a chart for each other data set of ours."""
    published = [published_point(row) for row in rows() if row.table in tables]
    home = published[0].data
    ours = _ours(family, error, records)
    charts = {home: [*published, *ours.pop(home, [])]} | ours
    specs = []
    for data, points in charts.items():
        shown = _told_apart([p for p in points if error in p.values and cost in p.values])
        about = title if data == home else f"The same networks trained here on {data}"
        spec = trade_spec(trade_chart(shown, cost, error, error=True))
        specs.append({**spec, "title": about, "width": size[0], "height": size[1]})
    return specs


def _told_apart(points: Sequence[TradePoint]) -> list[TradePoint]:
    """Published points of one name: those with more augmentation say so."""
    names = Counter(point.label for point in points)
    return [
        replace(p, label=f"{p.label}, augmented") if p.kind == AUGMENTED and names[p.label] > 1 else p
        for p in points
    ]


def _ours(family: tuple[str, ...], error: str, records: Records | None) -> dict[str, list[TradePoint]]:
    """Our networks of a family, by data set; where several recipes trained them, labels name theirs."""
    found: dict[str, list[TradePoint]] = defaultdict(list)
    for result in comparable(gather(records)) if records else []:
        if result.network.name.startswith(family) and getattr(result, error) is not None:
            found[data_label(result.data)].append(our_point(result))
    for data, points in found.items():
        if len({point.protocol for point in points}) > 1:
            found[data] = [
                replace(p, label=f"{p.label} ({p.protocol})", twin=f"{p.twin} ({p.protocol})") for p in points
            ]
    return dict(found)


def curves_figure(*, records: Records | None) -> list[Spec]:
    if records is None:
        raise LowRankError("the figure curves is of runs: give their folder (--runs runs).")
    curves = training_curves(gather(records))
    if not curves:
        raise LowRankError("no run among these has an epoch to show.")
    panels = groupby(curves, key=lambda curve: (curve["recipe"], curve["data"]))
    return [curves_spec(f"{recipe} on {data}", list(panel)) for (recipe, data), panel in panels]


def timings_figure(*, records: Records | None) -> list[Spec]:
    charts = layer_charts(records.timings if records else [])
    if records is not None and len(charts) == 1:
        raise LowRankError(
            "no record among these has times of layers: make one (`lowrank time NET --json > runs/time.json`), or "
            "leave --runs out for the paper's times alone."
        )
    return [layers_spec(chart) for chart in reversed(charts)]


SHAPE_COLOURS = {
    (True, False): ("#009e73", "#00664b", "#7fcfb9"),
    (False, True): ("#e69f00", "#a85a00", "#f3d080"),
    (False, False): ("#9a9fa6",),
    (True, True): ("#0072b2", "#003f63", "#7fb8d8"),
}
"""By tall and wide: columns (kx1) green, rows (1xk) orange, points (1x1) grey, others blue, the smallest first."""


def shapes_figure(*, networks: Titled) -> list[Spec]:
    return [shapes_spec(f"Filters of {label}", network) for label, network in networks]


def shapes_spec(title: str, network: nn.Module) -> Spec:
    """A bar for each layer and shape, with its share of the layer's filters."""
    layers, bars = filters.filter_shapes(network), []
    labels = short_names([name for name, _, _ in layers])
    for label, (_, dense, shapes) in zip(labels, layers, strict=True):
        for place, (shape, n) in enumerate(shapes):
            bar = {"layer": label, "shape": shape, "share": n / dense, "place": place}
            bars.append(bar | {"spoken": f"{label}: {n} of {dense} filters are {shape}"})
    colours = shape_colours({bar["shape"] for bar in bars})
    scale = {"domain": list(colours), "range": list(colours.values())}
    spec = filled(template("shapes"), {"{height}": 22 * len(layers), "{scale}": scale})
    return {**spec, "title": title, "datasets": {"shapes": bars}}


def shape_colours(shapes: Iterable[str]) -> dict[str, str]:
    """A colour for each shape, kind by kind: shapes of one kind share a hue.

    >>> shape_colours(["1x1", "3x1", "5x1"])
    {'3x1': '#009e73', '5x1': '#00664b', '1x1': '#9a9fa6'}
    """
    sides, colours = sorted(tuple(map(int, shape.split("x"))) for shape in shapes), {}
    for kind, hues in SHAPE_COLOURS.items():
        alike = [f"{height}x{width}" for height, width in sides if (height > 1, width > 1) == kind]
        colours |= {shape: hues[place % len(hues)] for place, shape in enumerate(alike)}
    return colours


FINE = 1000
"""A picture has at least so many pixels across: viewers blur small pictures that they enlarge."""
CIVIDIS = ("#00224e", "#213d6e", "#4c556c", "#6c6e72", "#8e8978", "#b2a570", "#dac55c", "#fee838")
VIRIDIS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")


def picture(pixels: Tensor, width: float, x: Spec | None = None, y: Spec | None = None) -> Spec:
    """A panel that shows an RGB image [height, width, 3] with values from 0 to 1; x and y are Vega-Lite axes."""
    down, across = pixels.shape[:2]
    size = {"width": width, "height": width * down / across}
    mark = {"type": "image", "url": _png(pixels), **size, "aria": False, "align": "left", "baseline": "top"}
    sides = {
        axis: {"datum": 0, "type": "quantitative", "scale": {"domain": [0, side], "nice": False}, "axis": shown}
        for axis, side, shown in (("x", across, x), ("y", down, y))
    }
    sides["y"]["scale"]["reverse"] = True
    return {**size, "data": {"values": [{}]}, "mark": mark, "encoding": sides}


def _png(pixels: Tensor) -> str:
    rgb = (255 * pixels.clamp(0, 1)).round().to(torch.uint8)
    rgb = _enlarged(rgb, ceil_div(FINE, rgb.shape[1]))
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in rgb)
    header = struct.pack(">IIBBBBB", rgb.shape[1], rgb.shape[0], 8, 2, 0, 0, 0)
    written = b"\x89PNG\r\n\x1a\n"
    for kind, part in ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")):
        written += struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
    return "data:image/png;base64," + base64.b64encode(written).decode()


def _enlarged(pixels: Tensor, times: int) -> Tensor:
    return pixels.repeat_interleave(times, 0).repeat_interleave(times, 1)


def _rgb(colours: Sequence[str]) -> Tensor:
    return torch.tensor([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])


def _shaded(values: Tensor, colours: Sequence[str]) -> Tensor:
    place = values.clamp(0, 1) * (len(colours) - 1)
    below = place.long().clamp_max(len(colours) - 2)
    table = _rgb(colours)
    return table[below].lerp(table[below + 1], (place - below).unsqueeze(-1).expand(*place.shape, 3))


ZERO = 0.45
"""The grey of a zero: the largest weight then stays darker than the white between the filters."""
MOST_FILTERS = 96
WIDTH = 660
"""Pixels that a figure of several panels is wide, roughly."""


def filters_figure(*, networks: Titled) -> list[Spec]:
    """A mosaic per group of the first conv, and one of the filters that the join makes of them."""
    [(label, network)] = networks
    banks, panels = filters.first_filters(network), []
    for letter, (kind, weight) in zip("abcdef", banks, strict=False):
        shown, some = min(len(weight), MOST_FILTERS), counted(len(weight), "filter")
        told = some if shown == len(weight) else f"{shown} of {some}"
        title = {"text": f"({letter}) {kind}", "subtitle": told, "fontSize": 12, "fontWeight": "normal"}
        panels.append(picture(mosaic(weight[:shown]), min(400, WIDTH / len(banks))) | {"title": title})
    return [{"title": {"text": f"First layer of {label}", "offset": 16}, "hconcat": panels, "spacing": 24}]


def mosaic(weight: Tensor) -> Tensor:
    """Filters side by side as an RGB image, each at its own contrast; zero is grey, missing pixels are white."""
    shown = weight.float()
    shown = shown if shown.shape[1] == 3 else shown.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    largest = shown.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-12)
    absent = (shown == 0).all(dim=1, keepdim=True)
    tiles = torch.where(absent, 1.0, ZERO * (1 + shown / largest))
    n, _, height, width = tiles.shape
    # Vertical filters need more columns for a mosaic that is about square.
    columns = min(n, math.ceil(math.sqrt(n * (height + 1) / (width + 1))))
    tiles = F.pad(tiles, (0, 1, 0, 1, 0, 0, 0, -n % columns), value=1.0)
    tiles = tiles.reshape(-1, columns, 3, height + 1, width + 1).permute(0, 3, 1, 4, 2)
    return tiles.reshape(-1, columns * (width + 1), 3)[:-1, :-1]


MOST_NAMED = 12
SHADES = ("#303841", "#6a7480", "#9aa4af", "#c3cad2", "#e2e6ea", "#f0f2f4")
"""Of singular values, from the largest: greys, since colours tell the layers apart beside them."""
RANKS = ("1st", "2nd", "3rd", "4th", "5th", "others")
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""After Okabe and Ito: distinct to readers with any of the common colour deficiencies."""


def spectra_figure(*, networks: Titled) -> list[Spec]:
    """Left, in space: how much of a k x k kernel one column times one row holds. Right, over the channels."""
    [(label, network)] = networks
    found = filters.dense_filters(network)
    layers = dict(zip(short_names(list(found)), found.values(), strict=True))
    random = {name: torch.randn(w.shape, generator=torch.Generator().manual_seed(0)) for name, w in layers.items()}
    space = [
        {"layer": name, "rank": RANKS[min(rank, 5)], "place": rank, "share": share}
        for name, weight in layers.items()
        for rank, share in enumerate(filters.spatial_energy(weight).tolist())
    ]
    chance = [{"layer": name, "share": float(filters.spatial_energy(w)[0])} for name, w in random.items()]
    held = [
        {"layer": name, "filters": kind, "kept": n / len(energy), "energy": share}
        for kind, weights in (("", layers), ("random filters", random))
        for name, weight in weights.items()
        for energy in [filters.singular_energy(weight).tolist()]
        for n, share in enumerate(energy, 1)
    ]
    names, ranks = list(layers), RANKS[: max(row["place"] for row in space) + 1]
    # Few layers each have a colour; of many, the shade tells the depth, and some are named.
    colours = {"range": CYCLE} if len(names) <= len(CYCLE) else {"scheme": "viridis"}
    named = names if len(names) <= MOST_NAMED else [names[0], names[len(names) // 2], names[-1]]
    parts = {
        "{space}": space,
        "{chance}": chance,
        "{held}": held,
        "{height}": max(200, 22 * len(names)),
        "{ranks}": {"domain": [*ranks, "1st of random filters"], "range": [*SHADES[: len(ranks)], CYCLE[1]]},
        "{layers}": {"domain": names, **colours},
        "{named}": named,
        "{kernel}": f"In space: each k{TIMES}k kernel",
    }
    spec: Spec = filled(template("spectra"), parts)
    return [{**spec, "title": {"text": f"Singular values of the dense filters of {label}", "offset": 16}}]


SIDE = 6
"""Pixels along a side of the image: its connections are the square of its square."""
TAPS = {
    3: CYCLE[:3],
    9: (CYCLE[0], "#7d8792", CYCLE[5], CYCLE[4], CYCLE[1], "#8c564b", CYCLE[2], "#6a4fb3", CYCLE[3]),
}
_BARE = {"grid": False, "labels": False, "ticks": False, "domain": False}


def connections_figure() -> list[Spec]:
    """A column per layer: the pixels that one output sees, and below it the map of all connections."""
    pixels, columns = SIDE * SIDE, []
    layers = {"fully connected": torch.arange(1, pixels * pixels + 1).reshape(pixels, pixels)}
    layers |= {f"3{TIMES}3 conv": connection_matrix(3, 3), f"3{TIMES}1 filter": connection_matrix(3, 1)}
    layers |= {f"1{TIMES}3 filter": connection_matrix(1, 3)}
    for letter, (title, matrix) in zip("abcd", layers.items(), strict=True):
        weights, links = int(matrix.unique().count_nonzero()), int(matrix.count_nonzero())
        told = ["input pixel", f"{weights:,} weights", f"{links:,} connections"]
        seen = matrix[SIDE * (SIDE // 2) + SIDE // 2].reshape(SIDE, SIDE)
        ups = [{**_BARE, "title": title} for title in (["seen by", "one output"], "output pixel")]
        up, down = ups if letter == "a" else (None, None)
        above = picture(_cells(seen, weights, 20), 80, None, up)
        below = picture(_cells(matrix, weights, 8), 150, {**_BARE, "title": told}, down)
        heading = {"text": f"({letter}) {title}", "fontSize": 12, "anchor": "middle"}
        columns.append({"vconcat": [above, below], "title": heading, "center": True, "spacing": 24})
    return [{"hconcat": columns, "spacing": 16}]


def _cells(matrix: Tensor, weights: int, size: int) -> Tensor:
    """A connection matrix as an image: a square for each cell in the colour of its weight, and lines between."""
    if weights in TAPS:
        colours = _rgb(["#ffffff", *TAPS[weights]])[matrix]
    else:
        colours = _shaded((matrix - matrix.min()) / (matrix.max() - matrix.min()), VIRIDIS)
    image = F.pad(_enlarged(colours, size).permute(2, 0, 1), (0, 1, 0, 1)).permute(1, 2, 0)
    line = _rgb([GRID])[0]
    image[::size], image[:, ::size] = line, line
    return image


def connection_matrix(height: int, width: int) -> Tensor:
    """[output pixels, input pixels] of a conv with "same" padding, whose taps are numbered from one.

    It is the conv itself, run on every image that has a single pixel set.
    """
    taps = torch.arange(1.0, height * width + 1).reshape(1, 1, height, width)
    images = torch.eye(SIDE * SIDE).reshape(-1, 1, SIDE, SIDE)
    reached = F.conv2d(images, taps, padding=(height // 2, width // 2))
    return reached.flatten(1).T.round().long()


SHARE = 0.9


def receptive_field_figure(*, networks: Titled, seed: int) -> list[Spec]:
    """Effective receptive fields of the networks side by side, averaged over random images of this seed."""
    panels = []
    scale = filled(template("gradient"), {"{colours}": CIVIDIS})  # invisible points, for the legend that they have
    for label, network in networks:
        field = filters.receptive_field(network, seed=seed)
        held = f"{filters.pixels_holding(SHARE, field):,} of {field.numel():,} pixels hold {SHARE:.0%}"
        axes = [{"title": title, "grid": False, "tickCount": 4} for title in ("pixels across", "pixels down")]
        axes[1]["title"] = None if panels else "pixels down"
        # The square root lifts the faint rim, where the twins differ.
        image = picture(_shaded(field.sqrt(), CIVIDIS), 290, *axes)
        layers = [{key: image.pop(key) for key in ("data", "mark", "encoding")}, scale]
        panels.append({**image, "layer": layers, "title": {"text": label, "subtitle": held}})
    return [{"hconcat": panels, "spacing": 30}]


@dataclass(frozen=True)
class FigureKind:
    """A figure: its subject, the function that draws it, and whether that takes records.

    `network` is the one that the command draws by default, if the figure is of a network; with `twin`, beside its
    dense twin.
    """

    shows: str
    chart: Callable[..., list[Spec]]
    runs: bool = False
    network: str = ""
    twin: bool = False

    @property
    def takes(self) -> str:
        return "runs" if self.runs else "model, pretrained, into" if self.network else ""


def _trade(title: str, tables: tuple[str, ...], *family: str, **options: Any) -> FigureKind:
    drawn = partial(trade_figure, title, tables, family, **options)
    return FigureKind(f"{title}, error against cost", drawn, runs=True)


_ILSVRC = ("vgg-ilsvrc", "googlenet-ilsvrc", "big-picture", "big-picture-augmented")
_BIG: Any = {"size": (900, 560)}
TRADE_FIGURES = {
    "vgg": _trade("VGG-11 on ILSVRC", ("vgg-ilsvrc",), "vgg11"),
    "places": _trade("VGG-11 on Places", ("vgg-places",), "vgg11"),
    "googlenet": _trade("GoogLeNet on ILSVRC", ("googlenet-ilsvrc",), "googlenet"),
    "nin": _trade("Network-in-Network on CIFAR-10", ("nin-cifar10",), "nin", error="top1"),
    "big-picture-macs": _trade("Networks on ILSVRC: compute of all crops", _ILSVRC, "vgg11", "googlenet", **_BIG),
    "big-picture-params": _trade("Networks on ILSVRC: size", _ILSVRC, "vgg11", "googlenet", **_BIG, cost="params"),
}
FIGURES = {
    **TRADE_FIGURES,
    "timings": FigureKind("MACs beside time, layer by layer", timings_figure, runs=True),
    "curves": FigureKind("accuracy by epoch, every network of a recipe", curves_figure, runs=True),
    "shapes": FigureKind(
        "the shapes of a network's filters, layer by layer", shapes_figure, network="vgg11-gmp-lr-join-wfull"
    ),
    "filters": FigureKind(
        "the filters of a first layer and their combinations", filters_figure, network="vgg11-gmp-lr-join"
    ),
    "connections": FigureKind("which input pixel reaches which output pixel", connections_figure),
    "receptive-field": FigureKind(
        "what dense and low-rank twins see", receptive_field_figure, network="vgg11-gmp-lr", twin=True
    ),
    "spectra": FigureKind("singular values of dense filters", spectra_figure, network="nin"),
}


def draw_figure(
    name: str, out: str | Path, *, records: Records | None = None, networks: Titled = (), seed: int = 0
) -> Path:
    """Draw a figure of runs, or of networks with their titles, into a file whose name says the format.

    The formats are svg, pdf and png. `seed` is that of the random images of a receptive field.

    Example:
        >>> draw_figure("vgg", "vgg.svg")  # doctest: +SKIP
        >>> draw_figure("filters", "f.svg", networks=[("mine", network)])  # doctest: +SKIP
    """
    check_choice("figure", name, FIGURES)
    kind, out = FIGURES[name], Path(out)
    if records is not None and not kind.runs:
        raise LowRankError(f"the figure {name} takes no runs.")
    if networks and not kind.network:
        raise LowRankError(f"the figure {name} takes no model and no weights.")
    if kind.network and not networks:
        raise LowRankError(f"the figure {name} is of a network: give networks=[(title, network)].")
    check_format(out)
    given: dict[str, Any] = {"records": records} if kind.runs else {"networks": networks} if kind.network else {}
    return save_charts(kind.chart(**given, **({"seed": seed} if kind.twin else {})), out)
