"""Pack weights into the layouts that the kernels read, and unpack gradients from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from lowrank_cnn.core.numbers import round_up
from lowrank_cnn.kernels.problem import Layout, Pair, Problem, TapGroup, power_above


def copy_groups(sources: Sequence[Tensor], targets: Sequence[Tensor], *, by_torch: bool = False) -> None:
    """Copy each group's [filters, channels, height, width] into its target; on a GPU four in one launch."""
    if sources[0].is_cuda and not by_torch:
        from lowrank_cnn.kernels.conv.copies import launch_copy

        return launch_copy(*sources, targets=targets)
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.detach())
    return None


def pack_rows(weights: Sequence[Tensor], dtype: torch.dtype, *, by_torch: bool = False) -> Tensor:
    """[sum of taps * filters, channels]: group by group, tap by tap, filter by filter.

    Weights that already have this layout (see `laid_out`) are not copied.
    """
    if (rows := _already_packed(weights, dtype)) is not None:
        return rows
    channels = weights[0].shape[1]
    rows = weights[0].new_empty((sum(weight.numel() for weight in weights) // channels, channels), dtype=dtype)
    copy_groups(weights, unpack_rows(rows, [weight.shape for weight in weights]), by_torch=by_torch)
    return rows


def unpack_rows(rows: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the groups' [filters, channels, height, width], from rows as in `pack_rows`."""
    parts = rows.split([filters * height * width for filters, _, height, width in shapes])
    return [
        part.view(height, width, filters, -1).permute(2, 3, 0, 1)
        for part, (filters, _, height, width) in zip(parts, shapes, strict=True)
    ]


def laid_out(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of the groups' weights in the memory of `pack_rows`, so that packing them later costs nothing."""
    rows = pack_rows(weights, dtype, by_torch=True)  # works without Triton as well
    return unpack_rows(rows, [weight.shape for weight in weights])


def _already_packed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    first, channels = weights[0], weights[0].shape[1]
    if first.device.type == "meta":  # a tracer asks for the shape alone
        return None
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    if place % 16:  # fetches begin at multiples of 16 bytes, which a view of other parameters may not
        return None
    for weight in weights:
        ordered = weight.permute(2, 3, 0, 1).is_contiguous() and weight.dtype == dtype
        if not ordered or weight.data_ptr() != place or weight.untyped_storage().data_ptr() != storage:
            return None
        place += weight.numel() * dtype.itemsize
    rows = sum(weight.numel() for weight in weights) // channels
    return first.detach().as_strided((rows, channels), (channels, 1))


def taps_of(group: TapGroup) -> list[Pair]:
    """The offsets from an output pixel that a group reads, row by row, as (rows down, columns right)."""
    rows, columns = range(-group.top, group.height - group.top), range(-group.left, group.width - group.left)
    return list(product(rows, columns))


def union_taps(groups: Sequence[TapGroup]) -> list[Pair]:
    """Every offset from an output pixel that some group reads, sorted."""
    return sorted({tap for group in groups for tap in taps_of(group)})


def pack_union(weights: Sequence[Tensor], problem: Problem, dtype: torch.dtype) -> Tensor:
    """[values, filters]: all groups as one matrix over the union of their taps, zero for taps that a group lacks.

    With few input channels the union fits one matrix instruction (3x1 and 1x3 over three channels: 5 taps x 3 = 15
    of 16), and pixels are gathered once for all groups. The values are padded to a multiple of the kernels' steps
    and of the instruction's depth.
    """
    taps = union_taps(problem.groups)
    used = len(taps) * problem.channels
    values = power_above(used) if used <= 64 else round_up(used, 64)
    matrix = weights[0].new_zeros((values, problem.filters), dtype=dtype)
    whole = matrix[:used].view(len(taps), problem.channels, problem.filters)
    for group, first, weight in zip(problem.groups, problem.begins, weights, strict=True):
        parts = weight.permute(2, 3, 1, 0).reshape(group.taps, problem.channels, group.filters)
        for tap, part in zip(taps_of(group), parts, strict=True):
            whole[taps.index(tap), :, first : first + group.filters] = part
    return matrix


def unpack_union(matrix: Tensor, problem: Problem) -> list[Tensor]:
    """The groups' [filters, channels, height, width], from the union's transposed matrix [filters, depth]."""
    taps = union_taps(problem.groups)
    whole = matrix[:, : len(taps) * problem.channels].reshape(-1, len(taps), problem.channels)
    parts = whole.split([group.filters for group in problem.groups])
    return [
        torch.stack([part[:, taps.index(tap)] for tap in taps_of(group)], 2).unflatten(2, (group.height, -1))
        for part, group in zip(parts, problem.groups, strict=True)
    ]


ROWS = Layout("rows", lambda weights, problem, dtype: pack_rows(weights, dtype))
UNION = Layout("union", pack_union)


def pack_turned(weights: Sequence[Tensor], leads: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[sum of taps * channels, most filters]: a row per group, tap and input channel.

    A group's filters have as many zeros before them as its lead, and zeros behind them.
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
