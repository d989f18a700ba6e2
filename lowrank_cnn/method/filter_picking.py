"""Choose shapes for the filters of one layer, in multiples that run fast in kernels.

A layer has views, the rows and columns of its kernel (`shape_damage`). It is worth the sum, over its views, of
what matters there times a value of the share that is kept. The first filters that keep a view add most. So a layer
whose filters are all alike gets some upright and some lying ones; by itself, each would take the better shape.
"""

from __future__ import annotations

from math import log1p

import torch
from torch import Tensor

_TINY = 1e-30
_CURVE = 2.0
"""The first filters that keep a view add 1 + this many times as much as the last."""
_GAIN = 1e-9
"""The least gain that a change must bring: smaller ones are rounding."""


def worth(kept: Tensor, whole: Tensor) -> Tensor:
    """What layers are worth that keep `kept` of `whole`, both by view; between 0 and 1.

    >>> whole = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> worth(whole / 2, whole) > worth(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), whole)
    tensor(True)
    """
    return _weighed(kept, whole.clamp_min(_TINY), whole / whole.sum().clamp_min(_TINY))


def _weighed(kept: Tensor, whole: Tensor, weights: Tensor) -> Tensor:
    """The worth of layers, where no view is without a whole."""
    curved = (kept / whole).clamp_(0, 1).mul_(_CURVE).log1p_()
    return curved.mul_(weights).div_(log1p(_CURVE)).sum(-1)


def slope(share: Tensor) -> Tensor:
    """How much the worth grows with the share that is kept of a view."""
    return 1 / (1 + _CURVE * share)


def pick_units(kept: Tensor, whole: Tensor, price: Tensor, split: Tensor | None = None) -> tuple[Tensor, float]:
    """The shapes with which the log of the layer's worth, less all prices, is largest; and how large it is.

    `kept` is [units, shapes, views], `price` that of a unit of each shape, `split` what it costs to use a
    shape at all. Each unit begins with its own best shape. Then one unit at a time changes its shape, always the
    one that gains most.

    >>> upright, lying = [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]
    >>> kept = torch.tensor([upright, lying], dtype=torch.float64).repeat(4, 1, 1)
    >>> pick_units(kept, kept.amax(1).sum(0), torch.zeros(2))[0].bincount().tolist()
    [2, 2]
    """
    units, shapes, _ = kept.shape
    choice = (kept.sum(2) / whole.sum().clamp_min(_TINY) - price).argmax(1)
    split = split if split is not None and bool(split.any()) else None
    # Tensors are small here, so that all operations take about as long: the loop has as few as it can.
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
    """What the shapes in use cost if a unit changes to a shape, [units, shapes]; the dearest one costs nothing."""
    change = torch.eye(len(split), dtype=torch.long)
    others = choice.bincount(minlength=len(split)) - change  # [shapes changed from, shapes]
    used = (others[:, None] + change) > 0  # [shapes changed from, shapes changed to, shapes]
    paid = used * split
    return (paid.sum(2) - paid.amax(2))[choice]


def alike(scores: Tensor) -> Tensor:
    """The order of filters in which those of one best shape are neighbours, the surest of each first."""
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
