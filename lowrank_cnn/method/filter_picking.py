"""Choose a shape for every filter of a layer by scores, in multiples that run fast in kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def pick_each(scores: Tensor, unit: int, *, removable: bool = False) -> tuple[Tensor, Tensor]:
    """The best shape of each filter by itself, and whether it stays; `scores` is [filters, shapes].

    The numbers of filters are then brought to multiples of `unit`, at the least loss of score. A `removable`
    filter is removed where every score is below zero; a layer never loses all of its filters.

    >>> pick_each(torch.tensor([[3.0, 1.0], [1.0, 2.0], [0.0, 9.0], [2.0, 1.9]]), 2)[0].tolist()
    [0, 1, 1, 0]
    """
    shapes = scores.shape[1]
    nothing = torch.zeros(len(scores), 1, dtype=scores.dtype)
    columns = torch.cat([scores, nothing], 1) if removable else scores
    choice = columns.argmax(1)
    wanted = _multiples(torch.bincount(choice, minlength=columns.shape[1]), unit)
    if removable and wanted[-1] == len(scores):
        wanted[-1] -= unit
        wanted[int(scores.sum(0).argmax())] += unit
    choice = _moved(columns, choice, wanted) if unit > 1 or removable else choice
    kept = choice < shapes
    return torch.where(kept, choice, scores.argmax(1)), kept


def pick_segments(scores: Tensor, unit: int) -> Tensor:
    """The best shapes that leave the filters in their order: each shape has one run, in the order of the shapes.

    Dynamic programming over runs of `unit` filters: the best way to end with a shape goes on from any earlier one.

    >>> pick_segments(torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 0.0], [0.0, 1.0]]), 1).tolist()
    [0, 0, 0, 1]
    """
    blocks = scores.unflatten(0, (-1, unit)).sum(1).tolist()
    shapes = range(scores.shape[1])
    best, ways = list(blocks[0]), []
    for row in blocks[1:]:
        way, top = [], 0
        for shape in shapes:
            top = shape if best[shape] > best[top] else top
            way.append(top)
        best = [best[way[shape]] + row[shape] for shape in shapes]
        ways.append(way)
    chosen = [max(shapes, key=lambda shape: best[shape])]
    for way in reversed(ways):
        chosen.append(way[chosen[-1]])
    return torch.tensor(chosen[::-1]).repeat_interleave(unit)


def _multiples(counts: Tensor, unit: int) -> Tensor:
    """Counts as multiples of a unit with the same sum; what is left over goes to the largest remainders."""
    wanted = counts // unit
    left = int(counts.sum()) // unit - int(wanted.sum())
    order = sorted(range(len(counts)), key=lambda i: -int(counts[i] % unit))
    for i in order[:left]:
        wanted[i] += 1
    return wanted * unit


def _moved(columns: Tensor, choice: Tensor, wanted: Tensor) -> Tensor:
    """Move filters from shapes that have too many to shapes that have too few, each time at the least loss."""
    choice, spare = choice.clone(), torch.bincount(choice, minlength=len(wanted)) - wanted
    while bool((spare > 0).any()):
        loss = columns.gather(1, choice[:, None]) - columns
        loss[(spare <= 0)[choice]] = float("inf")
        loss[:, spare >= 0] = float("inf")
        place, shape = divmod(int(loss.argmin()), len(wanted))
        spare[choice[place]] -= 1
        spare[shape] += 1
        choice[place] = shape
    return choice
