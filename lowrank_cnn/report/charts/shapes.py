"""The shapes of a network's filters, layer by layer, as stacked bars; removed filters leave their part empty."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewriting import changes_of
from lowrank_cnn.report.charts.layers import short_names
from lowrank_cnn.report.charts.vega import Spec, filled, template
from lowrank_cnn.system.errors import LowRankError

SPEC = template("shapes")
COLOURS = {
    "columns": ("#009e73", "#00664b", "#7fcfb9"),
    "rows": ("#e69f00", "#a85a00", "#f3d080"),
    "points": ("#9a9fa6",),
    "squares": ("#0072b2", "#003f63", "#7fb8d8"),
}
"""Columns (kx1) green, rows (1xk) orange, points (1x1) grey and all others blue, from the smallest up."""


def shape_bars(network: nn.Module) -> list[dict[str, Any]]:
    """A bar for each layer and shape, with its share of the filters that the dense layer had."""
    changed = {change.name: change.before for change in changes_of(network)}
    spatial = {name for name, before in changed.items() if not before.startswith("1x1,")}
    layers = {
        name: groups
        for name, module in network.named_modules()
        if (groups := _groups(module, spatial=name in spatial))
    }
    if not layers:
        raise LowRankError("the network has no spatial convolutions to show the shapes of.")
    bars = []
    for name, label in zip(layers, short_names(list(layers)), strict=True):
        total = sum(count for _, count in layers[name])
        dense = int(changed[name].rpartition(",")[2]) if name in changed else total
        for place, (shape, count) in enumerate(layers[name]):
            spoken = f"{label}: {count} of {dense} filters are {shape}"
            bars.append({"layer": label, "shape": shape, "share": count / dense, "place": place, "spoken": spoken})
    return bars


def shapes_spec(title: str, network: nn.Module) -> Spec:
    """The specification of the chart, for a file."""
    bars = shape_bars(network)
    colours = shape_colours({bar["shape"] for bar in bars})
    height = 22 * len({bar["layer"] for bar in bars})
    scale = {"domain": list(colours), "range": list(colours.values())}
    spec = filled(SPEC, {"{height}": height, "{scale}": scale})
    return {**spec, "title": title, "datasets": {"shapes": bars}}


def _groups(module: nn.Module, *, spatial: bool) -> list[tuple[str, int]]:
    """The shapes of a layer with the number of their filters; none of a 1x1 conv that was not `spatial` before."""
    if isinstance(module, CompositeConv2d):
        return [(f"{g.height}x{g.width}", g.filters) for g in module.composite.groups]
    if isinstance(module, nn.Conv2d) and (spatial or max(module.kernel_size) > 1):
        return [("x".join(map(str, module.kernel_size)), module.out_channels)]
    return []


def shape_colours(shapes: Iterable[str]) -> dict[str, str]:
    """A colour for each shape, kind by kind: shapes of one kind share a hue.

    >>> shape_colours(["1x1", "3x1", "5x1"])
    {'3x1': '#009e73', '5x1': '#00664b', '1x1': '#9a9fa6'}
    """
    kinds: dict[str, list[str]] = {kind: [] for kind in COLOURS}
    for shape in sorted(shapes, key=lambda shape: [int(side) for side in shape.split("x")]):
        height, width = map(int, shape.split("x"))
        tall, wide = height > 1, width > 1
        kinds["squares" if tall and wide else "columns" if tall else "rows" if wide else "points"].append(shape)
    return {
        shape: COLOURS[kind][place % len(COLOURS[kind])]
        for kind, found in kinds.items()
        for place, shape in enumerate(found)
    }
