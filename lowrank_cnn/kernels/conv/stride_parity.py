"""Compute the gradients of a strided conv as those of convs of stride 1, one per parity of pixels, without copies.

At stride s, tap t of a filter reads row s o + t - top for output row o. The rows of one parity p (p, p + s, p + 2
s, ...) form an image of their own, a view of the same memory. Every s-th tap reads it, and over that image these
taps are a filter of stride 1. The same holds for columns, so stride 2 gives four images. 3x1 and 1x3 taps become
2x1 taps of the odd rows, 1x2 taps of the odd columns, and 1x1 taps of the pixels that are even both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
from torch import Tensor

from lowrank_cnn.kernels.problem import Pair, Problem, TapGroup, empty_maps
from lowrank_cnn.system.arithmetic import ceil_div


@dataclass(frozen=True)
class ParityConv:
    """The conv of stride 1 over the pixels of one parity.

    `members` are the groups with taps there, `begins` their first filters among those of all groups, and `taps`
    the first row and column of each member's taps.
    """

    parity: Pair
    problem: Problem
    members: tuple[int, ...]
    begins: tuple[int, ...]
    taps: tuple[Pair, ...]


def parity_convs(problem: Problem) -> list[ParityConv]:
    """One conv for each parity that any tap reads."""
    begins = list(accumulate((group.filters for group in problem.groups), initial=0))
    found = []
    for parity in product(range(problem.stride[0]), range(problem.stride[1])):
        parts = {index: _part(group, parity, problem.stride) for index, group in enumerate(problem.groups)}
        members = tuple(index for index, part in parts.items() if part is not None)
        if members:
            groups = tuple(parts[index][0] for index in members)  # type: ignore[index]
            taps = tuple(parts[index][1] for index in members)  # type: ignore[index]
            starts = tuple(begins[index] for index in members)
            found.append(ParityConv(parity, _over(problem, parity, groups), members, starts, taps))
    return found


def unsupported(problem: Problem) -> str | None:
    """Why the views cannot be fetched, or None if they can: they must begin at multiples of 16 bytes."""
    whole = 16 // problem.dtype.itemsize
    if problem.channels % whole or any(group.filters % whole for group in problem.groups):
        return "channels or filters that are not whole blocks of 16 bytes"
    if min(problem.height - problem.stride[0], problem.width - problem.stride[1]) < 0:
        return "an image smaller than the stride"
    return None


def pixels_of(pixels: Tensor, conv: ParityConv, stride: Pair) -> Tensor:
    """The pixels of a parity, a view [N, H', W', C]."""
    return pixels[:, conv.parity[0] :: stride[0], conv.parity[1] :: stride[1]]


def strided_input_gradient(
    problem: Problem,
    g: Tensor,
    weights: Sequence[Tensor],
    add_up: Callable[[ParityConv, Tensor, list[Tensor], Tensor], None],
) -> Tensor:
    """The gradient of the input, [N, C, H, W]; `add_up` writes that of one parity into its view."""
    convs = parity_convs(problem)
    maps = empty_maps((problem.batch, problem.channels, problem.height, problem.width), g)
    if len(convs) < problem.stride[0] * problem.stride[1]:
        maps.zero_()  # no tap reads the pixels of some parity
    for conv in convs:
        taps = [weights[i][:, :, t :: problem.stride[0], u :: problem.stride[1]] for i, (t, u) in _taps(conv)]
        add_up(conv, g, taps, pixels_of(maps.permute(0, 2, 3, 1), conv, problem.stride))
    return maps


def weight_gradients(
    problem: Problem, g: Tensor, pixels: Tensor, gradient: Callable[[Problem, Tensor, Tensor], list[Tensor]]
) -> list[Tensor]:
    """The groups' gradients in float32; `gradient` computes those of a conv of stride 1."""
    sizes = [(group.filters, problem.channels, group.height, group.width) for group in problem.groups]
    found = [torch.empty(size, device=g.device) for size in sizes]  # every tap reads one parity
    for conv in parity_convs(problem):
        view = pixels_of(pixels, conv, problem.stride)
        for first, last in _neighbours(conv):
            part = replace(conv.problem, groups=conv.problem.groups[first:last])
            begin = conv.begins[first]
            parts = gradient(part, g[..., begin : begin + part.filters], view)
            for (index, (t, u)), value in zip(_taps(conv)[first:last], parts, strict=True):
                found[index][:, :, t :: problem.stride[0], u :: problem.stride[1]] = value
    return found


def _taps(conv: ParityConv) -> list[tuple[int, Pair]]:
    return list(zip(conv.members, conv.taps, strict=True))


def _neighbours(conv: ParityConv) -> list[Pair]:
    """Ranges of members whose filters are neighbours, as (first, after the last)."""
    stretches: list[list[int]] = []
    for place, (begin, group) in enumerate(zip(conv.begins, conv.problem.groups, strict=True)):
        if stretches and stretches[-1][2] == begin:
            stretches[-1][1:] = [place + 1, begin + group.filters]
        else:
            stretches.append([place, place + 1, begin + group.filters])
    return [(first, last) for first, last, _ in stretches]


def _part(group: TapGroup, parity: Pair, stride: Pair) -> tuple[TapGroup, Pair] | None:
    """The taps of a group that read a parity, as a group of stride 1, and the first of them."""
    rows, top, first = _side(group.height, group.top, parity[0], stride[0])
    columns, left, begin = _side(group.width, group.left, parity[1], stride[1])
    if rows <= 0 or columns <= 0:
        return None
    return TapGroup(rows, columns, group.filters, top, left), (first, begin)


def _side(taps: int, before: int, parity: int, stride: int) -> tuple[int, int, int]:
    """Taps along one side that read a parity, how far before the output they begin, and the first of them."""
    first = (parity + before) % stride
    return ceil_div(taps - first, stride), (before + parity - first) // stride, first


def _over(problem: Problem, parity: Pair, groups: tuple[TapGroup, ...]) -> Problem:
    return replace(
        problem,
        height=ceil_div(problem.height - parity[0], problem.stride[0]),
        width=ceil_div(problem.width - parity[1], problem.stride[1]),
        groups=groups,
        stride=(1, 1),
        activation=None,
        pool=None,
    )
