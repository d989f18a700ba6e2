"""Choose the shape of every filter, so that the network stays within a budget and loses little.

Gradients on a few batches tell what a filter keeps with each shape. A tap counts by the squared change of the loss
if it is removed, to first order (Molchanov et al. 2019). The choice maximises

    sum over layers of log(worth of the layer)  -  lambda * cost

with the one lambda, found by bisection, at which the network meets its budget.

A layer has views, the rows and columns of its kernel. Its worth is the sum over views of their importance times a
concave value of the share that is kept: the first filters that keep a view add most. A layer of similar filters
therefore gets some vertical and some horizontal ones, although each filter alone would take the same shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import log1p
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.graph.channels import Route
from lowrank_cnn.method.shaped_layers import ShapedConv2d, shaped_convs
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
_CHEAPEST, _DEAREST = 1e-6, 1e9
"""Prices of the whole dense network. The least is above zero: of two shapes that keep all, the cheaper wins."""
_LEFT = 0.02
"""The share of a budget that is not worth spending."""

# What filters keep with each shape.
#
# The views of a layer are [filters, shapes, views]: the part that a filter keeps with each shape once the network
# has adapted. A view is a row or a column of the kernel, and half of each tap belongs to either. A filter keeps
# the rows and columns that its shape reaches: a vertical filter keeps all rows and, followed by a horizontal one
# in the next layer, the corners too. The last view is the part that does not depend on the shape.


def measure_views(
    network: nn.Module,
    routes: Mapping[str, Route],
    batches: Iterable[tuple[Tensor, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> dict[str, Tensor]:
    """The views of each layer by the loss on batches of (images, targets). The network is not changed.

    A layer without gradients is judged by its weights: it leads to an output that has no loss, or all outputs of
    the network are dead.
    """
    layers = shaped_convs(network)
    weights = [layer.weight for layer in layers.values()]
    taps = {name: torch.zeros(len(m.weight), *m.kernel_size).double() for name, m in layers.items()}
    channels = {name: torch.zeros(m.in_channels).double() for name, m in layers.items()}
    with _with_gradients(network, weights):
        for images, targets in batches:
            value = loss(network(images), targets)
            slopes = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
            for name, weight, slope in zip(layers, weights, slopes, strict=True):
                change = slope.detach().double() * weight.detach().double()
                taps[name] += change.sum(1).square().cpu()
                channels[name] += change.sum((2, 3)).sum(0).square().cpu()
    found = {}
    for name, layer in layers.items():
        own = taps[name].sum((1, 2))
        read = torch.zeros_like(own)  # the loss without each channel, in all layers that read it
        for reader in routes[name].readers if name in routes else ():
            if reader in channels:
                read += channels[reader].unflatten(0, (len(own), -1)).sum(1)
        whole = torch.maximum(own, read)
        measured = _TINY < float(whole.sum()) < torch.inf
        found[name] = _views(layer, taps[name], whole) if measured else views_by_weights(layer)
    return found


@torch.no_grad()
def views_by_weights(layer: ShapedConv2d) -> Tensor:
    """The views by squared weights, normalised to one per layer."""
    taps = layer.weight.double().square().sum(1).cpu()
    taps /= taps.sum().clamp_min(_TINY)
    return _views(layer, taps, taps.sum((1, 2)))


def _views(layer: ShapedConv2d, taps: Tensor, whole: Tensor) -> Tensor:
    """The views, from the loss without each tap ([filters, height, width]) and without each filter."""
    masks = layer.masks[: len(layer.shapes)].to(taps)
    always = (whole - taps.sum((1, 2))).clamp_min(0)[:, None, None].expand(-1, len(masks), 1)
    taps = taps + _COMMON * taps.mean(0)
    rows, columns = (taps.sum(axis)[:, None] * masks.amax(axis) / 2 for axis in (2, 1))
    return torch.cat([rows, columns, always], 2)


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


def pick_units(kept: Tensor, whole: Tensor, price: Tensor) -> Tensor:
    """Argmax of log(worth of the layer) - prices, over the shapes of its units.

    `kept` is [units, shapes, views], `price` is per unit of each shape. The search is greedy: each unit begins
    with its own best shape, then the one change that gains most is made until none gains.

    >>> vertical, horizontal = [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]
    >>> kept = torch.tensor([vertical, horizontal], dtype=torch.float64).repeat(4, 1, 1)
    >>> pick_units(kept, kept.amax(1).sum(0), torch.zeros(2)).bincount().tolist()
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
            return choice
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

    - `kept`: what each filter keeps with each shape, [filters, shapes, views].
    - `cost`: of one filter of each shape, in MACs.
    - `unit`: filters of one shape come in multiples of this. `free`: filters may be reordered.
    """

    kept: Tensor
    cost: Tensor
    unit: int
    free: bool

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

    def pick(self, price: Tensor) -> LayerPick:
        """The best choice at a price for each filter."""
        kept = self.kept[sort_alike(self.kept.sum(2) / self.whole.sum() - price)] if self.free else self.kept
        units = kept.unflatten(0, (-1, self.unit)).sum(1)
        chosen = pick_units(units, self.whole, self.unit * price)
        together = units[torch.arange(len(chosen)), chosen].sum(0)
        cost = self.unit * float(self.cost[chosen].sum())
        return LayerPick(chosen, price, together / self.whole, float(worth(together, self.whole)), cost)

    def assigned(self, pick: LayerPick) -> Tensor:
        """The shape of each filter by itself."""
        if not self.free:
            return pick.units.sort().values.repeat_interleave(self.unit)
        # The slope of the worth: a view of which little is kept counts more.
        values = (self.kept * (1 / (1 + _CURVE * pick.share))).sum(2) / self.whole.sum()
        return share_out(values - pick.price, self.unit * pick.units.bincount(minlength=len(pick.price)))


@dataclass(frozen=True)
class LayerPick:
    """A choice of shapes for one layer.

    - `units`: the shape of each unit of filters.
    - `price`: of a filter of each shape, at which it was made.
    - `share`: the share that is kept of each view. `worth`: of the layer with this choice. `cost`: of the layer.
    """

    units: Tensor
    price: Tensor
    share: Tensor
    worth: float
    cost: float


Picks = dict[str, LayerPick]

# The choice in the whole network, within its budget.


@dataclass(frozen=True)
class ShapeCosts:
    """Multiply-accumulates of one image.

    - `filters`: for each conv those of one filter of each of its shapes.
    - `rest`: those of everything else. `dense`: those of the dense network.
    """

    filters: Mapping[str, Sequence[float]]
    rest: float
    dense: float


class ShapeChooser:
    """Chooses and sets the shapes of a network, given its free channels, its costs and the views of its layers.

    Without `views`, the choice depends on the weights alone.
    """

    def __init__(
        self,
        network: nn.Module,
        routes: Mapping[str, Route],
        costs: ShapeCosts,
        views: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.convs, self.costs = shaped_convs(network), costs
        self.layers = {}
        for name, conv in self.convs.items():
            kept = views_by_weights(conv) if views is None else views[name]
            cost = torch.tensor(list(costs.filters[name]), dtype=torch.float64)
            # A layer that keeps nothing at all has no worth to divide by.
            self.layers[name] = LayerChoice(kept.clamp_min(_TINY), cost, unit_of(conv), name in routes)

    def least(self) -> float:
        """The smallest share of the dense network's cost that any choice has."""
        return self.total(self._pick_all(_DEAREST)) / self.costs.dense

    def choose(self, share: float) -> float:
        """Set shapes that cost at most this share of the dense network, or the least; the share they cost."""
        allowed = share * self.costs.dense * (1 + 1e-9)
        found = self._pick_all(_CHEAPEST)
        if self.total(found) > allowed:
            found = self._pick_all(_cheapest(lambda price: self.total(self._pick_all(price)) <= allowed))
        found = self._spend(found, allowed)
        with torch.no_grad():  # in place, because optimisers and CUDA graphs hold references to the buffers
            for name, pick in found.items():
                self.convs[name].choice.copy_(self.layers[name].assigned(pick))
        return self.total(found) / self.costs.dense

    def total(self, picks: Picks) -> float:
        """The cost of a choice."""
        return self.costs.rest + sum(pick.cost for pick in picks.values())

    def _pick_all(self, price: float) -> Picks:
        """The best choice of each layer at a price of the dense network."""
        return {name: layer.pick(price * layer.cost / self.costs.dense) for name, layer in self.layers.items()}

    def _spend(self, found: Picks, allowed: float) -> Picks:
        """Spend the rest of the budget: the layers that lost most choose again, each at a price of its own.

        One price for all leaves a rest, because choices jump as it falls, by a unit of filters or more.
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
            more = {**found, name: layer.pick(price * layer.cost / self.costs.dense)}
            allowed_too = self.total(more) <= allowed
            if allowed_too and more[name].worth > best[name].worth + _GAIN:
                best = more
            return allowed_too

        _cheapest(fits)
        return best


def _cheapest(fits: Callable[[float], bool]) -> float:
    """The lowest price, by bisection, at which a choice fits."""
    low, high = _CHEAPEST, _DEAREST
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def unit_of(layer: ShapedConv2d) -> int:
    """The multiple that filters of one shape come in, halved until the layer has four units or more."""
    unit = layer.scheme.multiple or 1
    while unit > 1 and (layer.out_channels % unit or layer.out_channels < 4 * unit):
        unit //= 2
    return unit
