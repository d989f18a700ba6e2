"""Where filters of several sizes sit on one output grid: kernels, offsets and padding, per axis."""

from __future__ import annotations

from collections.abc import Sequence

from lowrank_cnn.method.spec import FilterGroup, Pair
from lowrank_cnn.system.errors import LowRankError

Sides = tuple[Pair, Pair]
"""Padding as ((top, bottom), (left, right)); a negative side crops."""

Padding = str | int | Sequence[int] | Sides


def pair(value: int | Sequence[int], label: str) -> Pair:
    """A size given once or per axis."""
    both = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(both) != 2 or any(not isinstance(v, int) or v < 1 for v in both):
        raise LowRankError(f"{label} is a positive number or a pair of them, not {value!r}.")
    return both[0], both[1]


def enclosing_padding(padding: Padding, kernel: Pair, dilation: Pair) -> Sides:
    """Any way of writing the padding, as sides. "same" splits an odd total as torch does: less before."""
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return (totals[0] // 2, totals[0] - totals[0] // 2), (totals[1] // 2, totals[1] - totals[1] // 2)
    if padding == "valid":
        return (0, 0), (0, 0)
    both = tuple(padding) if isinstance(padding, Sequence) and not isinstance(padding, str) else (padding, padding)
    if any(isinstance(v, int) and v < 0 for v in both):
        raise LowRankError(f"padding cannot be negative: {padding!r}.")
    sides = [tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else (v, v) for v in both]
    if [len(side) for side in sides] != [2, 2] or not all(isinstance(v, int) for side in sides for v in side):
        raise LowRankError(f'padding is "same", "valid", a number or a pair, not {padding!r}.')
    (top, bottom), (left, right) = sides
    return (top, bottom), (left, right)  # type: ignore[return-value]


def offsets(group: FilterGroup, kernel: Pair) -> Pair:
    """Rows and columns of the enclosing kernel before the group's first: centre taps (k-1)//2 coincide."""
    height, width = ((size - 1) // 2 - (taps - 1) // 2 for size, taps in zip(kernel, _shape(group), strict=True))
    return height, width


def recentred(sides: Sides, kernel: Pair, enclosing: Pair, dilation: Pair) -> Sides:
    """The padding of the dense kernel, for an enclosing kernel of another size on the same output grid."""
    shift = offsets(FilterGroup(*kernel, 1), enclosing)
    (top, bottom), (left, right) = (
        (before + step * first, after + step * (new - old - first))
        for (before, after), old, new, step, first in zip(sides, kernel, enclosing, dilation, shift, strict=True)
    )
    return (top, bottom), (left, right)


def symmetric(sides: Sides) -> bool:
    return all(before == after >= 0 for before, after in sides)


def _shape(group: FilterGroup) -> Pair:
    return group.height, group.width
