"""The filters of a first layer, in colour: each group, and the full filters that a join makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.building import FactoredConv2d
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.report.figures.options import FigureOptions
from lowrank_cnn.report.figures.style import COLUMN, image_axes, new_figure, title_over
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import TIMES, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ZERO = 0.45
"""The grey of a zero: the largest weight then stays darker than the white between the filters."""
MOST_FILTERS = 96


@dataclass(frozen=True)
class Bank:
    """Filters [n, channels, height, width] that are shown together."""

    title: str
    weight: Tensor


def draw_filters(_name: str, options: FigureOptions) -> Figure:
    """A mosaic per group of the first conv, and one of the filters that the join makes of them."""
    label, network = options.network("vgg11-gmp-lr-join")
    banks = filter_banks(first_conv(network))
    mosaics = [mosaic(bank.weight[:MOST_FILTERS]) for bank in banks]
    figure = new_figure(COLUMN, 0.8 + min(4.0, COLUMN / len(banks)))
    title_over(figure, f"First layer of {label}")
    for place, (bank, image) in enumerate(zip(banks, mosaics, strict=True)):
        axes = figure.add_subplot(1, len(banks), place + 1)
        axes.imshow(image, interpolation="nearest")
        axes.set_anchor("N")
        shown, total = min(len(bank.weight), MOST_FILTERS), len(bank.weight)
        some = counted(total, "filter")
        axes.set_title(
            f"({'abcdef'[place]}) {bank.title}", fontsize=9 if len(banks) < 4 else 7.5, fontweight="normal"
        )
        axes.set_xlabel(some if shown == total else f"{shown} of {some}", fontsize=8)
        image_axes(axes)
    return figure


def first_conv(network: nn.Module) -> nn.Module:
    """The first conv of a network: a chain counts as one."""
    kinds = (FactoredConv2d, CompositeConv2d, nn.Conv2d)
    found = next((module for module in network.modules() if isinstance(module, kinds)), None)
    if found is None:
        raise LowRankError(f"{type(network).__name__} has no convolution whose filters could be shown.")
    return found


@torch.no_grad()
def filter_banks(conv: nn.Module) -> list[Bank]:
    """The filters that a conv consists of, and the dense filters they are equal to."""
    if isinstance(conv, CompositeConv2d):
        return list(_groups(conv))
    if not isinstance(conv, FactoredConv2d):
        return [_single(conv)]
    parts = [bank for stage in conv for bank in filter_banks(stage)]
    spatial = [bank for bank in parts if bank.weight.shape[-2:] != (1, 1)]
    if conv.scheme.name == "separable":
        # The second half works on the first's channels, which are not colours.
        return [spatial[0], Bank("the two halves combined", conv.weight.detach())]
    return [*spatial, Bank("combined by the join", conv.weight.detach())]


def _single(conv: nn.Module) -> Bank:
    weight: Any = conv.weight
    return Bank(_title(weight), weight.detach())


def _groups(conv: CompositeConv2d) -> Iterator[Bank]:
    for weight in conv.weights:
        yield Bank(_title(weight), weight.detach())


def _title(weight: Tensor) -> str:
    height, width = weight.shape[-2:]
    kind = "vertical " if height > width else "horizontal " if width > height else ""
    return f"{kind}{height}{TIMES}{width}"


def mosaic(weight: Tensor) -> Any:
    """Filters side by side as an RGB image, each at its own contrast; zero is grey, missing pixels are white."""
    filters = _colours(weight.detach().float())
    n, height, width, _ = filters.shape
    # Upright filters stand in more columns, so that every mosaic comes out about square.
    columns = min(n, math.ceil(math.sqrt(n * (height + 1) / (width + 1))))
    rows = math.ceil(n / columns)
    image = torch.ones(rows * (height + 1) - 1, columns * (width + 1) - 1, 3)
    for i, tile in enumerate(filters):
        top, left = (i // columns) * (height + 1), (i % columns) * (width + 1)
        image[top : top + height, left : left + width] = tile
    return image.numpy()


def _colours(weight: Tensor) -> Tensor:
    """[n, height, width, 3] in 0..1."""
    shown = weight if weight.shape[1] == 3 else weight.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    largest = shown.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-12)
    colours = ZERO * (1 + shown / largest)
    absent = (shown == 0).all(dim=1, keepdim=True)
    return torch.where(absent, torch.ones_like(colours), colours).permute(0, 2, 3, 1)
