"""Choose the shapes of one layer's filters: what the layer is worth with them, less what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from lowrank_cnn.method.filter_picking import alike, pick_units, share_out, slope, worth
from lowrank_cnn.method.shape_damage import Damage

_TINY = 1e-30


@dataclass(frozen=True)
class LayerChoice:
    """What the choice of a conv's shapes depends on: what each shape keeps and costs, and the layer's freedom."""

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
        """The layer with these shapes alone: any other costs too much."""
        cost = torch.full_like(self.cost, torch.inf)
        cost[list(shapes)] = self.cost[list(shapes)]
        return replace(self, cost=cost)

    def pick(self, price: Tensor, split: float) -> LayerPick:
        """The shapes with which the layer is worth most, less the price of each filter and of every further shape.

        Shapes that are not worth their price are given up one by one.
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
        """The best choice, and what it is worth. Filters that are removed have a shape of their own, for free."""
        kept, whole = self._kept, self._whole
        splits = torch.full_like(price, split)
        if self.removable:
            price, splits = torch.cat([price, price.new_zeros(1)]), torch.cat([splits, splits.new_zeros(1)])
        ordered = kept[alike(self._score - price)] if self.free else kept
        units = ordered.unflatten(0, (-1, self.unit)).sum(1)
        chosen, value = pick_units(units, whole, self.unit * price, splits)
        together, stay = _kept_by(units, chosen), chosen[chosen < len(self.cost)]
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
        """What each filter keeps with each shape, in each view; a filter that is removed keeps nothing."""
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
        """Each shape keeps a trace: a layer that keeps nothing with any shape would lose all filters."""
        return self.damage.views.clamp_min(_TINY)


def _kept_by(kept: Tensor, choice: Tensor) -> Tensor:
    """What all units keep together with the shapes that were chosen, in each view."""
    return kept[torch.arange(len(choice)), choice].sum(0)


@dataclass(frozen=True)
class LayerPick:
    """A choice of shapes for one layer.

    - `units`: the shape of each unit of filters. `shapes`: those in use.
    - `price`: of a filter of each shape, at which it was made.
    - `share`: what is kept in each view. `worth`: what the layer is still worth.
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
