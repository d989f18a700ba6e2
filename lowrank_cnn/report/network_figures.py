"""The filters of a first layer, in colour: each group, and the full filters that a join makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import TIMES, counted
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models import create_model, list_models, list_pretrained
from lowrank_cnn.models.network import Network
from lowrank_cnn.report.records import NetworkId, Records, data_label
from lowrank_cnn.report.results import twin_id
from lowrank_cnn.report.style import (
    BLUE,
    COLUMN,
    CYCLE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    SOFT,
    image_axes,
    new_figure,
    title_over,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a figure may be given: records, or a network from its name, its shipped weights or a checkpoint.


@dataclass(frozen=True)
class FigureOptions:
    """The records of runs, a network's name, or the checkpoint of a run; figures take what they can use.

    `pretrained` names the data set whose weights, of those that come with the package, a named network gets.
    `into` is the unconverted network of a checkpoint that is not of one of our networks.
    """

    records: Records | None = None
    model: str | None = None
    checkpoint: str | Path | None = None
    seed: int = 0
    pretrained: str | None = None
    into: nn.Module | None = None

    def network(self, default: str) -> tuple[str, nn.Module]:
        """The network asked for, with what to call it; untrained where only its name is given."""
        if self.model and self.checkpoint:
            raise LowRankError("give a model's name or a checkpoint, not both.")
        if self.checkpoint and self.pretrained:
            raise LowRankError("a checkpoint has its own weights: give it or --pretrained, not both.")
        if self.checkpoint:
            network = load_trained(self.checkpoint, self.into)
            return f"{network_name(network)}, trained", network
        return self.named(self.model or default)

    def named(self, name: str, *, trained: bool = True, **options: Any) -> tuple[str, nn.Module]:
        """A network by its name: trained where weights are asked for, else as it is before training."""
        if trained and self.pretrained:
            label = f"{name}, trained on {data_label(self.pretrained)}"
            return label, create_model(name, pretrained=self.pretrained).eval()
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return f"{name}, as initialised", create_model(name, **options)

    def has_weights(self, name: str) -> bool:
        return self.pretrained is not None and (name, self.pretrained) in list_pretrained()


def load_trained(path: str | Path, into: nn.Module | None = None) -> nn.Module:
    """The network of a run's checkpoint, in evaluation mode, for images as it was trained on."""
    # Loaded when asked for: it brings the data and training parts along.
    from lowrank_cnn.train.evaluate import load_checkpoint

    trained = load_checkpoint(path, network=into)
    note(trained.network, input_size=trained.input_size)
    return trained.network.eval()


def network_name(network: nn.Module) -> str:
    return str(network.config["name"]) if isinstance(network, Network) else type(network).__name__


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


# How low-rank dense filters become by themselves: the singular values of each layer's filters.

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


# Which input pixel reaches which output pixel: the connections of a dense, a conv and a low-rank layer.

SIDE = 6
"""Pixels along a side of the image: its connections are the square of its square."""

NINE = (BLUE, "#7d8792", CYCLE[5], CYCLE[4], ORANGE, "#8c564b", GREEN, "#6a4fb3", CYCLE[3])


def draw_connections(_name: str, _options: FigureOptions) -> Figure:
    """A column per layer: the pixels that one output sees, and below it the map of all connections."""
    figure = new_figure(COLUMN, 3.3)
    grid = figure.add_gridspec(2, 4, height_ratios=(1, 2.2))
    for column, (title, matrix) in enumerate(layers().items()):
        weights, links = int(matrix.unique().count_nonzero()), int(matrix.count_nonzero())
        above, below = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        centre = matrix[SIDE * (SIDE // 2) + SIDE // 2].reshape(SIDE, SIDE)
        above.set_title(f"({'abcd'[column]}) {title}", fontsize=8.5)
        _paint(above, centre, weights)
        _paint(below, matrix, weights)
        below.set_xlabel(f"input pixel\n{weights:,} weights\n{links:,} connections", fontsize=8)
        if column == 0:
            above.set_ylabel("seen by\none output", fontsize=8)
            below.set_ylabel("output pixel", fontsize=8)
    return figure


def layers() -> dict[str, Tensor]:
    """The connection matrix of each kind of layer on one channel: equal numbers share a weight, zero is none."""
    pixels = SIDE * SIDE
    return {
        "fully connected": torch.arange(1, pixels * pixels + 1).reshape(pixels, pixels),
        f"3{TIMES}3 conv": connection_matrix(3, 3),
        f"3{TIMES}1 filter": connection_matrix(3, 1),
        f"1{TIMES}3 filter": connection_matrix(1, 3),
    }


def connection_matrix(height: int, width: int) -> Tensor:
    """[output pixels, input pixels] of a conv with "same" padding, whose taps are numbered from one.

    It is the conv itself, run on every image that has a single pixel set.
    """
    taps = torch.arange(1.0, height * width + 1).reshape(1, 1, height, width)
    images = torch.eye(SIDE * SIDE).reshape(-1, 1, SIDE, SIDE)
    reached = F.conv2d(images, taps, padding=(height // 2, width // 2))
    return reached.flatten(1).T.round().long()


def _paint(axes: Axes, matrix: Tensor, weights: int) -> None:
    colors: Any = require("matplotlib.colors", extra="plots", purpose="drawing a figure")
    shown = matrix.float().masked_fill(matrix == 0, float("nan")).numpy()
    many = weights > len(NINE)
    taps = NINE if weights == len(NINE) else (BLUE, ORANGE, GREEN)
    palette: Any = "viridis" if many else colors.ListedColormap(taps)
    low, high = (int(matrix.min()), int(matrix.max())) if many else (1, len(taps))
    axes.imshow(shown, cmap=palette, vmin=low, vmax=high, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xticks([edge - 0.5 for edge in range(1, matrix.shape[1])], minor=True)
    axes.set_yticks([edge - 0.5 for edge in range(1, matrix.shape[0])], minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", color=GRID if not many else "white", linewidth=0.3)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set(visible=True, color=SOFT, linewidth=0.6)


# How much of the image an output really sees: effective receptive fields (Luo et al. 2016), by gradients.

LARGEST_IMAGE = 160
PIXELS = 3 * LARGEST_IMAGE**2
"""All random images together have this many pixels: more small images are needed to average the noise out."""
SHARE = 0.9


def draw_receptive_field(_name: str, options: FigureOptions) -> Figure:
    """The mean absolute gradient, over the image, of the centre of the last conv's maps; twins side by side."""
    label, network = options.network("vgg11-gmp-lr")
    pairs = [*_twin(network, options), (label, network)]
    fields = [(name, effective_field(net, seed=options.seed)) for name, net in pairs]
    figure = new_figure(COLUMN, 3.9 if len(fields) > 1 else 5.2)
    panels = [figure.add_subplot(1, len(fields), place) for place in range(1, len(fields) + 1)]
    for axes, (name, field) in zip(panels, fields, strict=True):
        # The square root lifts the faint rim, where the twins differ.
        image = axes.imshow(field.sqrt().numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        held = f"{area(field):,} of {field.numel():,} pixels hold {SHARE:.0%}"
        axes.set_title(f"{name}\n{held}", fontsize=9)
        axes.set_xlabel("pixels across", fontsize=8)
        axes.set_ylabel("pixels down" if axes is panels[0] else "", fontsize=8)
        axes.grid(False)
        axes.tick_params(labelsize=7.5)
    bar = figure.colorbar(image, ax=panels, orientation="horizontal", shrink=0.5, aspect=40, pad=0.04)
    bar.set_label("absolute gradient of the centre output, root scale", fontsize=8)
    return figure


def _twin(network: nn.Module, options: FigureOptions) -> list[tuple[str, nn.Module]]:
    """The dense twin, trained if there are weights of it; none for a network that is dense itself."""
    name = network_name(network)
    twin = twin_id(NetworkId(name)).name
    if twin == name or twin not in list_models():
        return []
    return [options.named(twin, trained=options.has_weights(twin), **_size_of(network))]


def _size_of(network: nn.Module) -> dict[str, Any]:
    """The options that decide how large a network is, and the images it sees, for a twin as large."""
    config = network.config if isinstance(network, Network) else {}
    channels, height, width = notes(network).input_size or (3, 0, 1)
    side = {"in_channels": channels, "image_size": height} if height == width else {}
    return {name: config[name] for name in ("width", "norm", "num_classes") if config.get(name)} | side


def effective_field(network: nn.Module, *, seed: int = 0) -> Tensor:
    """[H, W], its largest value one. Random signs over the channels keep their gradients from cancelling."""
    size = notes(network).input_size or (3, LARGEST_IMAGE, LARGEST_IMAGE)
    generator = torch.Generator().manual_seed(seed)
    height, width = (min(side, LARGEST_IMAGE) for side in size[1:])
    images = torch.randn(PIXELS // (height * width), size[0], height, width, generator=generator).requires_grad_()
    maps = _last_maps(network.eval(), images)
    centre = maps[:, :, maps.shape[2] // 2, maps.shape[3] // 2]
    signs = torch.randint(0, 2, centre.shape, generator=generator) * 2 - 1
    (gradient,) = torch.autograd.grad((centre * signs).sum(), images)
    field = gradient.abs().mean(dim=(0, 1))
    return field / field.max().clamp_min(torch.finfo(field.dtype).tiny)


def _last_maps(network: nn.Module, images: Tensor) -> Tensor:
    """The output of the last conv that runs and still has an extent."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if min(output.shape[2:]) > 1:
            outputs.append(output)

    convs = [module for module in network.modules() if isinstance(module, nn.Conv2d | CompositeConv2d)]
    hooks = [conv.register_forward_hook(keep) for conv in convs]
    try:
        network(images)
    finally:
        for hook in hooks:
            hook.remove()
    if not outputs:
        raise LowRankError(f"{network_name(network)} has no convolution whose field could be shown.")
    return outputs[-1]


def area(field: Tensor) -> int:
    """The fewest pixels that hold the given share of the gradient."""
    ranked = field.flatten().sort(descending=True).values.double().cumsum(0)
    return int((ranked < SHARE * ranked[-1]).sum()) + 1
