"""Rewrite a problem for the Hopper kernels: groups of one length, or one group, with zeros around the taps.

The Hopper kernels fetch the pixels of a run of taps once, and all runs of a launch have one length. A 3x3 and
a 1x1 group have none in common. With zeros above and below its tap the 1x1 becomes a 3x1: three products in place
of one, where a 3x3 would take nine. The results do not change.

A tile of filters lies within one group. Narrow groups make narrow tiles, which leave most of the matrix unit idle.
As one dense group with more zeros, such a layer may be faster still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lowrank_cnn.kernels.conv.hopper_plan import filters_per_tile, is_strided, run_length, unsupported
from lowrank_cnn.kernels.conv.pack import copy_groups, unpack_rows
from lowrank_cnn.kernels.problem import Problem, TapGroup

LENGTHS = (3, 5)
"""Taps of a run in the forward. At length 1 no tap shares a fetch, and nothing is gained."""
MOST = 2
"""How many times the products may grow. The plain kernels take less than twice as long per product."""
NARROW, MOST_ENCLOSED = 64, 2.5
"""Filters below which a tile is narrow, and how many times the products of narrow groups may grow."""


@lru_cache(maxsize=4096)
def lengthened(problem: Problem, lengths: tuple[int, ...] = LENGTHS) -> Problem | None:
    """The problem with runs of the one of `lengths` that adds the fewest products.

    None if it has such runs already, if every tap is a run of its own, or if the products would grow too much.
    """
    pointwise = all(group.taps == 1 for group in problem.groups)
    if is_strided(problem) or pointwise or run_length(problem) in lengths:
        return None
    found = [tuple(_reaching(group, length) for group in problem.groups) for length in lengths]
    whole = [replace(problem, groups=groups) for groups in found if None not in groups]
    fitting = [longer for longer in whole if run_length(longer) in lengths]
    best = min(fitting, key=lambda longer: longer.macs, default=None)
    return best if best is not None and best.macs <= MOST * problem.macs else None


def is_worth_enclosing(problem: Problem) -> bool:
    """Whether a problem may be faster as one dense group: if others do not run on Hopper, or in narrow tiles."""
    if len(problem.groups) == 1 or problem.as_dense.macs > MOST_ENCLOSED * problem.macs:
        return False
    runs = any(form and unsupported(form) is None for form in (problem, lengthened(problem)))
    return not runs or filters_per_tile(problem) < NARROW


def _reaching(group: TapGroup, length: int) -> TapGroup | None:
    """A group with zeros along one side, so that it is `length` long; None if both sides are longer."""
    rows, columns = length - group.height, length - group.width
    found = []
    if rows >= 0:
        found.append(replace(group, height=length, top=group.top + rows // 2))
    if columns >= 0:
        found.append(replace(group, width=length, left=group.left + columns // 2))
    return min(found, key=lambda longer: longer.taps, default=None)


def pack_lengthened(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """As `pack.pack_rows`, for the lengthened problem."""
    longer = lengthened(problem)
    assert longer is not None
    rows = _zero_rows(longer, weights[0], dtype)
    copy_groups(weights, own_taps(unpack_rows(rows, longer), problem, longer.groups))
    return rows


def pack_enclosed(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """As `pack.pack_rows`, for the problem as one dense group."""
    dense = problem.as_dense
    rows = _zero_rows(dense, weights[0], dtype)
    (whole,) = unpack_rows(rows, dense)
    parts = whole.split([group.filters for group in problem.groups])
    copy_groups(weights, own_taps(parts, problem, dense.groups * len(parts)))
    return rows


def _zero_rows(problem: Problem, like: Tensor, dtype: torch.dtype) -> Tensor:
    taps = sum(group.taps * group.filters for group in problem.groups)
    return like.new_zeros((taps, problem.channels), dtype=dtype)


def own_taps(weights: Sequence[Tensor], problem: Problem, wider: Sequence[TapGroup]) -> list[Tensor]:
    """Views of the taps that the groups of the problem itself have, in weights of wider groups."""
    return [
        weight[:, :, wide.top - group.top :, wide.left - group.left :][:, :, : group.height, : group.width]
        for weight, group, wide in zip(weights, problem.groups, wider, strict=True)
    ]
