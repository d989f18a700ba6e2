"""Choose shapes for the filters of one layer, in multiples that run fast in kernels.

A layer is worth the sum, over the positions of its kernel, of what matters there times a value of the share that
is kept. The first filters that see a position add most. So a layer whose filters are all alike gets some upright
and some lying ones; filter by filter, the slightly better shape would win them all.
"""

from __future__ import annotations

from math import log1p

import torch
from torch import Tensor

_TINY = 1e-30
_CURVE = 2.0
"""The first filters that see a position add 1 + this many times as much as the last."""
_GAIN = 1e-9
"""The least gain that a change must bring: smaller ones are rounding."""


def worth(kept: Tensor, whole: Tensor) -> Tensor:
    """What layers are worth that keep `kept` of `whole`, both by position; between 0 and 1.

    >>> whole = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    >>> worth(whole / 2, whole) > worth(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), whole)
    tensor(True)
    """
    weights = whole / whole.sum().clamp_min(_TINY)
    share = (kept / whole.clamp_min(_TINY)).clamp(0, 1)
    return (weights * (_CURVE * share).log1p() / log1p(_CURVE)).sum(-1)


def slope(share: Tensor) -> Tensor:
    """How much the worth grows with the share that is kept of a position, beside other positions."""
    return 1 / (1 + _CURVE * share)


def pick_units(kept: Tensor, whole: Tensor, price: Tensor, split: Tensor | None = None) -> tuple[Tensor, float]:
    """The shapes with which the log of the layer's worth, less all prices, is largest; and how large it is.

    `kept` is [units, shapes, positions], `price` that of a unit of each shape, `split` what it costs to use a
    shape at all. Each unit begins with its own best shape. Then one unit at a time changes its shape, always the
    one that gains most.

    >>> upright, lying = [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.9]
    >>> kept = torch.tensor([upright, lying], dtype=torch.float64).repeat(4, 1, 1)
    >>> pick_units(kept, kept.amax(1).sum(0), torch.zeros(2))[0].bincount().tolist()
    [2, 2]
    """
    units, shapes, _ = kept.shape
    split = torch.zeros(shapes, dtype=kept.dtype) if split is None else split
    choice = (kept.sum(2) / whole.sum().clamp_min(_TINY) - price).argmax(1)
    best = -torch.inf
    while True:
        current = kept[torch.arange(units), choice]
        value = worth(current.sum(0) - current[:, None] + kept, whole).log()
        paid = price[choice].sum() - price[choice][:, None] + price
        after = value - paid - _splits_after(choice, split)
        unit, shape = divmod(int(after.argmax()), shapes)
        if not float(after[unit, shape]) > best + _GAIN:
            return choice, best
        best, choice[unit] = float(after[unit, shape]), shape


def _splits_after(choice: Tensor, split: Tensor) -> Tensor:
    """What the shapes in use cost if a unit changes to a shape, [units, shapes]; the dearest one costs nothing."""
    places = torch.arange(len(split))
    counts = (choice[:, None] == places).long()
    others = counts.sum(0) - counts
    used = (others[:, None] + (places[:, None] == places)) > 0  # [units, shapes changed to, shapes]
    paid = torch.where(used, split, torch.zeros(()).to(split))
    return paid.sum(2) - paid.amax(2)


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
    while bool((spare > 0).any()):
        loss = scores.gather(1, choice[:, None]) - scores
        loss[(spare <= 0)[choice]] = torch.inf
        loss[:, spare >= 0] = torch.inf
        place, shape = divmod(int(loss.argmin()), len(wanted))
        spare[choice[place]] -= 1
        spare[shape] += 1
        choice[place] = shape
    return choice
