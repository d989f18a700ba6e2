"""The candidates that `compare` and `frontier` train, as data, and how each becomes a network.

A design is a dense network at some width, with its convs rewritten by a scheme everywhere or in some stages. Thin
dense networks are designs as well, with the scheme `dense`: they are the controls.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import Count, count
from lowrank_cnn.method.init import init_, weight_layers
from lowrank_cnn.method.layers import weights_of
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.schemes import FactoredConv2d, parse_scheme
from lowrank_cnn.method.select import stages
from lowrank_cnn.method.thin import share_parameters, thin
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.models.airbench import PatchConv2d
from lowrank_cnn.models.foreign import build_foreign, is_foreign
from lowrank_cnn.models.network import Network

MULTIPLE, COARSE = 16, 64
"""Widths are such that every layer has a multiple of this many filters; in 64s GPUs run dense layers fastest."""
STEP = 1 / 32
"""Widths that are searched for are multiples of this."""


@dataclass(frozen=True)
class Family:
    """A dense network and the recipe that all its designs are trained by.

    `kept` names the layers that have one width in all designs.
    """

    network: str
    recipe: str
    options: tuple[tuple[str, Any], ...] = ()
    kept: tuple[str, ...] = ()


FAMILIES = {
    "airbench": Family("airbench", "cifar10-fast"),
    "nin": Family("nin", "nin-modern", (("pool", "average"),)),
    "vgg11": Family("vgg11-gmp", "modern", kept=("head",)),
    "resnet18": Family("resnet18-small", "tiny-fast"),
    "convnext": Family("convnext-small", "tiny-convnext"),
}


def find_family(name: str) -> Family:
    """A family of the table, or that of any network: one of ours, `timm:resnet18`, `mynet.py:make_model`."""
    if name in FAMILIES:
        return FAMILIES[name]
    if not is_foreign(name) and name not in list_models():
        raise LowRankError(f"there is no network {name!r}; {nearest(name, {*FAMILIES, *list_models()})}")
    return Family(name, "modern")


SQUARES = re.compile(r"mixture\((\d+)x\1\)")
"""Every filter becomes such a square: still a dense network. With 3x3 it is the cheapest rival of long strips."""


@dataclass(frozen=True)
class Design:
    """A way to build a network of a family.

    - `where`: the stages that the scheme is for: `all`, `late` (the second half of them), or `wide` (those with at
      least half of the most filters).
    - `between`: a batch norm and a ReLU stand between the halves of a separable pair.
    - `multiple`: every layer has a multiple of this many filters.
    - `last`: the last stage has this many times the filters of the dense network.
    - `matched`: what its width was chosen by: "macs" or "time", and of which design.
    - `layers`: layers with widths of their own, by name.
    """

    name: str
    scheme: str = "dense"
    width: float = 1.0
    where: str = "all"
    between: bool = False
    last: float = 1.0
    matched: str = ""
    multiple: int = MULTIPLE
    layers: tuple[tuple[str, float], ...] = ()

    @property
    def dense(self) -> bool:
        """Whether all filters are squares over all channels; those of `dense(branches)` are."""
        return SQUARES.fullmatch(self.scheme) is not None or self.scheme.partition("(")[0] == "dense"

    @property
    def branched(self) -> bool:
        """Whether filters train beside branches; those of dense networks can, too."""
        return self.scheme.endswith("branches)")


DENSE = Design("dense")
"""The family's own network, which all times are compared with."""
CONTROLS = {
    design.name: design
    for design in (
        DENSE,
        Design("dense-64s", multiple=COARSE),  # thin networks that a GPU runs fast; at a width of 1 `dense` itself
        Design("dense-32s", multiple=32),
        Design("dense-3x3", "mixture(3x3)"),
        # the rivals of designs with branches: branches help squares too (Ding et al. 2021)
        Design("dense-branches", "dense(branches)"),
        Design("dense-64s-branches", "dense(branches)", multiple=COARSE),
        Design("dense-2x", last=2.0),
    )
}
"""Dense networks: thin ones are these at a width."""
CANDIDATES: dict[str, Design] = {
    design.name: design
    for design in (
        # the paper's
        Design("lr", "lr"),
        Design("lr-join", "lr-join"),
        Design("wfull", "mixture(kx1=3, 1xk=3, kxk=2, join)"),
        Design("separable", "separable"),
        Design("mixture", "mixture(kx1=3, 1xk=3, kxk=2)"),
        Design("lr-2x", "lr", last=2.0),
        Design("wfull-2x", "mixture(kx1=3, 1xk=3, kxk=2, join)", last=2.0),
        # longer strips: a 7x1 costs less than a 3x3
        Design("strips5", "mixture(5x1, 1x5)"),
        Design("strips7", "mixture(7x1, 1x7)"),
        # fewer spatial filters
        Design("lr-1x1", "mixture(kx1, 1xk, 1x1)"),
        Design("strips5-1x1", "mixture(5x1, 1x5, 1x1)"),
        Design("third-kxk", "mixture(kxk, 1x1=2)"),
        # shares that divide layers of 64 filters and more into groups that fill the tiles of a GPU
        Design("half-kxk", "mixture(kxk, 1x1)"),
        Design("quarters", "mixture(kx1, 1xk, 1x1, kxk)"),
        Design("half-strips", "mixture(kx1, 1xk, kxk=2)"),
        # filters that see half of the channels, mixed by the next layer or by a join
        Design("lr-groups", "lr(channel_groups=2)"),
        Design("lr-join-groups", "lr-join(channel_groups=2)"),
        # beyond a linear pair
        Design("separable-relu", "separable", between=True),
        # parts of the channels of depthwise convs (Yu et al. 2024)
        Design("bands", "bands"),
        # low rank where maps are small or filters many
        Design("lr-late", "lr", where="late"),
        Design("lr-wide", "lr", where="wide"),
        Design("mixture-late", "mixture(kx1=3, 1xk=3, kxk=2)", where="late"),
        Design("strips5-late", "mixture(5x1, 1x5)", where="late"),
        # more to learn with, nothing more to run
        Design("lr-branches", "lr(branches)"),
        Design("lr-late-branches", "lr(branches)", where="late"),
        Design("strips5-branches", "mixture(5x1, 1x5, branches)"),
    )
}


def find_design(text: str) -> Design:
    """A design by the name of a candidate, or by a scheme; `@0.75` behind it sets the width.

    `dense@0.75/conv2=0.5` sets the width of a layer as well.

    >>> find_design("lr-late@1.5").width
    1.5
    """
    text, *parts = text.split("/")
    name, _, width = text.partition("@")
    found = (CONTROLS | CANDIDATES).get(name)
    if found is None:
        try:
            found = Design(name, str(parse_scheme(name)))
        except LowRankError as error:
            raise LowRankError(
                f"{name!r} is neither a design nor a scheme; {nearest(name, CANDIDATES)}"
            ) from error
    found = at_width(found, _width(width)) if width else found
    if not parts:
        return found
    layers = tuple((layer, _width(share)) for layer, _, share in (part.partition("=") for part in parts))
    return replace(found, name="/".join([text, *parts]), layers=layers)


def _width(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise LowRankError(f"a width is a number, as in dense@0.75/conv2=0.5, not {text!r}.") from error


def base_name(name: str) -> str:
    """The name of a design without its width."""
    return name.partition("@")[0]


def at_width(design: Design, width: float, matched: str = "") -> Design:
    """The same design, wider or thinner."""
    if not 0 < width <= 4:
        raise LowRankError(f"a width lies above 0 and up to 4, not {width:g}.")
    base = base_name(design.name)
    return replace(design, name=base if width == 1 else f"{base}@{width:g}", width=width, matched=matched)


def family_network(
    family: Family, size: tuple[int, ...], classes: int, norm: str | None = "batch", base: float = 1.0
) -> nn.Module:
    """The dense network of a family with fresh weights, for images of one size and a number of classes."""
    if is_foreign(family.network):
        return build_foreign(family.network, None, classes)[0]
    channels, height, width = size
    made: dict[str, Any] = {"num_classes": classes, "in_channels": channels, "norm": norm}
    made |= {"dropout": 0.0, "width": base, "image_size": height if height == width else None}
    return create_model(family.network, **made, **dict(family.options))


@dataclass(frozen=True)
class Builder:
    """Builds the designs of one network for images of one size.

    `make` gives the dense network with fresh weights, by torch's generator as it stands. `kept` names the layers
    that have one width in all designs.
    """

    make: Callable[[], nn.Module]
    size: tuple[int, ...]
    kept: tuple[str, ...] = ()

    @classmethod
    def of_family(cls, family: Family, size: tuple[int, ...], *more: Any, **options: Any) -> Builder:
        """The builder of a family; the arguments are those of `family_network`."""
        return cls(partial(family_network, family, size, *more, **options), size, family.kept)

    def __call__(self, design: Design) -> nn.Module:
        """The network with fresh weights, by torch's generator as it stands."""
        return self._designed(self.make(), design)

    def count(self, design: Design) -> Count:
        """The cost for one image, as the network runs once it is trained."""
        return count(self._designed(copy_with(self._blank), design), self.size)

    @cached_property
    def _blank(self) -> nn.Module:
        """The dense network without values: a search counts dozens of designs."""
        with torch.random.fork_rng():
            dense = self.make()
        blank = copy_with(dense).to("meta")
        share_parameters(blank, dense)  # each layer had got a tensor of its own
        return blank

    def _designed(self, dense: nn.Module, design: Design) -> nn.Module:
        network = dense
        if design.width != 1 or design.last != 1 or design.layers:
            own = dict.fromkeys(self.kept, 1.0)
            if design.last != 1:
                own |= dict.fromkeys(last_stage(network, self.size), design.last * design.width)
            own |= dict(design.layers)
            network = thin(network, width=design.width, input_size=self.size, multiple=design.multiple, layers=own)
        if design.scheme != DENSE.scheme:
            squares = SQUARES.fullmatch(design.scheme)
            larger = squares is not None and squares[1] != "3"
            where = self._where(network, design.where)
            network = convert(network, design.scheme, where=where, allow_costlier=larger)
        if design.between:
            network = rectified_between(network)
        if isinstance(network, Network):
            network.adjust_init()  # the family adjusts its new layers
        elif network is not dense:
            begin_alike(network, dense)
        return network

    def _where(self, network: nn.Module, where: str) -> Sequence[str] | None:
        """The convs that a scheme is for; never the layer that whitens patches, which is not trained."""
        if where == "all" and not any(isinstance(module, PatchConv2d) for module in network.modules()):
            return None  # those that `convert` takes by itself
        found = [
            [name for name in stage if not isinstance(network.get_submodule(name), PatchConv2d)]
            for stage in stages(network, self.size)
        ]
        found = [stage for stage in found if stage]
        if where == "late":
            found = found[len(found) // 2 :]
        names = [name for stage in found for name in stage]
        if where != "wide":
            return names
        filters: dict[str, Any] = {name: network.get_submodule(name).out_channels for name in names}
        return [name for name in names if 2 * filters[name] > max(filters.values())]


@torch.no_grad()
def begin_alike(network: nn.Module, dense: nn.Module) -> None:
    """Scale the fresh layers of a network that was made from a dense one as that one's are scaled.

    Its own initialisation may not be He's: torch's default is smaller. A layer is multiplied by the ratio of the
    dense layer of its name to one that `init_` drew. The layers of a chain share the ratio.
    """
    with unchanged(dense):
        usual = dict(weight_layers(init_(copy_with(dense))))
    done: set[int] = set()
    for name, layer in weight_layers(dense):
        stages = [part for _, part in weight_layers(network.get_submodule(name))]
        (own,), (drawn,) = weights_of(layer), weights_of(usual[name])
        if own.is_meta or (len(stages) > 1 and not own.any()):
            continue  # a chain whose layers are all zero would never learn
        for weight in (weight for part in stages for weight in weights_of(part)):
            if id(weight) not in done and not (weight.shape == own.shape and torch.equal(weight, own)):
                weight.mul_((own.norm() / drawn.norm()) ** (1 / len(stages)))
                done.add(id(weight))


def last_stage(network: nn.Module, size: tuple[int, ...]) -> list[str]:
    """The convs that give maps of the size of the last spatial conv, 1x1 ones too: sums need them all."""
    rows = count(network, size).layers
    end = stages(network, size)[-1]
    maps = {row.output[1:] for row in rows if row.name in end}
    return [
        row.name
        for row in rows
        if row.output[1:] in maps and isinstance(network.get_submodule(row.name), nn.Conv2d)
    ]


def rectified_between(network: nn.Module) -> nn.Module:
    """A copy whose separable pairs have a batch norm and a ReLU between their halves: no longer linear."""
    replaced: dict[nn.Module, nn.Module] = {}
    for module in network.modules():
        if isinstance(module, FactoredConv2d):
            first, second = module.children()
            filters: int = first.out_channels  # type: ignore[assignment]
            replaced[module] = nn.Sequential(first, nn.BatchNorm2d(filters), nn.ReLU(inplace=True), second)
    if not replaced:
        raise LowRankError("a ReLU stands between the halves of a separable pair, and this network has none.")
    return copy_with(network, replaced)


def width_of_macs(builder: Builder, design: Design, target: float) -> float:
    """The width, a multiple of `STEP` up to 4, at which a design costs nearest to this many MACs, by bisection."""

    @cache
    def macs(steps: int) -> int:
        return builder.count(at_width(design, steps * STEP)).macs

    high = 2 + bisect_left(range(2, round(4 / STEP)), target, key=macs)
    return min((high - 1, high), key=lambda steps: abs(macs(steps) - target)) * STEP
