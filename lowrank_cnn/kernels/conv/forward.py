"""Run the forward of a plan: pack the weights for its kernel, launch it, and gather statistics if asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import ceil_div
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
    packed = KERNELS[plan.kernel].layout.pack(weights, problem, x.dtype)
    return run_packed(plan, problem, ConvTensors(x, packed, bias, codes, residual))


@on_its_device
def run_packed(plan: KernelPlan, problem: Problem, given: ConvTensors) -> Tensor:
    """As `run_plan`, with weights in the layout of the plan's kernel."""
    if given.residual is not None:
        size = (problem.batch, problem.filters, problem.out_height, problem.out_width)
        if tuple(given.residual.shape) != size:
            found, wanted = ("x".join(map(str, shape)) for shape in (given.residual.shape, size))
            raise LowRankError(f"the residual is {found}; it must be {wanted}, like the result of the conv.")
    y = KERNELS[plan.kernel].launch(problem, given, plan.tile)
    if given.result is None or y is given.result:
        return y
    return given.result.copy_(y)


@on_its_device
def run_with_statistics(plan: KernelPlan, problem: Problem, given: ConvTensors) -> tuple[Tensor, Tensor]:
    """Run a plan; returns the result, and its mean and biased variance per channel as [2, filters] in float32."""
    count = KERNELS[plan.kernel].part_count(problem, plan.tile)
    parts = empty_parts(count, given.x, problem.filters) if count else None
    y = run_packed(plan, problem, given._replace(parts=parts))
    return y, launch_merge(launch_parts(y) if parts is None else parts)


# Mean and variance per channel of a conv's results, for the batch norm after it.
#
# The epilogues of `tiled` and `hopper` store parts: count, mean and sum of squared distances from that mean, for
# the pixels of one box, as [3, parts, channels] in float32. Other kernels' results are read again, in parts of
# PIXELS pixels. Parts are merged by the formula of Chan, Golub and LeVeque, MERGED at a time, in a fixed order:
# results are reproducible, and a large mean does not cancel the digits of a small variance.

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


def launch_merge(parts: Tensor) -> Tensor:
    """Mean and biased variance per channel, [2, channels], from all parts."""
    while parts.shape[1] > 1:
        _, count, channels = parts.shape
        merged = empty_parts(ceil_div(count, MERGED), parts, channels)
        start(merge_parts, (merged.shape[1], ceil_div(channels, LANES)))(
            parts, merged, count, channels, MERGED=MERGED, LANES=LANES
        )
        parts = merged
    count, mean, squares = parts.unbind(0)
    return torch.stack([mean[0], squares[0] / count[0]])
