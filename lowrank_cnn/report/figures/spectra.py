"""How low-rank dense filters become by themselves: the singular values of each layer's filters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.report.figures.options import FigureOptions, network_name
from lowrank_cnn.report.figures.style import COLUMN, CYCLE, INK, ORANGE, new_figure, title_over
from lowrank_cnn.system.arithmetic import ceil_div
from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.text import TIMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_KERNELS = 10_000
"""Kernels of a layer that are looked at: a share of them tells the mean."""

MOST_NAMED = 12

SHADES = ("#303841", "#6a7480", "#9aa4af", "#c3cad2", "#e2e6ea", "#f0f2f4")
"""Of singular values, from the largest: greys, since colours tell the layers apart beside them."""
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")


def draw_spectra(_name: str, options: FigureOptions) -> Figure:
    """Left, in space: how much of a k x k kernel one column times one row holds. Right, over the channels."""
    label, network = options.network("nin")
    layers = dense_layers(network)
    figure = new_figure(COLUMN, max(3.8, 1.8 + 0.22 * len(layers)))
    title_over(figure, f"Singular values of the dense filters of {label}")
    space, channels = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    _draw_space(space, layers)
    _draw_channels(channels, layers)
    return figure


def dense_layers(network: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain convs that span more than a row or a column, by name."""
    found = {
        name: module.weight.detach().float()
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and min(module.kernel_size) > 1
    }
    if not found:
        raise LowRankError(f"{network_name(network)} has no dense filters; give a dense network, like vgg11-gmp.")
    return dict(zip(_last_words(list(found)), found.values(), strict=True))


def _last_words(names: list[str]) -> list[str]:
    """As many of the last parts of the names as it takes to tell them apart."""
    parts = [name.split(".") for name in names]
    for kept in range(1, max(map(len, parts))):
        short = [".".join(part[-kept:]) for part in parts]
        if len(set(short)) == len(names):
            return short
    return names


def spatial_energy(weight: Tensor) -> Tensor:
    """The mean share of a kernel's energy in each of its singular values, the largest first."""
    kernels = weight.flatten(0, 1)
    step = ceil_div(len(kernels), MOST_KERNELS)
    energy = torch.linalg.svdvals(kernels[::step].double()) ** 2
    return (energy / energy.sum(dim=1, keepdim=True).clamp_min(1e-300)).mean(dim=0)


def singular_energy(weight: Tensor) -> Tensor:
    """The share of energy in the first n singular values of the filters as rows, for n = 1, 2, ..."""
    energy = torch.linalg.svdvals(weight.flatten(1).double()) ** 2
    return energy.cumsum(0) / energy.sum()


def _draw_space(axes: Axes, layers: dict[str, Tensor]) -> None:
    spectra = {name: spatial_energy(weight) for name, weight in layers.items()}
    for rank in range(max(map(len, spectra.values()))):
        shares = [float(s[rank]) if rank < len(s) else 0.0 for s in spectra.values()]
        below = [float(s[:rank].sum()) for s in spectra.values()]
        colour, name = (SHADES[rank], ORDINALS[rank]) if rank < len(ORDINALS) else (SHADES[-1], "_")
        axes.barh(list(spectra), shares, left=below, color=colour, height=0.62, label=name)
    for place, weight in enumerate(layers.values()):
        level = float(spatial_energy(_random_like(weight))[0])
        ends, name = [place - 0.42, place + 0.42], "_" if place else "1st of random filters"
        axes.plot([level, level], ends, color=ORANGE, linewidth=1.8, label=name)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_title(f"In space: each k{TIMES}k kernel", fontsize=9)
    axes.set_xlabel("Mean share of the energy in singular value")
    axes.xaxis.set_major_formatter(_percent_tick)
    axes.set_xlim(0, 1)
    _legend_below(axes)


def _draw_channels(axes: Axes, layers: dict[str, Tensor]) -> None:
    for place, (name, weight) in enumerate(layers.items()):
        held = singular_energy(weight)
        ranks = [(n + 1) / len(held) for n in range(len(held))]
        look = _look(name, place, len(layers))
        axes.plot(ranks, held.numpy(), linewidth=1.6, **look)
        chance = singular_energy(_random_like(weight))
        axes.plot(ranks, chance.numpy(), linewidth=1.0, color=look["color"], linestyle=":")
    axes.plot([], [], linewidth=1.0, color=INK, linestyle=":", label="random filters")
    axes.set_title("Over channels: filters as rows", fontsize=9)
    axes.set_xlabel("Share of the singular values kept")
    axes.set_ylabel("Energy held")
    axes.xaxis.set_major_formatter(_percent_tick)
    axes.yaxis.set_major_formatter(_percent_tick)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    _legend_below(axes)


def _look(name: str, place: int, count: int) -> dict[str, Any]:
    """A few layers each have their look; of many, the shade tells the depth, and some are named."""
    if count <= MOST_NAMED:
        return {"color": CYCLE[place % 6], "linestyle": "solid" if place < 6 else "dashed", "label": name}
    shades = require("matplotlib", extra="plots", purpose="drawing a figure").colormaps["viridis"]
    named = place in (0, count // 2, count - 1)
    return {"color": shades(0.9 * place / (count - 1)), "label": name if named else "_"}


def _legend_below(axes: Axes) -> None:
    """Under the axis' name, at the same distance however tall the figure is."""
    drop = 0.4 / (axes.figure.get_figheight() - 1.6)  # type: ignore[union-attr]
    longest = max(len(str(label)) for label in axes.get_legend_handles_labels()[1])
    spacing = {
        "columnspacing": 1.0,
        "handlelength": 1.4,
        "ncols": 3 if longest <= 12 else 2 if longest <= 22 else 1,
    }
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -drop), **spacing)


def _random_like(weight: Tensor) -> Tensor:
    """A Gaussian filter bank of the same shape: what no training at all would give."""
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def _percent_tick(share: float, _place: object = None) -> str:
    """A percentage on an axis, without digits that say nothing."""
    return f"{100 * share:.6g}%"
