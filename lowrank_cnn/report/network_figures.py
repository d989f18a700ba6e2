"""Figures of a network: its first filters, singular values, connections and receptive fields."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note, notes
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import TIMES, counted
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models import create_model, list_models, list_pretrained
from lowrank_cnn.models.network import Network
from lowrank_cnn.report.records import NetworkId, Records, data_label
from lowrank_cnn.report.results import twin_id
from lowrank_cnn.report.style import GRID, Spec, filled, template


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


WIDTH = 660
"""Pixels that a figure of several panels is wide, roughly."""
FINE = 1000
"""A picture has at least so many pixels across: viewers blur small pictures that they enlarge."""
CIVIDIS = ("#00224e", "#213d6e", "#4c556c", "#6c6e72", "#8e8978", "#b2a570", "#dac55c", "#fee838")
VIRIDIS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
_BARE = {"grid": False, "labels": False, "ticks": False, "domain": False}


def picture(pixels: Tensor, width: float, x: Spec | None = None, y: Spec | None = None) -> Spec:
    """A panel that shows an RGB image [height, width, 3] with values from 0 to 1; x and y are Vega-Lite axes."""
    down, across = pixels.shape[:2]
    height = width * down / across
    image = {"type": "image", "url": _png(pixels), "width": width, "height": height, "aria": False}
    return {
        "width": width,
        "height": height,
        "data": {"values": [{}]},
        "mark": {**image, "align": "left", "baseline": "top"},
        "encoding": {
            "x": {"datum": 0, "type": "quantitative", "scale": {"domain": [0, across], "nice": False}, "axis": x},
            "y": {
                "datum": 0,
                "type": "quantitative",
                "scale": {"domain": [0, down], "nice": False, "reverse": True},
                "axis": y,
            },
        },
    }


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
    """Values from 0 to 1 as shades between these colours."""
    place = values.clamp(0, 1) * (len(colours) - 1)
    below = place.long().clamp_max(len(colours) - 2)
    table = _rgb(colours)
    return table[below].lerp(table[below + 1], (place - below).unsqueeze(-1).expand(*place.shape, 3))


ZERO = 0.45
"""The grey of a zero: the largest weight then stays darker than the white between the filters."""
MOST_FILTERS = 96


@dataclass(frozen=True)
class Bank:
    """Filters [n, channels, height, width] that are shown together."""

    title: str
    weight: Tensor


def filters_figure(_name: str, options: FigureOptions) -> list[Spec]:
    """A mosaic per group of the first conv, and one of the filters that the join makes of them."""
    label, network = options.network("vgg11-gmp-lr-join")
    banks = filter_banks(first_conv(network))
    panels = []
    for letter, bank in zip("abcdef", banks, strict=False):
        shown, some = min(len(bank.weight), MOST_FILTERS), counted(len(bank.weight), "filter")
        title = {
            "text": f"({letter}) {bank.title}",
            "subtitle": some if shown == len(bank.weight) else f"{shown} of {some}",
            "fontSize": 12,
            "fontWeight": "normal",
        }
        panels.append(picture(mosaic(bank.weight[:shown]), min(400, WIDTH / len(banks))) | {"title": title})
    title = {"text": f"First layer of {label}", "offset": 16}
    return [{"title": title, "hconcat": panels, "spacing": 24}]


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
    if not isinstance(conv, FactoredConv2d):
        weights: Any = conv.weights if isinstance(conv, CompositeConv2d) else [conv.weight]
        return [Bank(_title(weight), weight.detach()) for weight in weights]
    parts = [bank for stage in conv for bank in filter_banks(stage)]
    spatial = [bank for bank in parts if bank.weight.shape[-2:] != (1, 1)]
    if len(spatial) > 1 and "second" in dict(conv.named_children()):
        # The second half works on the first's channels, which are not colours.
        return [spatial[0], Bank("the two halves combined", conv.weight.detach())]
    return [*spatial, Bank("combined by the join", conv.weight.detach())]


def _title(weight: Tensor) -> str:
    height, width = weight.shape[-2:]
    kind = "vertical " if height > width else "horizontal " if width > height else ""
    return f"{kind}{height}{TIMES}{width}"


def mosaic(weight: Tensor) -> Tensor:
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
    return image


def _colours(weight: Tensor) -> Tensor:
    """[n, height, width, 3] in 0..1."""
    shown = weight if weight.shape[1] == 3 else weight.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    largest = shown.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-12)
    colours = ZERO * (1 + shown / largest)
    absent = (shown == 0).all(dim=1, keepdim=True)
    return torch.where(absent, torch.ones_like(colours), colours).permute(0, 2, 3, 1)


MOST_KERNELS = 10_000
"""Kernels of a layer that are looked at: a share of them tells the mean."""
MOST_NAMED = 12
SHADES = ("#303841", "#6a7480", "#9aa4af", "#c3cad2", "#e2e6ea", "#f0f2f4")
"""Of singular values, from the largest: greys, since colours tell the layers apart beside them."""
RANKS = ("1st", "2nd", "3rd", "4th", "5th", "others")


def spectra_figure(_name: str, options: FigureOptions) -> list[Spec]:
    """Left, in space: how much of a k x k kernel one column times one row holds. Right, over the channels."""
    label, network = options.network("nin")
    layers = dense_layers(network)
    random = {name: torch.randn(w.shape, generator=torch.Generator().manual_seed(0)) for name, w in layers.items()}
    space = [
        {"layer": name, "rank": RANKS[min(rank, 5)], "place": rank, "share": share}
        for name, weight in layers.items()
        for rank, share in enumerate(spatial_energy(weight).tolist())
    ]
    chance = [{"layer": name, "share": float(spatial_energy(weight)[0])} for name, weight in random.items()]
    held = [
        {"layer": name, "filters": kind, "kept": n / len(energy), "energy": share}
        for kind, weights in (("", layers), ("random filters", random))
        for name, weight in weights.items()
        for energy in [singular_energy(weight).tolist()]
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


SIDE = 6
"""Pixels along a side of the image: its connections are the square of its square."""
CYCLE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""After Okabe and Ito: distinct to readers with any of the common colour deficiencies."""
TAPS = {
    3: CYCLE[:3],
    9: (CYCLE[0], "#7d8792", CYCLE[5], CYCLE[4], CYCLE[1], "#8c564b", CYCLE[2], "#6a4fb3", CYCLE[3]),
}
"""The colours of the weights of a filter."""


def connections_figure(_name: str, _options: FigureOptions) -> list[Spec]:
    """A column per layer: the pixels that one output sees, and below it the map of all connections."""
    columns = []
    for letter, (title, matrix) in zip("abcd", layers().items(), strict=True):
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


LARGEST_IMAGE = 160
PIXELS = 3 * LARGEST_IMAGE**2
"""All random images together have this many pixels: more small images are needed to average the noise out."""
SHARE = 0.9


def receptive_field_figure(_name: str, options: FigureOptions) -> list[Spec]:
    """Effective receptive fields (Luo et al. 2016) of dense and low-rank twins, side by side.

    They are the mean absolute gradient, over the image, of the centre of the last conv's maps.
    """
    label, network = options.network("vgg11-gmp-lr")
    panels = []
    for name, net in [*_twin(network, options), (label, network)]:
        field = effective_field(net, seed=options.seed)
        held = f"{area(field):,} of {field.numel():,} pixels hold {SHARE:.0%}"
        # The square root lifts the faint rim, where the twins differ.
        image = picture(
            _shaded(field.sqrt(), CIVIDIS),
            290,
            {"title": "pixels across", "grid": False, "tickCount": 4},
            {"title": None if panels else "pixels down", "grid": False, "tickCount": 4},
        )
        layers = [{key: image[key] for key in ("data", "mark", "encoding")}, _SCALE]
        size = {key: image[key] for key in ("width", "height")}
        panels.append({**size, "layer": layers, "title": {"text": name, "subtitle": held}})
    return [{"hconcat": panels, "spacing": 30}]


_SCALE: Spec = {
    "data": {"values": [{"v": 0}, {"v": 1}]},
    "mark": {"type": "point", "opacity": 0, "aria": False},
    "encoding": {
        "x": {"value": 0},
        "y": {"value": 0},
        "color": {
            "field": "v",
            "type": "quantitative",
            "title": "absolute gradient of the centre output, root scale",
            "scale": {"domain": [0, 1], "range": CIVIDIS},
            "legend": {
                "gradientOpacity": 1,
                "gradientLength": 290,
                "titleLimit": 400,
                "titleFontWeight": "normal",
            },
        },
    },
}
"""Invisible points, for the legend that they have."""


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
