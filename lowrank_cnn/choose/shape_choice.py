"""Choose the shape of every filter, so that the network stays within a budget and loses little.

`shape_damage` estimates what a filter keeps with each shape. The choice maximises

    sum over layers of log(worth of the layer)  -  lambda * cost

with the one lambda, found by bisection, at which the network meets its budget. A filter may also be removed, which
saves the cost of its channel in the layers that read it: low rank and thinner layers compete for the same budget.

A layer has views, the rows and columns of its kernel. Its worth is the sum over views of their importance times a
concave value of the share that is kept: the first filters that keep a view add most. So a layer of similar filters
gets some upright and some lying ones, although each filter alone would take the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import log1p
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.choose.shape_damage import Damage, damage_by_weights
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.channels import Route, why_fixed
from lowrank_cnn.method.shaped_layers import GatedLinear, ShapedConv2d, may_remove, shaped_convs

_TINY = 1e-30
_CURVE = 2.0
"""The first filters that keep a view add 1 + this many times as much as the last."""
_GAIN = 1e-9
"""The least gain that a change must bring: smaller ones are rounding."""


def worth(kept: Tensor, whole: Tensor) -> Tensor:
    """The worth, between 0 and 1, of layers that keep `kept` of `whole`; the last dimension is the view.

    >>> whole = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> worth(whole / 2, whole) > worth(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), whole)
    tensor(True)
    """
    return _weighed(kept, whole.clamp_min(_TINY), whole / whole.sum().clamp_min(_TINY))


def _weighed(kept: Tensor, whole: Tensor, weights: Tensor) -> Tensor:
    """`worth` for a `whole` above zero in every view."""
    curved = (kept / whole).clamp_(0, 1).mul_(_CURVE).log1p_()
    return curved.mul_(weights).div_(log1p(_CURVE)).sum(-1)


def slope(share: Tensor) -> Tensor:
    """How much the worth grows with the share that is kept of a view."""
    return 1 / (1 + _CURVE * share)


def pick_units(kept: Tensor, whole: Tensor, price: Tensor, split: Tensor | None = None) -> tuple[Tensor, float]:
    """Argmax and maximum of log(worth of the layer) - prices, over the shapes of its units.

    `kept` is [units, shapes, views], `price` is per unit of each shape, `split` the price of using a shape at all.
    The search is greedy: each unit begins with its own best shape, then the one change that gains most is made
    until none gains.

    >>> upright, lying = [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]
    >>> kept = torch.tensor([upright, lying], dtype=torch.float64).repeat(4, 1, 1)
    >>> pick_units(kept, kept.amax(1).sum(0), torch.zeros(2))[0].bincount().tolist()
    [2, 2]
    """
    units, shapes, _ = kept.shape
    choice = (kept.sum(2) / whole.sum().clamp_min(_TINY) - price).argmax(1)
    split = split if split is not None and bool(split.any()) else None
    # The tensors are small, so time goes by the number of operations: the loop has as few as possible.
    whole_of, weights = whole.clamp_min(_TINY), whole / whole.sum().clamp_min(_TINY)
    current, own, best = kept[torch.arange(units), choice], price[choice], -torch.inf
    while True:
        changed = (current.sum(0) - current)[:, None] + kept
        after = _weighed(changed, whole_of, weights).log_() - (own.sum() - own[:, None] + price)
        if split is not None:
            after -= _splits_after(choice, split)
        place = int(after.argmax())
        value = after.view(-1)[place].item()
        if not value > best + _GAIN:
            return choice, best
        unit, shape = divmod(place, shapes)
        best, choice[unit], current[unit], own[unit] = value, shape, kept[unit, shape], price[shape]


def _splits_after(choice: Tensor, split: Tensor) -> Tensor:
    """The price of the shapes in use after a unit changes its shape, [units, shapes]; the dearest one is free."""
    change = torch.eye(len(split), dtype=torch.long)
    others = choice.bincount(minlength=len(split)) - change  # [shapes changed from, shapes]
    used = (others[:, None] + change) > 0  # [shapes changed from, shapes changed to, shapes]
    paid = used * split
    return (paid.sum(2) - paid.amax(2))[choice]


def alike(scores: Tensor) -> Tensor:
    """Sort filters by their best shape, and within a shape by the margin over the second best, largest first."""
    best, shape = scores.max(1)
    second = scores.scatter(1, shape[:, None], -torch.inf).amax(1)
    order = (second - best).argsort(stable=True)
    return order[shape[order].argsort(stable=True)]


def share_out(scores: Tensor, wanted: Tensor) -> Tensor:
    """The shape of each filter by its scores, [filters, shapes], with `wanted` filters of each shape.

    Filters move from shapes that have too many to shapes that have too few, each time at the least loss.

    >>> share_out(torch.tensor([[3.0, 1.0], [1.0, 2.0], [0.0, 9.0], [2.0, 2.1]]), torch.tensor([2, 2])).tolist()
    [0, 1, 1, 0]
    """
    choice = scores.argmax(1)
    spare = choice.bincount(minlength=len(wanted)) - wanted
    loss = scores.gather(1, choice[:, None]) - scores
    loss[(spare <= 0)[choice]] = torch.inf
    loss[:, spare >= 0] = torch.inf
    for _ in range(int(spare.clamp_min(0).sum())):
        place, shape = divmod(int(loss.argmin()), len(wanted))
        before = int(choice[place])
        choice[place], loss[place] = shape, torch.inf
        spare[before] -= 1
        spare[shape] += 1
        if not spare[before]:
            loss[choice == before] = torch.inf
        if not spare[shape]:
            loss[:, shape] = torch.inf
    return choice


@dataclass(frozen=True)
class LayerChoice:
    """One conv to choose shapes for.

    - `damage`: of each shape. `cost`: of one filter of each shape. `split`: of each shape beyond the first.
    - `unit`: filters of one shape come in multiples of this.
    - `free`: filters may be reordered. `removable`: they may be removed.
    """

    damage: Damage
    cost: Tensor
    split: float
    unit: int
    free: bool
    removable: bool

    def pairs(self) -> list[LayerChoice]:
        """The layer with each pair of its shapes alone, and with all of them."""
        every = range(len(self.cost))
        return [*(self.limited_to(pair) for pair in combinations(every, 2)), self]

    def limited_to(self, shapes: Sequence[int]) -> LayerChoice:
        """The same layer where all other shapes have an infinite cost."""
        cost = torch.full_like(self.cost, torch.inf)
        cost[list(shapes)] = self.cost[list(shapes)]
        return replace(self, cost=cost)

    def pick(self, price: Tensor, split: float) -> LayerPick:
        """The best choice at a price for each filter and for every shape beyond the first.

        Shapes that do not earn their price are dropped one by one.
        """
        best, value = self._pick(price, split)
        while split > 0 and len(used := best.shapes) > 1:
            fewer = [self._pick(price.index_fill(0, shape, torch.inf), split) for shape in used]
            place = max(range(len(fewer)), key=lambda place: fewer[place][1])
            if fewer[place][1] <= value:
                break
            price = price.index_fill(0, used[place], torch.inf)
            best, value = fewer[place]
        return best

    def _pick(self, price: Tensor, split: float) -> tuple[LayerPick, float]:
        """The best choice and its value. Removed filters count as one more shape, which costs nothing."""
        kept, whole = self._kept, self._whole
        splits = torch.full_like(price, split)
        if self.removable:
            price, splits = torch.cat([price, price.new_zeros(1)]), torch.cat([splits, splits.new_zeros(1)])
        ordered = kept[alike(self._score - price)] if self.free else kept
        units = ordered.unflatten(0, (-1, self.unit)).sum(1)
        chosen, value = pick_units(units, whole, self.unit * price, splits)
        together = units[torch.arange(len(chosen)), chosen].sum(0)
        stay = chosen[chosen < len(self.cost)]
        shapes = stay.unique()
        found = LayerPick(
            units=chosen,
            shapes=shapes,
            price=price,
            share=together / whole.clamp_min(_TINY),
            worth=float(worth(together, whole)),
            cost=self.unit * float(self.cost[stay].sum()) + (len(shapes) - 1) * self.split,
            filters=len(kept),
            width=len(stay) / len(chosen),
        )
        return found, value

    def assigned(self, pick: LayerPick) -> tuple[Tensor, Tensor]:
        """The shape of each filter by itself, and whether it stays."""
        if not self.free:
            choice = pick.units.sort().values.repeat_interleave(self.unit)
            return choice, torch.ones(len(choice), dtype=torch.bool)
        # A view of which little is kept counts more, as in the worth of the layer.
        values = (self._kept * slope(pick.share)).sum(2) / self._whole.sum()
        choice = share_out(values - pick.price, self.unit * pick.units.bincount(minlength=len(pick.price)))
        stays = choice < len(self.cost)
        return torch.where(stays, choice, values[:, : len(self.cost)].argmax(1)), stays

    @cached_property
    def _kept(self) -> Tensor:
        """`_views`, with one more shape for removed filters, which keep nothing."""
        kept = self._views
        return torch.cat([kept, torch.zeros_like(kept[:, :1])], 1) if self.removable else kept

    @cached_property
    def _score(self) -> Tensor:
        """The share of the layer that each filter keeps with each shape."""
        return self._kept.sum(2) / self._whole.sum()

    @cached_property
    def _whole(self) -> Tensor:
        """All that filters can keep, in each view."""
        return self._views.amax(1).sum(0)

    @cached_property
    def _views(self) -> Tensor:
        """The views of the damage, above zero: a layer that keeps nothing at all would lose all filters."""
        return self.damage.views.clamp_min(_TINY)


@dataclass(frozen=True)
class LayerPick:
    """A choice of shapes for one layer.

    - `units`: the shape of each unit of filters. `shapes`: those in use.
    - `price`: of a filter of each shape, at which it was made.
    - `share`: the share that is kept of each view. `worth`: of the layer with this choice.
    - `cost`: of the layer with all its input channels.
    - `filters`: of the dense layer. `width`: the share of them that stays.
    """

    units: Tensor
    shapes: Tensor
    price: Tensor
    share: Tensor
    worth: float
    cost: float
    filters: int
    width: float


_STEPS = 24
"""Bisections: they find a price among fifteen powers of ten to five digits."""
_ROUNDS = 3
"""Rounds of the choice where filters may be removed: what a filter costs then depends on other layers."""
_CHEAPEST, _DEAREST = 1e-6, 1e9
"""Prices of the whole dense network. The least is above zero: of two shapes that keep all, the cheaper wins."""
_LEFT = 0.02
"""The share of a budget that is not worth spending."""


@dataclass(frozen=True)
class ShapeCosts:
    """The cost of filters, in MACs for one image or in milliseconds.

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
    """Chooses and sets the shapes of one network, given its free channels and costs."""

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

        Without a `damage`, the choice depends on the weights alone.
        """
        layers, allowed = self._layers(network, damage), share * self.costs.dense * (1 + 1e-9)
        found = self._pick_all(layers, _CHEAPEST, None)
        rounds = _ROUNDS if any(layer.removable for layer in layers.values()) else 1
        if self.total(found) > allowed:
            for _ in range(rounds):
                before, price = found, self._price(layers, found, allowed)
                found = self._pick_all(layers, price, before)
                if _neighbours(before) == _neighbours(found):
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
        """The best choice of each layer at a price, given the choices `now` of its neighbours."""
        return {name: self._pick_one(name, layer, price, now) for name, layer in layers.items()}

    def _pick_one(
        self, name: str, layer: LayerChoice, price: float, now: Picks | None, *, priced: bool = True
    ) -> LayerPick:
        """The best choice of one layer; shapes beyond the first are free unless they are `priced`."""
        arriving = self._arriving(name, now)
        cost = (layer.cost * arriving + self._reading(name, now)) / self.costs.dense
        split = price * layer.split * arriving / self.costs.dense if priced else 0.0
        return layer.pick(price * cost, split)

    def _spend(self, layers: Layers, found: Picks, allowed: float) -> Picks:
        """Spend the rest of the budget: the layers that lost most choose again, each at a price of its own.

        One price for all leaves a rest, because choices jump as it falls: by a unit of filters and, if shapes
        beyond the first have a cost, from one shape to another without the mixtures between.
        """
        for name in sorted(layers, key=lambda name: found[name].worth):
            for layer in layers[name].pairs():
                if allowed - self.total(found) < _LEFT * allowed:
                    return found
                found = self._spend_on(name, layer, found, allowed)
        return found

    def _spend_on(self, name: str, layer: LayerChoice, found: Picks, allowed: float) -> Picks:
        """Replace one layer's choice with the best that is allowed, by bisection of its price."""
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
        """The cost of one channel of a conv in the layers that read it."""
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
        damage = damage_by_weights(network, self.routes) if damage is None else damage
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


def _neighbours(picks: Picks) -> dict[str, tuple[float, float]]:
    """All that a layer's choice means to its neighbours."""
    return {name: (pick.cost, pick.width) for name, pick in picks.items()}


def unit_of(layer: ShapedConv2d) -> int:
    """The multiple that filters of one shape come in, halved until the layer has four units or more."""
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
    """Refuse the shape "none" if no filter of the network can be removed."""
    if not chooser.removable(network):
        why = why_fixed(network, input_size) or "their channels meet others or reach the output"
        raise LowRankError(f'no filters of this network can be removed, because {why}: leave "none" out.')
