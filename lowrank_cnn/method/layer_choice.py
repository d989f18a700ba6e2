"""Choose the shapes of one layer's filters, where what is lost is weighed against the price of each shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from lowrank_cnn.method.filter_picking import pick_each, pick_segments
from lowrank_cnn.method.shape_damage import Damage

_STEPS = 10
"""Bisections of a weight."""
_LEAST = 1e-3


@dataclass(frozen=True)
class LayerChoice:
    """What the choice of a conv's shapes depends on: the damage and the cost of each shape, and its freedom."""

    damage: Damage
    cost: Tensor
    split: float
    unit: int
    free: bool
    removable: bool

    def that_jump(self) -> list[LayerChoice]:
        """The layer as it chooses again if its cost jumps while the one price falls.

        Where shapes beyond the first cost something, it jumps from one shape to another and over all mixtures of
        both: each pair chooses by itself. Where filters are removed, the layers that read them jump too.
        """
        if self.split > 0:
            return [self.limited_to(shapes) for shapes in combinations(range(len(self.cost)), 2)]
        return [self] if self.removable else []

    def limited_to(self, shapes: Sequence[int]) -> LayerChoice:
        """The layer with these shapes alone: by any other it would lose everything."""
        lost = torch.full_like(self.damage.shapes, torch.inf)
        lost[:, list(shapes)] = self.damage.shapes[:, list(shapes)]
        return replace(self, damage=Damage(lost, self.damage.removal))

    def weight_at(self, price: Tensor) -> float:
        """What a loss in this layer weighs: the slope of the logarithm at the share that is kept by this weight.

        The slope at the share of an earlier choice would let layers swing between all filters and hardly any.
        """
        low, high = 1.0, 1 / _LEAST
        for _ in range(_STEPS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if middle * self._kept_at(middle, price) > 1 else (middle, high)
        return high

    def _kept_at(self, weight: float, price: Tensor) -> float:
        """The share that is kept if every filter takes its best shape by itself."""
        best, choice = self._scores(weight, price).max(1)
        lost = self.damage.shapes.gather(1, choice[:, None])[:, 0]
        lost = torch.where(best < 0, self.damage.removal, lost) if self.removable else lost
        return 1 - float(lost.sum()) / self.damage.whole

    def _scores(self, weight: float, price: Tensor) -> Tensor:
        return weight / self.damage.whole * (self.damage.removal[:, None] - self.damage.shapes) - price

    def pick(self, price: Tensor, split: float, *, rounded: bool) -> LayerPick:
        """The shapes that lose least, where what is lost is weighed against the price of each shape.

        `split` is the price of every shape beyond the first. Shapes that are not worth it are given up one by one.
        """
        scores = self._scores(self.weight_at(price), price)
        best, worth = self._pick(scores, split, rounded=rounded)
        while split > 0 and len(used := best.choice[best.kept].unique()) > 1:
            without = [scores.index_fill(1, shape, -torch.inf) for shape in used]
            fewer = [self._pick(one, split, rounded=rounded) for one in without]
            place = max(range(len(fewer)), key=lambda place: fewer[place][1])
            if fewer[place][1] <= worth:
                break
            scores, (best, worth) = without[place], fewer[place]
        return best

    def _pick(self, scores: Tensor, split: float, *, rounded: bool) -> tuple[LayerPick, float]:
        """The choice with the best scores, and what it is worth."""
        if self.free:
            choice, kept = pick_each(scores, self.unit if rounded else 1, removable=self.removable)
        else:
            choice, kept = pick_segments(scores, self.unit), torch.ones(len(scores), dtype=torch.bool)
        lost = self.damage.shapes.gather(1, choice[:, None])[kept].sum() + self.damage.removal[~kept].sum()
        share = 1 - float(lost) / self.damage.whole
        more = max(0, len(choice[kept].unique()) - 1)
        found = LayerPick(choice, kept, share, float(self.cost[choice][kept].sum()) + more * self.split)
        return found, float(scores.gather(1, choice[:, None])[kept].sum()) - more * split


@dataclass(frozen=True)
class LayerPick:
    """A shape for each filter of a layer and whether it stays; the share that the layer keeps, and its cost."""

    choice: Tensor
    kept: Tensor
    share: float
    cost: float

    @property
    def width(self) -> float:
        """The share of the filters that stay."""
        return float(self.kept.double().mean())
