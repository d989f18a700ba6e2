"""Choose the shape of every filter, so that the network stays within a budget and loses little.

Gradients on a few batches tell what a filter keeps with each shape. A tap counts by the squared change of the loss
if it is removed, to first order (Molchanov et al. 2019). The choice maximises

    sum over layers of log(worth of the layer)  -  lambda * cost

with the one lambda, found by bisection, at which the network meets its budget. A filter may also be removed, which
saves the cost of its channel in the layers that read it: low rank and thinner layers compete for the same budget.

A layer has views, the rows and columns of its kernel. Its worth is the sum over views of their importance times a
concave value of the share that is kept: the first filters that keep a view add most. A layer of similar filters
therefore gets some vertical and some horizontal ones, although each filter alone would take the same shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import log1p
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.graph.channels import Reader, Route
from lowrank_cnn.method.shaped_layers import GatedLinear, ShapedConv2d, may_remove, shaped_convs
from lowrank_cnn.train.optimizers import flags_restored

_TINY = 1e-30
_COMMON = 0.05
"""The part of an average filter that is added to every filter: one without gradients follows the others."""
_CURVE = 2.0
"""The first filters that keep a view add 1 + this many times as much as the last."""
_GAIN = 1e-9
"""The smallest gain that justifies a change: smaller ones are rounding."""
_STEPS = 24
"""Bisections: they find a price among fifteen powers of ten to five digits."""
_ROUNDS = 3
"""Rounds of the choice if filters may be removed: the cost of a filter then depends on other layers."""
_CHEAPEST, _DEAREST = 1e-6, 1e9
"""Prices of the whole dense network. The least is above zero: of two shapes that keep all, the cheaper wins."""
_LEFT = 0.02
"""The share of a budget that is not worth spending."""

# How much a network would lose if a filter had a smaller shape, or were removed.


@dataclass(frozen=True)
class Damage:
    """The loss and the rest of one layer, filter by filter.

    - `shapes`: the immediate loss with each shape, [filters, shapes].
    - `removal`: the loss if the filter is removed, [filters].
    - `views`: the part that a filter keeps with each shape once the network has adapted, [filters, shapes, views].
      A view is a row or a column of the kernel, and half of each tap belongs to either. A filter keeps the rows
      and columns that its shape reaches: a vertical filter keeps all rows and, followed by a horizontal one in the
      next layer, the corners too. The last view is the part that does not depend on the shape.
    """

    shapes: Tensor
    removal: Tensor
    views: Tensor

    @property
    def whole(self) -> float:
        """The total that the layer can lose."""
        return max(float(self.removal.sum()), _TINY)


def measure_damage(
    network: nn.Module,
    routes: Mapping[str, Route],
    batches: Iterable[tuple[Tensor, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> dict[str, Damage]:
    """The damage on batches of (images, targets). The network is not changed.

    A layer without gradients is judged by its weights: it leads to an output that has no loss, or all outputs of
    the network are dead.
    """
    layers = shaped_convs(network)
    readers = {n: m for n, m in network.named_modules() if isinstance(m, ShapedConv2d | GatedLinear)}
    weights = [module.weight for module in readers.values()]
    taps = {name: torch.zeros(len(m.weight), *m.kernel_size).double() for name, m in layers.items()}
    channels = {name: torch.zeros(len(module.inputs)).double() for name, module in readers.items()}
    with _with_gradients(network, weights):
        for images, targets in batches:
            value = loss(network(images), targets)
            slopes = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
            for name, weight, slope in zip(readers, weights, slopes, strict=True):
                change = slope.detach().double() * weight.detach().double()
                if name in taps:
                    taps[name] += change.sum(1).square().cpu()
                    change = change.sum((2, 3))
                channels[name] += change.sum(0).square().cpu()
    found = {}
    for name, layer in layers.items():
        own = taps[name].sum((1, 2))
        read = torch.zeros_like(own)  # the loss without each channel, in all layers that read it
        for reader in routes[name].readers if name in routes else ():
            if reader.name in channels:
                read += channels[reader.name].unflatten(0, (len(own), -1)).sum(1)
        removal = torch.maximum(own, read)
        measured = _TINY < float(removal.sum()) < torch.inf
        found[name] = _damage(layer, taps[name], removal) if measured else damage_by_weights(layer)
    return found


@torch.no_grad()
def damage_by_weights(layer: ShapedConv2d) -> Damage:
    """Damage estimated from squared weights, normalised to one per layer."""
    taps = layer.weight.double().square().sum(1).cpu()
    taps /= taps.sum().clamp_min(_TINY)
    return _damage(layer, taps, taps.sum((1, 2)))


def _damage(layer: ShapedConv2d, taps: Tensor, removal: Tensor) -> Damage:
    """The damage, from the loss without each tap ([filters, height, width]) and without each filter."""
    masks = layer.masks[: len(layer.shapes)].to(taps)
    lost = taps.sum((1, 2))[:, None] - torch.einsum("ohw,shw->os", taps, masks)
    always = (removal - taps.sum((1, 2))).clamp_min(0)[:, None, None].expand(-1, len(masks), 1)
    taps = taps + _COMMON * taps.mean(0)
    rows, columns = (taps.sum(axis)[:, None] * masks.amax(axis) / 2 for axis in (2, 1))
    return Damage(lost.clamp_min(0), removal, torch.cat([rows, columns, always], 2))


@contextlib.contextmanager
def _with_gradients(network: nn.Module, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let gradients reach frozen weights too, and normalise by batch statistics; then restore all."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.training]
    with flags_restored(network), unchanged(network, evaluating=True), torch.enable_grad():
        for norm in norms:  # so that a filter's scale does not count
            norm.train()
        for weight in weights:
            weight.requires_grad_(True)
        yield


# The choice in one layer, at a price for each filter.


def worth(kept: Tensor, whole: Tensor) -> Tensor:
    """The worth, between 0 and 1, of layers that keep `kept` of `whole`; the last dimension is the view.

    >>> whole = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> worth(whole / 2, whole) > worth(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), whole)
    tensor(True)
    """
    curved = (kept / whole).clamp_(0, 1).mul_(_CURVE).log1p_()
    return curved.mul_(whole / whole.sum()).div_(log1p(_CURVE)).sum(-1)


def pick_units(kept: Tensor, whole: Tensor, price: Tensor) -> tuple[Tensor, float]:
    """Argmax and maximum of log(worth of the layer) - prices, over the shapes of its units.

    `kept` is [units, shapes, views], `price` is per unit of each shape. The search is greedy: each unit begins
    with its own best shape, then the one change that gains most is made until none gains.

    >>> vertical, horizontal = [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]
    >>> kept = torch.tensor([vertical, horizontal], dtype=torch.float64).repeat(4, 1, 1)
    >>> pick_units(kept, kept.amax(1).sum(0), torch.zeros(2))[0].bincount().tolist()
    [2, 2]
    """
    units, shapes, _ = kept.shape
    choice = (kept.sum(2) / whole.sum() - price).argmax(1)
    current, own, best = kept[torch.arange(units), choice], price[choice], -torch.inf
    while True:
        changed = (current.sum(0) - current)[:, None] + kept
        after = worth(changed, whole).log_() - (own.sum() - own[:, None] + price)
        place = int(after.argmax())
        value = after.view(-1)[place].item()
        if not value > best + _GAIN:
            return choice, best
        unit, shape = divmod(place, shapes)
        best, choice[unit], current[unit], own[unit] = value, shape, kept[unit, shape], price[shape]


def sort_alike(scores: Tensor) -> Tensor:
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
    best = choice = scores.argmax(1)
    loss = scores.gather(1, best[:, None]) - scores
    spare = best.bincount(minlength=len(wanted)) - wanted
    for _ in range(int(spare.clamp_min(0).sum())):
        stuck = (spare <= 0)[best] | (choice != best)  # a filter moves once
        place = int(loss.masked_fill(stuck[:, None] | (spare >= 0), torch.inf).argmin())
        choice = choice.index_fill(0, torch.tensor(place // len(wanted)), place % len(wanted))
        spare = choice.bincount(minlength=len(wanted)) - wanted
    return choice


@dataclass(frozen=True)
class LayerChoice:
    """One conv to choose shapes for.

    - `kept`: what each filter keeps with each shape, [filters, shapes, views]. If filters may be removed, the last
      shape is that of removed filters, which keep nothing.
    - `cost`: of one filter of each shape. `split`: of each shape beyond the first.
    - `unit`: filters of one shape come in multiples of this. `free`: filters may be reordered.
    """

    kept: Tensor
    cost: Tensor
    split: float
    unit: int
    free: bool

    @property
    def removable(self) -> bool:
        return self.kept.shape[1] > len(self.cost)

    @cached_property
    def whole(self) -> Tensor:
        """All that filters can keep, in each view."""
        return self.kept.amax(1).sum(0)

    def limits(self) -> Iterator[LayerChoice]:
        """The layer with each pair of its shapes alone (all others cost infinitely much), and with all of them."""
        for pair in combinations(range(len(self.cost)), 2):
            cost = torch.full_like(self.cost, torch.inf)
            cost[[*pair]] = self.cost[[*pair]]
            yield replace(self, cost=cost)
        yield self

    def pick(self, price: Tensor, split: float) -> LayerPick:
        """The best choice at a price for each filter and for every shape beyond the first.

        Shapes that do not earn their price are dropped one by one.
        """
        best, value = self._pick(price, split)
        while split > 0 and len(best.shapes) > 1:
            fewer = [self._pick(price.index_fill(0, shape, torch.inf), split) for shape in best.shapes]
            place = max(range(len(fewer)), key=lambda place: fewer[place][1])
            if fewer[place][1] <= value:
                break
            price = price.index_fill(0, best.shapes[place], torch.inf)
            best, value = fewer[place]
        return best

    def _pick(self, price: Tensor, split: float) -> tuple[LayerPick, float]:
        """The best choice and its value. Removed filters count as one more shape, which costs nothing."""
        if self.removable:
            price = torch.cat([price, price.new_zeros(1)])
        kept = self.kept[sort_alike(self.kept.sum(2) / self.whole.sum() - price)] if self.free else self.kept
        units = kept.unflatten(0, (-1, self.unit)).sum(1)
        chosen, value = pick_units(units, self.whole, self.unit * price)
        together = units[torch.arange(len(chosen)), chosen].sum(0)
        stay = chosen[chosen < len(self.cost)]
        shapes = stay.unique()
        cost = self.unit * float(self.cost[stay].sum()) + (len(shapes) - 1) * self.split
        value -= split * (len(shapes) - 1)
        width, found = len(stay) / len(chosen), float(worth(together, self.whole))
        return LayerPick(chosen, shapes, price, together / self.whole, found, cost, width), value

    def assigned(self, pick: LayerPick) -> tuple[Tensor, Tensor]:
        """The shape of each filter by itself, and whether it stays."""
        if not self.free:
            choice = pick.units.sort().values.repeat_interleave(self.unit)
            return choice, torch.ones(len(choice), dtype=torch.bool)
        # The slope of the worth: a view of which little is kept counts more.
        values = (self.kept * (1 / (1 + _CURVE * pick.share))).sum(2) / self.whole.sum()
        choice = share_out(values - pick.price, self.unit * pick.units.bincount(minlength=len(pick.price)))
        stays = choice < len(self.cost)
        return torch.where(stays, choice, values[:, : len(self.cost)].argmax(1)), stays


@dataclass(frozen=True)
class LayerPick:
    """A choice of shapes for one layer.

    - `units`: the shape of each unit of filters. `shapes`: those in use.
    - `price`: of a filter of each shape, at which it was made.
    - `share`: the share that is kept of each view. `worth`: of the layer with this choice.
    - `cost`: of the layer with all its input channels. `width`: the share of the filters that stay.
    """

    units: Tensor
    shapes: Tensor
    price: Tensor
    share: Tensor
    worth: float
    cost: float
    width: float


Picks = dict[str, LayerPick]

# The choice in the whole network, within its budget.


@dataclass(frozen=True)
class ShapeCosts:
    """The cost of filters, in MACs for one image or in milliseconds.

    - `filters`: for each conv the cost of one filter of each of its shapes, over all input channels.
    - `splits`: for each conv the cost of every shape beyond the first, as each is a conv of its own; none in MACs.
    - `linear`: for each linear layer that reads removable channels its cost with all of them.
    - `rest`: the cost of everything else. `dense`: the cost of the dense network.
    """

    kind: str
    filters: Mapping[str, Sequence[float]]
    linear: Mapping[str, float]
    rest: float
    dense: float
    splits: Mapping[str, float] = field(default_factory=dict)


class ShapeChooser:
    """Chooses and sets the shapes of a network, given its free channels, its costs and the damage of shapes.

    Without a `damage`, the choice depends on the weights alone.
    """

    def __init__(
        self,
        network: nn.Module,
        routes: Mapping[str, Route],
        costs: ShapeCosts,
        damage: Mapping[str, Damage] | None = None,
    ) -> None:
        self.network, self.routes, self.costs = network, routes, costs
        self.sources = {reader.name: name for name, route in routes.items() for reader in route.readers}
        if damage is None:
            damage = {name: damage_by_weights(layer) for name, layer in shaped_convs(network).items()}
        self.layers = {name: self._layer(name, one.views) for name, one in damage.items()}

    def _layer(self, name: str, views: Tensor) -> LayerChoice:
        layer: Any = self.network.get_submodule(name)
        kept = views.clamp_min(_TINY)  # a layer that keeps nothing at all would lose all filters
        readers = [self.network.get_submodule(one.name) for one in self._readers(name)]
        gated = bool(readers) and all(isinstance(one, ShapedConv2d | GatedLinear) for one in readers)
        if gated and may_remove(layer.scheme):
            kept = torch.cat([kept, torch.zeros_like(kept[:, :1])], 1)
        cost = torch.tensor(list(self.costs.filters[name]), dtype=torch.float64)
        return LayerChoice(kept, cost, self.costs.splits.get(name, 0.0), unit_of(layer), name in self.routes)

    def _readers(self, name: str) -> Sequence[Reader]:
        return self.routes[name].readers if name in self.routes else ()

    def least(self) -> float:
        """The smallest share of the dense network's cost that any choice has."""
        picks = self._pick_all(_CHEAPEST, None)
        for _ in range(_ROUNDS):
            picks = self._pick_all(_DEAREST, picks)
        return self.total(picks) / self.costs.dense

    def choose(self, share: float) -> float:
        """Set shapes that cost at most this share of the dense network, or the least; the share they cost."""
        allowed = share * self.costs.dense * (1 + 1e-9)
        found = self._pick_all(_CHEAPEST, None)
        rounds = _ROUNDS if any(layer.removable for layer in self.layers.values()) else 1
        if self.total(found) > allowed:
            for _ in range(rounds):
                before = found
                price = _cheapest(lambda price, now=before: self.total(self._pick_all(price, now)) <= allowed)
                found = self._pick_all(price, before)
                if _neighbours(before) == _neighbours(found):
                    break  # a further round would begin, and end, as this one did
        if self.total(found) > allowed:
            found = self._pick_all(_DEAREST, found)
        found = self._spend(found, allowed)
        self._set(found)
        return self.total(found) / self.costs.dense

    def total(self, picks: Picks) -> float:
        """The cost of a choice."""
        convs = sum(pick.cost * self._arriving(name, picks) for name, pick in picks.items())
        return self.costs.rest + convs + sum(c * self._arriving(n, picks) for n, c in self.costs.linear.items())

    def _arriving(self, name: str, picks: Picks | None) -> float:
        """The share of a layer's input channels that stay."""
        source = self.sources.get(name)
        return picks[source].width if picks is not None and source in picks else 1.0

    def _pick_all(self, price: float, now: Picks | None) -> Picks:
        """The best choice of each layer at a price, given the choices `now` of its neighbours."""
        return {name: self._pick_one(name, layer, price, now) for name, layer in self.layers.items()}

    def _pick_one(
        self, name: str, layer: LayerChoice, price: float, now: Picks | None, *, priced: bool = True
    ) -> LayerPick:
        """The best choice of one layer; shapes beyond the first are free unless they are `priced`."""
        arriving = self._arriving(name, now)
        cost = (layer.cost * arriving + self._reading(name, now)) / self.costs.dense
        split = price * layer.split * arriving / self.costs.dense if priced else 0.0
        return layer.pick(price * cost, split)

    def _reading(self, name: str, picks: Picks | None) -> float:
        """The cost of one channel of a conv in the layers that read it."""
        if picks is None:
            return 0.0
        readers = [reader.name for reader in self._readers(name)]
        costs = [picks[one].cost if one in picks else self.costs.linear.get(one, 0.0) for one in readers]
        return sum(costs) / len(self.layers[name].kept)

    def _spend(self, found: Picks, allowed: float) -> Picks:
        """Spend the rest of the budget: the layers that lost most choose again, each at a price of its own.

        One price for all leaves a rest, because choices jump as it falls: by a unit of filters and, if shapes
        beyond the first have a cost, from one shape to another without the mixtures between.
        """
        for name in sorted(self.layers, key=lambda name: found[name].worth):
            for layer in self.layers[name].limits():
                if allowed - self.total(found) < _LEFT * allowed:
                    return found
                found = self._spend_on(name, layer, found, allowed)
        return found

    def _spend_on(self, name: str, layer: LayerChoice, found: Picks, allowed: float) -> Picks:
        """Replace one layer's choice with the best that is allowed."""
        best = found

        def fits(price: float) -> bool:
            nonlocal best
            more = {**found, name: self._pick_one(name, layer, price, found, priced=False)}
            allowed_too = self.total(more) <= allowed
            if allowed_too and more[name].worth > best[name].worth + _GAIN:
                best = more
            return allowed_too

        _cheapest(fits)
        return best

    @torch.no_grad()
    def _set(self, picks: Picks) -> None:
        """Set the masks in place, because optimisers and CUDA graphs hold references to the buffers."""
        for name, pick in picks.items():
            layer: Any = self.network.get_submodule(name)
            choice, kept = self.layers[name].assigned(pick)
            layer.choice.copy_(choice)
            layer.kept.copy_(kept)
            for reader in self._readers(name):
                module: Any = self.network.get_submodule(reader.name)
                if isinstance(module, ShapedConv2d | GatedLinear):
                    module.inputs.copy_(kept.repeat_interleave(reader.block))


def _cheapest(fits: Callable[[float], bool]) -> float:
    """The lowest price, by bisection, at which a choice fits."""
    low, high = _CHEAPEST, _DEAREST
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _neighbours(picks: Picks) -> dict[str, tuple[float, float]]:
    """All that a layer's choice means to its neighbours."""
    return {name: (pick.cost, pick.width) for name, pick in picks.items()}


def unit_of(layer: ShapedConv2d) -> int:
    """The multiple that filters of one shape come in, halved until the layer has four units or more."""
    unit = layer.scheme.multiple or 1
    while unit > 1 and (layer.out_channels % unit or layer.out_channels < 4 * unit):
        unit //= 2
    return unit
