"""Choose the shape of every filter, so that the network stays within a budget and loses little.

`shape_damage` estimates what a filter keeps with each shape, and `filter_picking` what a layer of such filters is
worth. The choice maximises

    sum over layers of log(worth of the layer)  -  lambda * cost

with the one lambda, found by bisection, at which the network meets its budget. A filter may also be removed, which
saves what its channel costs in the layers that read it: low rank and thinner layers compete for the same budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from lowrank_cnn.method.channel_order import Route, why_fixed
from lowrank_cnn.method.layer_choice import LayerChoice, LayerPick
from lowrank_cnn.method.shape_damage import Damage, damage_by_energy, shaped_convs
from lowrank_cnn.method.shaping import GatedLinear, ShapedConv2d, may_remove
from lowrank_cnn.system.errors import LowRankError

_STEPS = 24
"""Bisections: they find a price among fifteen powers of ten to five digits."""
_ROUNDS = 3
"""Rounds of the choice where filters may be removed: what a filter costs then depends on other layers."""
_CHEAPEST, _DEAREST = 1e-6, 1e9
"""Prices of the whole dense network. The least is above zero: of two shapes that keep all, the cheaper wins."""
_LEFT, _GAIN = 0.02, 1e-9
"""The share of a budget that is not worth spending, and the least gain: smaller ones are rounding."""


@dataclass(frozen=True)
class ShapeCosts:
    """What filters cost, in MACs for one image or in milliseconds.

    - `filters`: for each conv the cost of one filter of each of its shapes, over all input channels.
    - `splits`: for each conv the cost of every shape beyond the first, as each is a conv of its own; none in MACs.
    - `linear`: for each linear layer that reads removable channels its cost with all of them.
    - `rest`: the cost of everything else.
    - `dense`: the cost of the dense network.
    """

    kind: str
    filters: Mapping[str, Sequence[float]]
    linear: Mapping[str, float]
    rest: float
    dense: float
    splits: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        return asdict(self)


Layers = Mapping[str, LayerChoice]
Picks = dict[str, LayerPick]


class ShapeChooser:
    """Chooses and sets the shapes of one network, whose free channels and costs are known."""

    def __init__(self, routes: Mapping[str, Route], costs: ShapeCosts) -> None:
        self.routes, self.costs = routes, costs
        self.sources = {reader.name: name for name, route in routes.items() for reader in route.readers}

    def least(self, network: nn.Module) -> float:
        """The smallest share of the dense network's cost that any choice has."""
        layers = self._layers(network, None)
        picks = self._pick_all(layers, _CHEAPEST, None)
        for _ in range(_ROUNDS):
            picks = self._pick_all(layers, _DEAREST, picks)
        return self.total(picks) / self.costs.dense

    def choose(self, network: nn.Module, share: float, damage: Mapping[str, Damage] | None = None) -> float:
        """Set shapes that cost at most this share of the dense network, or the least; the share they cost.

        Without a `damage`, that by energy is taken: then the choice depends on the weights alone.
        """
        layers, allowed = self._layers(network, damage), share * self.costs.dense * (1 + 1e-9)
        found = self._pick_all(layers, _CHEAPEST, None)
        rounds = _ROUNDS if any(layer.removable for layer in layers.values()) else 1
        if self.total(found) > allowed:
            for _ in range(rounds):
                before, price = found, self._price(layers, found, allowed)
                found = self._pick_all(layers, price, before)
                if all(_costs_alike(before[name], found[name]) for name in layers):
                    break  # a further round would begin, and end, as this one did
        if self.total(found) > allowed:
            found = self._pick_all(layers, _DEAREST, found)
        found = self._spend(layers, found, allowed)
        self._set(network, layers, found)
        return self.total(found) / self.costs.dense

    def total(self, picks: Picks) -> float:
        """The cost of a choice."""
        convs = sum(pick.cost * self._arriving(name, picks) for name, pick in picks.items())
        return self.costs.rest + convs + sum(c * self._arriving(n, picks) for n, c in self.costs.linear.items())

    def _arriving(self, name: str, picks: Picks | None) -> float:
        """The share of a layer's input channels that stay."""
        source = self.sources.get(name)
        return picks[source].width if picks is not None and source in picks else 1.0

    def _price(self, layers: Layers, now: Picks, allowed: float) -> float:
        """The lowest price of cost, by bisection, at which a choice is within what is allowed."""
        low, high = _CHEAPEST, _DEAREST
        for _ in range(_STEPS):
            middle = (low * high) ** 0.5
            low, high = (
                (middle, high) if self.total(self._pick_all(layers, middle, now)) > allowed else (low, middle)
            )
        return high

    def _pick_all(self, layers: Layers, price: float, now: Picks | None) -> Picks:
        """The best choice of each layer at a price, with what its neighbours cost as they are `now`."""
        return {name: self._pick_one(name, layer, price, now) for name, layer in layers.items()}

    def _pick_one(
        self, name: str, layer: LayerChoice, price: float, now: Picks | None, *, priced: bool = True
    ) -> LayerPick:
        """The best choice of one layer; shapes beyond the first are free of charge unless they are `priced`."""
        arriving = self._arriving(name, now)
        cost = (layer.cost * arriving + self._reading(name, now)) / self.costs.dense
        split = price * layer.split * arriving / self.costs.dense if priced else 0.0
        return layer.pick(price * cost, split)

    def _spend(self, layers: Layers, found: Picks, allowed: float) -> Picks:
        """Spend what is left: the layers that lost most choose again, each at a price of its own.

        As the one price falls, choices jump: by a unit of filters and, where shapes beyond the first cost
        something, from one shape to another, over all mixtures of both.
        """
        for name in sorted(layers, key=lambda name: found[name].worth):
            for layer in layers[name].pairs():
                if allowed - self.total(found) < _LEFT * allowed:
                    return found
                found = self._spend_on(name, layer, found, allowed)
        return found

    def _spend_on(self, name: str, layer: LayerChoice, found: Picks, allowed: float) -> Picks:
        """The choice with the best of this layer's that is allowed, found by bisection of its price."""
        low, high, best = _CHEAPEST, _DEAREST, found
        for _ in range(_STEPS):
            middle = (low * high) ** 0.5
            pick = self._pick_one(name, layer, middle, found, priced=False)
            more = {**found, name: pick}
            if self.total(more) > allowed:
                low = middle
                continue
            high = middle
            best = more if pick.worth > best[name].worth + _GAIN else best
        return best

    def _reading(self, name: str, picks: Picks | None) -> float:
        """What one channel of a conv costs in the layers that read it."""
        route = self.routes.get(name)
        if route is None or picks is None:
            return 0.0
        costs = [
            picks[reader.name].cost if reader.name in picks else self.costs.linear.get(reader.name, 0.0)
            for reader in route.readers
        ]
        return sum(costs) / picks[name].filters

    def removable(self, network: nn.Module) -> list[str]:
        """The convs whose filters can be removed."""
        return [name for name in shaped_convs(network) if self._removable(network, name)]

    def _removable(self, network: nn.Module, name: str) -> bool:
        if name not in self.routes:
            return False
        readers = [network.get_submodule(reader.name) for reader in self.routes[name].readers]
        gated = all(isinstance(reader, ShapedConv2d | GatedLinear) for reader in readers)
        return gated and may_remove(network.get_submodule(name).scheme)  # type: ignore[arg-type]

    def _layers(self, network: nn.Module, damage: Mapping[str, Damage] | None) -> Layers:
        damage = damage_by_energy(network, self.routes) if damage is None else damage
        found = {}
        for name, layer in shaped_convs(network).items():
            cost = torch.tensor(list(self.costs.filters[name]), dtype=torch.float64)
            free, removable = name in self.routes, self._removable(network, name)
            split = self.costs.splits.get(name, 0.0)
            found[name] = LayerChoice(damage[name], cost, split, unit_of(layer), free, removable)
        return found

    @torch.no_grad()
    def _set(self, network: nn.Module, layers: Layers, picks: Picks) -> None:
        """Set the masks in place, because optimisers and CUDA graphs hold references to the buffers."""
        for name, pick in picks.items():
            layer: Any = network.get_submodule(name)
            choice, kept = layers[name].assigned(pick)
            layer.choice.copy_(choice)
            layer.kept.copy_(kept)
            for reader in self.routes[name].readers if name in self.routes else ():
                module: Any = network.get_submodule(reader.name)
                if isinstance(module, ShapedConv2d | GatedLinear):
                    module.inputs.copy_(kept.repeat_interleave(reader.block))


def _costs_alike(one: LayerPick, other: LayerPick) -> bool:
    """Whether two choices of a layer mean the same to its neighbours."""
    return (one.cost, one.width) == (other.cost, other.width)


def unit_of(layer: ShapedConv2d) -> int:
    """What the filters of each shape are a multiple of: halved until a layer has four units or more."""
    unit = layer.scheme.multiple or 1
    while unit > 1 and (layer.out_channels % unit or layer.out_channels < 4 * unit):
        unit //= 2
    return unit


def check_reachable(chooser: ShapeChooser, network: nn.Module, share: float) -> None:
    """Refuse a budget that no choice of shapes meets."""
    least = chooser.least(network)
    if share < least:
        some = any(may_remove(layer.scheme) for layer in shaped_convs(network).values())
        raise LowRankError(
            f"{chooser.costs.kind}={share:g} is below {least:.3f}, what the cheapest shapes and all else cost: "
            + ("ask for more." if some else 'ask for more, or let filters go by the shape "none".')
        )


def check_removable(chooser: ShapeChooser, network: nn.Module, input_size: Sequence[int]) -> None:
    """Refuse to remove filters of a network that has none to spare."""
    if not chooser.removable(network):
        why = why_fixed(network, input_size) or "their channels meet others or reach the output"
        raise LowRankError(f'no filters of this network can be removed, because {why}: leave "none" out.')
