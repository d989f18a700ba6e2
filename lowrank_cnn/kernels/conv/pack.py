"""Weights laid out for the kernels: rows of input channels, one row per tap and filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowrank_cnn.kernels.problem import Problem, TapGroup
from lowrank_cnn.kernels.tiles import round_up

LAYOUTS = {
    "hopper": "rows",
    "tiled": "rows",
    "stem": "union",
    "gather": "union",
    "folded": "blocks",
    "window": "windows",
    "overlap": "overlaps",
}
"""In which layout each kernel reads its weights; `launch.pack_weights` makes them."""


def layout_of(plan: str) -> str:
    """The layout of the weights for a plan, given as text."""
    return LAYOUTS[plan.partition("-")[0]]


def copy_by_torch(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each group's [filters, channels, height, width] into its target, one by one."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.detach())


def copy_groups(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """The same, where the kernels run: on a GPU all in one launch."""
    if not sources[0].is_cuda:
        return copy_by_torch(sources, targets)
    from lowrank_cnn.kernels.conv.copy_groups import MOST_GROUPS, launch_copy

    if len(sources) > MOST_GROUPS:
        return copy_by_torch(sources, targets)
    return launch_copy(*sources, targets=targets)


def pack_rows(weights: Sequence[Tensor], dtype: torch.dtype, copy: Callable[..., None] = copy_groups) -> Tensor:
    """[sum of taps * filters, channels]: group by group, tap by tap, filter by filter.

    Weights that already lie so in one memory (see `laid_out`) are taken as they lie.
    """
    if (rows := _lying(weights, dtype)) is not None:
        return rows
    sizes = [weight[:, 0].numel() for weight in weights]
    rows = weights[0].new_empty((sum(sizes), weights[0].shape[1]), dtype=dtype)
    copy(weights, [_as_weight(part, w) for part, w in zip(rows.split(sizes), weights, strict=True)])
    return rows


def _as_weight(rows: Tensor, weight: Tensor) -> Tensor:
    """A group's packed rows seen as its [filters, channels, height, width]."""
    return rows.view(weight.shape[2], weight.shape[3], weight.shape[0], -1).permute(2, 3, 0, 1)


def laid_out(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of the groups' weights in one memory, as the kernels read them: packing them later costs nothing."""
    sizes = [weight[:, 0].numel() for weight in weights]
    parts = pack_rows(weights, dtype, copy_by_torch).split(sizes)  # also where no kernel can be built
    return [_as_weight(part, weight) for part, weight in zip(parts, weights, strict=True)]


def _lying(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    first, channels = weights[0], weights[0].shape[1]
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    if place % 16:  # a view into other parameters, say: fetches begin every 16 bytes
        return None
    for weight in weights:
        ordered = weight.permute(2, 3, 0, 1).is_contiguous() and weight.dtype == dtype
        if not ordered or weight.data_ptr() != place or weight.untyped_storage().data_ptr() != storage:
            return None
        place += weight.numel() * dtype.itemsize
    rows = sum(weight.numel() for weight in weights) // channels
    return first.detach().as_strided((rows, channels), (channels, 1))


def union_taps(groups: Sequence[TapGroup]) -> list[tuple[int, int]]:
    """Every offset from an output pixel that some group reads, as (rows down, columns right), in order."""
    return sorted(
        {
            (row - group.top, column - group.left)
            for group in groups
            for row in range(group.height)
            for column in range(group.width)
        }
    )


def pack_union(weights: Sequence[Tensor], problem: Problem, depth: int, dtype: torch.dtype) -> Tensor:
    """[depth, filters]: all groups as one matrix over the union of their taps, zero where a group has none.

    With few input channels the union still fits one step of the matrix unit (3x1 and 1x3 over three
    channels: 5 taps x 3 = 15 of 16), and the pixels are gathered once for all groups.
    """
    taps = union_taps(problem.groups)
    matrix = weights[0].new_zeros((depth, problem.filters), dtype=dtype)
    whole = matrix[: len(taps) * problem.channels].view(len(taps), problem.channels, problem.filters)
    first = 0
    for group, weight in zip(problem.groups, weights, strict=True):
        values = weight.permute(2, 3, 1, 0).reshape(group.taps, problem.channels, group.filters)
        for place, value in zip(_places(group, taps), values, strict=True):
            whole[place, :, first : first + group.filters] = value
        first += group.filters
    return matrix


def unpack_union(matrix: Tensor, problem: Problem) -> list[Tensor]:
    """The groups' [filters, channels, height, width] out of [filters, depth], the union's matrix turned."""
    taps = union_taps(problem.groups)
    whole = matrix[:, : len(taps) * problem.channels].reshape(-1, len(taps), problem.channels)
    parts = whole.split([group.filters for group in problem.groups])
    return [
        torch.stack([part[:, place] for place in _places(group, taps)], 2).unflatten(
            2, (group.height, group.width)
        )
        for part, group in zip(parts, problem.groups, strict=True)
    ]


def unpack_rows(rows: Tensor, problem: Problem) -> list[Tensor]:
    """The groups' [filters, channels, height, width] out of rows as `pack_rows` lays them."""
    parts = rows.split([group.taps * group.filters for group in problem.groups])
    return [
        part.view(group.height, group.width, group.filters, -1).permute(2, 3, 0, 1)
        for part, group in zip(parts, problem.groups, strict=True)
    ]


def pack_turned(weights: Sequence[Tensor], leads: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[sum of taps * channels, most filters]: rows by group, tap and input channel.

    Zeros stand after a group's filters, and as many before them as its lead says.
    """
    most = max(lead + weight.shape[0] for weight, lead in zip(weights, leads, strict=True))
    most = round_up(most, 16 // dtype.itemsize)
    even = all(weight.shape[0] == most for weight in weights)
    sizes = [weight[0].numel() for weight in weights]
    make = weights[0].new_empty if even else weights[0].new_zeros
    rows = make((sum(sizes), most), dtype=dtype)
    targets = [
        part.view(*weight.shape[2:], weight.shape[1], most)[..., lead : lead + weight.shape[0]].permute(3, 2, 0, 1)
        for part, weight, lead in zip(rows.split(sizes), weights, leads, strict=True)
    ]
    copy_groups(weights, targets)
    return rows


def _places(group: TapGroup, taps: list[tuple[int, int]]) -> list[int]:
    """Where a group's taps, row by row, stand in the union's."""
    return [
        taps.index((row - group.top, column - group.left))
        for row in range(group.height)
        for column in range(group.width)
    ]
