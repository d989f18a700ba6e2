"""The Pareto front: the points that no other beats in both cost and gain."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, gain) that none dominates, by rising cost.

    A point dominates another that costs no less and gains no more, and is worse in one of the two. Equal points
    do not dominate each other: all of them are kept.
    """
    front: list[int] = []
    best = float("-inf")
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[i][1] > best or (front and points[i] == points[front[-1]]):
            front.append(i)
            best = points[i][1]
    return front
