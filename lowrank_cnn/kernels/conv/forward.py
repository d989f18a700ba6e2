"""Run the forward of a plan: pack the weights for its kernel, launch it, and gather statistics if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.conv import equivalent as fold
from lowrank_cnn.kernels.conv import equivalent as lengthen
from lowrank_cnn.kernels.conv import gather, hopper_plan, overlap_plan, tiled
from lowrank_cnn.kernels.conv import hopper_plan as window_plan
from lowrank_cnn.kernels.conv.pack import pack_rows, pack_union
from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan
from lowrank_cnn.kernels.device import on_its_device, start
from lowrank_cnn.kernels.problem import ConvTensors, Problem, pixels_last


@on_its_device
def run_plan(
    plan: KernelPlan,
    problem: Problem,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    codes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Run a plan and return the result, channels-last; `codes`, if given, are filled for the backward.

    Weights are packed at every call. A packed copy cannot be kept here: a replayed CUDA graph may change a
    parameter without changing its version. `run_packed` takes a copy that its owner keeps.
    """
    packed = pack_weights(KERNELS[plan.kernel].layout, problem, weights, x.dtype)
    return run_packed(plan, problem, ConvTensors(x, packed, bias, codes, residual))


@on_its_device
def run_packed(plan: KernelPlan, problem: Problem, given: ConvTensors) -> Tensor:
    """As `run_plan`, with weights in the layout of the plan's kernel."""
    if given.residual is not None:
        _check_residual(problem, given.residual)
    if plan.kernel == "folded":
        inner = fold.folded(problem)
        assert inner is not None
        problem, given = inner, given._replace(x=fold.fold_pixels(given.x, problem.stride))
    problem = _with_zeros(plan.kernel, problem)
    return _launcher(plan.kernel)(problem, given, plan.tile)


def pack_weights(layout: str, problem: Problem, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights in a layout of `plans.KERNELS`; it depends on groups and stride, not on the input's size."""
    if layout == "windows":
        return window_plan.pack_windows(weights, problem, dtype)
    if layout == "overlaps":
        return overlap_plan.pack_overlap(weights, problem, dtype)
    if layout == "union":
        return pack_union(weights, problem, gather.gathered_values(problem), dtype)
    if layout == "lengthened":
        return lengthen.pack_lengthened(weights, problem, dtype)
    if layout == "enclosed":
        return lengthen.pack_enclosed(weights, problem, dtype)
    return pack_rows(folded_weights(problem, weights) if layout == "blocks" else weights, dtype)


@on_its_device
def run_with_statistics(
    plan: KernelPlan, problem: Problem, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a plan; returns the result and its mean and biased variance per channel in float32."""
    packed = pack_weights(KERNELS[plan.kernel].layout, problem, weights, x.dtype)
    count = _part_count(plan, problem)
    if not count:
        y = run_packed(plan, problem, ConvTensors(x, packed, bias))
        return y, *launch_merge(launch_parts(y))
    parts = empty_parts(count, x, problem.filters)
    y = run_packed(plan, problem, ConvTensors(x, packed, bias, parts=parts))
    return y, *launch_merge(parts)


def _part_count(plan: KernelPlan, problem: Problem) -> int:
    """The number of parts of the statistics that a plan stores; 0 if it stores none."""
    if plan.kernel == "tiled":
        return tiled.part_count(problem, plan.tile)
    if KERNELS[plan.kernel].tile is not hopper_plan.HopperTile:
        return 0
    return hopper_plan.part_count(_with_zeros(plan.kernel, problem), plan.tile)


def packed_shape(layout: str, problem: Problem) -> tuple[int, int]:
    """The shape of what `pack_weights` returns."""
    if layout == "windows":
        return 2 * window_plan.ROWS_READ * problem.filters, window_plan.PLACES**2
    if layout == "overlaps":
        return len(overlap_plan.slabs_of(problem)) * problem.filters, 4 * overlap_plan.PLACES
    if layout == "union":
        return gather.gathered_values(problem), problem.filters
    inner = fold.folded(problem) if layout == "blocks" else _with_zeros(layout, problem)
    assert inner is not None
    return sum(group.taps * group.filters for group in inner.groups), inner.channels


def folded_weights(problem: Problem, weights: Sequence[Tensor]) -> list[Tensor]:
    """The groups' weights for the folded problem (see `fold`)."""
    inner = fold.folded(problem)
    assert inner is not None
    pairs = zip(weights, problem.groups, strict=True)
    return [fold.fold_weights(weight, group, problem.stride, inner.channels) for weight, group in pairs]


def _with_zeros(kernel: str, problem: Problem) -> Problem:
    """The problem that a kernel runs: if lengthened or enclosed, with zeros around the taps of the groups."""
    if kernel == "enclosed":
        return problem.as_dense
    form = lengthen.lengthened(problem) if kernel == "lengthened" else problem
    assert form is not None
    return form


def _check_residual(problem: Problem, residual: Tensor) -> None:
    size = (problem.batch, problem.filters, problem.out_height, problem.out_width)
    if tuple(residual.shape) != size:
        found, wanted = "x".join(map(str, residual.shape)), "x".join(map(str, size))
        raise LowRankError(f"the residual is {found}; it must be {wanted}, as what it is added to.")


def _launcher(kernel: str) -> Callable[..., Tensor]:
    """The launcher of a kernel, imported when it is used: those for Hopper need Gluon."""
    module, name = KERNELS[kernel].launcher.split(".")
    return getattr(import_module(f"lowrank_cnn.kernels.conv.{module}"), name)


# Mean and variance per channel of a conv's results, for the batch norm behind it.
#
# The epilogues of `tiled` and `hopper` store parts: count, mean and sum of squared distances from that mean, for
# the pixels of one box, as [3, parts, channels] in float32. Other kernels' results are read again, in parts of
# PIXELS pixels. Parts are merged by the formula of Chan, Golub and LeVeque, MERGED at a time, in a fixed order:
# results are reproducible, and a large mean does not cancel the digits of a small variance.

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false


MERGED = 128
"""Parts that one program merges."""
LANES = 32
PIXELS = 128
"""Pixels of a part, for kernels whose epilogue stores none."""


@triton.jit
def merge_parts(
    parts,  # [3, count, total] float32
    merged,  # [3, programs, total] float32, written
    count, total, MERGED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Merge `MERGED` parts to one, for a block of channels."""
    part = tl.program_id(0) * MERGED + tl.arange(0, MERGED)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = (part < count)[:, None] & (lane < total)[None, :]
    place = part.to(tl.int64)[:, None] * total + lane[None, :]
    plane = count.to(tl.int64) * total
    n = tl.load(parts + place, mask=inside, other=0.0)
    mean = tl.load(parts + plane + place, mask=inside, other=0.0)
    squares = tl.load(parts + 2 * plane + place, mask=inside, other=0.0)
    pixels = tl.sum(n, 0)
    middle = tl.sum(n * mean, 0) / tl.maximum(pixels, 1.0)
    away = mean - middle[None, :]
    spread = tl.sum(squares + n * away * away, 0)
    target = tl.program_id(0) * total + lane
    plane = tl.num_programs(0) * total
    tl.store(merged + target, pixels, mask=lane < total)
    tl.store(merged + plane + target, middle, mask=lane < total)
    tl.store(merged + 2 * plane + target, spread, mask=lane < total)


@triton.jit
def parts_of_pixels(
    y,  # [pixels, total]
    parts,  # [3, programs, total] float32, written
    pixels, total, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The part of `PIXELS` pixels, for a block of channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = (pixel < pixels)[:, None] & (lane < total)[None, :]
    value = tl.load(y + pixel.to(tl.int64)[:, None] * total + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    n = tl.minimum(pixels - tl.program_id(0) * PIXELS, PIXELS).to(tl.float32)
    mean = tl.sum(value, 0) / n
    away = tl.where(inside, value - mean[None, :], 0.0)
    target = tl.program_id(0).to(tl.int64) * total + lane
    plane = tl.num_programs(0).to(tl.int64) * total
    tl.store(parts + target, mean * 0.0 + n, mask=lane < total)
    tl.store(parts + plane + target, mean, mask=lane < total)
    tl.store(parts + 2 * plane + target, tl.sum(away * away, 0), mask=lane < total)


def empty_parts(count: int, like: Tensor, channels: int) -> Tensor:
    """Memory for the parts that a kernel stores."""
    return torch.empty((3, count, channels), device=like.device, dtype=torch.float32)


def launch_parts(y: Tensor) -> Tensor:
    """The parts of [N, C, H, W] maps."""
    channels, pixels = y.shape[1], y.numel() // y.shape[1]
    parts = empty_parts(ceil_div(pixels, PIXELS), y, channels)
    start(parts_of_pixels, (parts.shape[1], ceil_div(channels, LANES)))(
        pixels_last(y), parts, pixels, channels, PIXELS=PIXELS, LANES=LANES
    )
    return parts


def launch_merge(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, from all parts."""
    while parts.shape[1] > 1:
        _, count, channels = parts.shape
        merged = empty_parts(ceil_div(count, MERGED), parts, channels)
        start(merge_parts, (merged.shape[1], ceil_div(channels, LANES)))(
            parts, merged, count, channels, MERGED=MERGED, LANES=LANES
        )
        parts = merged
    count, mean, squares = parts.unbind(0)
    return mean[0].clone(), squares[0] / count[0]
