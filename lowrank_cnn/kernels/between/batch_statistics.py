"""Mean and reciprocal deviation of a batch per channel, and the running statistics of a batch norm.

Layout: maps are [pixels, channels], channels-last. The pixels are divided among as many programs as the GPU runs
at once; each goes over its share in blocks of PIXELS x LANES and stores its mean and squared deviations. A second,
small kernel merges the shares and updates the running statistics. There are no atomics, so results are
reproducible. If a conv's epilogue has gathered the statistics, only the last step remains (`batch_norm_track`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import lanes_of, pixels_last, power_above

# pyright: reportCallIssue=false


VALUES = 4096
"""Values per program and round: with 128 threads, four loads of 16 bytes of bfloat16 each."""
RESIDENT = {4096: 3, 2048: 4}
"""Programs per multiprocessor, by values of a round: as many as its registers hold at once."""
PARTS = 512
"""The most shares: the merge holds all shares of its channels at once."""
MERGED = 8
"""Channels per program of the merge."""


@triton.jit
def statistics(
    x,  # [pixels, TOTAL]
    means,  # [shares, TOTAL] float32, written
    squares,  # [shares, TOTAL] float32, written: sums of squared deviations
    pixels,
    TOTAL: tl.constexpr, ROUNDS: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The mean and the sum of squared deviations of this program's pixels.

    Sums are of the differences from the mean of the program's first block. Cancellation is then bounded by the
    number of blocks, however far the mean is from zero.
    """
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start = tl.program_id(0) * ROUNDS * PIXELS
    row = tl.arange(0, PIXELS)
    place = start * TOTAL + row[:, None] * TOTAL + lane[None, :]
    inside = (lane < TOTAL)[None, :]
    keep = (start + row < pixels)[:, None] & inside
    block = tl.load(x + place, mask=keep, other=0.0).to(tl.float32)
    # The mean of the first block, which is subtracted from all values.
    about = tl.sum(block, 0) / tl.minimum(pixels - start, PIXELS)
    above = tl.zeros((PIXELS, LANES), tl.float32)
    squared = tl.zeros((PIXELS, LANES), tl.float32)
    for turn in tl.range(0, ROUNDS, loop_unroll_factor=2):
        keep = (start + turn * PIXELS + row < pixels)[:, None] & inside
        value = tl.load(x + place + turn * PIXELS * TOTAL, mask=keep, other=0.0).to(tl.float32)
        value = tl.where(keep, value - about[None, :], 0.0)
        above += value
        squared += value * value
    summed = tl.sum(above, 0)
    offset = summed / tl.minimum(pixels - start, ROUNDS * PIXELS)
    target = tl.program_id(0) * TOTAL + lane
    tl.store(means + target, about + offset, mask=lane < TOTAL)
    tl.store(squares + target, tl.sum(squared, 0) - summed * offset, mask=lane < TOTAL)


@triton.jit
def keep_running(
    centre, squared,  # [LANES]: the batch's mean and sum of squared deviations
    running_mean, running_var,  # [TOTAL], updated
    tracked,  # [1] int64, updated
    lane, inside, pixels, momentum,
    RUNNING: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Update the running statistics and the count of batches, as torch does."""
    if RUNNING:
        old = tl.load(running_mean + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_mean + lane, old + momentum * (centre - old), mask=inside)
        old = tl.load(running_var + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_var + lane, old + momentum * (squared / (pixels - 1) - old), mask=inside)
    if TRACKED:
        tl.store(tracked, tl.load(tracked) + 1, mask=tl.program_id(0) == 0)


@triton.jit
def merge_shares(
    means, squares,  # [shares, TOTAL] float32
    mean, rstd,  # [TOTAL] float32, written
    running_mean, running_var,  # [TOTAL], updated
    tracked,  # [1] int64, updated: the count of batches
    pixels, share, shares, momentum, eps,
    TOTAL: tl.constexpr, RUNNING: tl.constexpr, TRACKED: tl.constexpr, SHARES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of shares of `share` pixels each (Chan et al. 1979), and update the running ones."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < TOTAL
    part = tl.arange(0, SHARES)
    keep = (part < shares)[:, None] & inside[None, :]
    count = tl.minimum(pixels - part * share, share).to(tl.float32)[:, None]
    place = part[:, None] * TOTAL + lane[None, :]
    # The mean of all, as a weighted sum of differences from the first share's mean.
    first = tl.load(means + lane, mask=inside, other=0.0)
    above = tl.where(keep, (tl.load(means + place, mask=keep, other=0.0) - first[None, :]) * count, 0.0)
    centre = first + tl.sum(above, 0) / pixels
    # Squared deviations within the shares, and those of the shares' means.
    off = tl.load(means + place, mask=keep, other=0.0) - centre[None, :]
    within = tl.load(squares + place, mask=keep, other=0.0)
    squared = tl.sum(tl.where(keep, within + off * off * count, 0.0), 0)
    squared = tl.where(squared < 0, 0.0, squared)
    tl.store(mean + lane, centre, mask=inside)
    tl.store(rstd + lane, tl.rsqrt(squared / pixels + eps), mask=inside)
    keep_running(
        centre, squared, running_mean, running_var, tracked, lane, inside, pixels, momentum, RUNNING, TRACKED
    )  # fmt: skip


@triton.jit
def track(
    mean, variance,  # [TOTAL] float32
    rstd,  # [TOTAL] float32, written
    running_mean, running_var,  # [TOTAL], updated
    tracked,  # [1] int64, updated: the count of batches
    pixels, momentum, eps,
    TOTAL: tl.constexpr, RUNNING: tl.constexpr, TRACKED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The last step of `merge_shares` for a known mean and variance."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < TOTAL
    centre = tl.load(mean + lane, mask=inside, other=0.0)
    spread = tl.load(variance + lane, mask=inside, other=0.0)
    tl.store(rstd + lane, tl.rsqrt(spread + eps), mask=inside)
    keep_running(
        centre, spread * pixels, running_mean, running_var, tracked, lane, inside, pixels, momentum,
        RUNNING, TRACKED,
    )  # fmt: skip


class Sharing(NamedTuple):
    """How a sum over pixels is divided: channels and pixels of a block, blocks per program, programs."""

    lanes: int
    block: int
    rounds: int
    count: int


def split_sum(pixels: int, channels: int, device: torch.device, values: int | None = None) -> Sharing:
    """Divide a sum over pixels. A kernel that needs many registers per value takes fewer `values` per round."""
    values, lanes = values or VALUES, lanes_of(channels)
    block = values // lanes
    programs = gpu.multiprocessors(device) * RESIDENT.get(values, 3)
    wanted = min(PARTS, max(1, programs // ceil_div(channels, lanes)))
    blocks = ceil_div(pixels, block)
    rounds = ceil_div(blocks, wanted)
    return Sharing(lanes, block, rounds, ceil_div(blocks, rounds))


RUNNING = ("running_mean", "running_var", "tracked")


@operator(
    "batch_norm_statistics",
    lambda x, *_: tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2)),
    RUNNING,
)
def batch_norm_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of a batch per channel, in float32; updates the running ones and their count.

    It is an operator of its own because torch allows no gradient for operators that change their arguments. The
    gradient of the normalised result accounts for the statistics being functions of the input.
    """
    channels, pixels = x.shape[1], x.numel() // x.shape[1]
    share = split_sum(pixels, channels, x.device)
    parts = torch.empty((2, share.count, channels), device=x.device, dtype=torch.float32)
    statistics[(share.count, ceil_div(channels, share.lanes))](
        pixels_last(x), parts[0], parts[1], pixels,
        TOTAL=channels, ROUNDS=share.rounds, PIXELS=share.block, LANES=share.lanes, num_warps=4,
    )  # fmt: skip
    mean, rstd = (torch.empty(channels, device=x.device, dtype=torch.float32) for _ in range(2))
    updated, flags = _running(running_mean, running_var, tracked, mean)
    merge_shares[(ceil_div(channels, MERGED),)](
        parts[0], parts[1], mean, rstd, *updated, pixels, share.block * share.rounds, share.count, momentum, eps,
        TOTAL=channels, **flags, SHARES=power_above(share.count), LANES=MERGED, num_warps=4,
    )  # fmt: skip
    return mean, rstd


@operator("batch_norm_track", lambda mean, *_: torch.empty_like(mean), RUNNING)
def batch_norm_track(
    mean: Tensor,
    variance: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    pixels: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """The reciprocal deviation of a known mean and (biased) variance; updates the running ones and their count."""
    channels, rstd = len(mean), torch.empty_like(mean)
    lanes = min(256, power_above(channels))
    updated, flags = _running(running_mean, running_var, tracked, mean)
    track[(ceil_div(channels, lanes),)](
        mean, variance, rstd, *updated, pixels, momentum, eps, TOTAL=channels, **flags, LANES=lanes, num_warps=4
    )
    return rstd


def _running(
    mean: Tensor | None, var: Tensor | None, tracked: Tensor | None, unread: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, bool]]:
    """The kernels' pointers to running statistics and their count, `unread` for missing ones, and their flags."""
    running = (unread, unread) if mean is None or var is None else (mean, var)
    flags = {"RUNNING": running[0] is not unread, "TRACKED": tracked is not None}
    return (*running, unread if tracked is None else tracked), flags


# Shared by the batch norm kernels: loading the values of channels, activations and their derivatives.

ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_PI = tl.constexpr(2.5066282746310002)


@triton.jit
def of_channels(
    mean, rstd, weight, bias,  # [TOTAL]
    lane, TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Mean, reciprocal deviation, weight and bias of some channels, in float32, as [1, channels]."""
    inside = lane < TOTAL
    m = tl.load(mean + lane, mask=inside, other=0.0)
    r = tl.load(rstd + lane, mask=inside, other=0.0)
    w = tl.full(lane.shape, 1.0, tl.float32)
    b = tl.zeros(lane.shape, tl.float32)
    if WEIGHT:
        w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    return m[None, :], r[None, :], w[None, :], b[None, :]


@triton.jit
def times_slope(g, z, slope, ACTIVATION: tl.constexpr):
    """The gradient before the activation, from the one after it; at a kink as in torch."""
    if ACTIVATION == "relu":
        g = tl.where(z <= 0, 0.0, g)
    elif ACTIVATION == "leaky_relu":
        g = tl.where(z <= 0, g * slope, g)
    elif ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-z))
        g = g * share * (1.0 + z * (1.0 - share))
    elif ACTIVATION == "gelu":
        g = g * (0.5 * (1.0 + tl.erf(z * ROOT_HALF)) + z * tl.exp(-0.5 * z * z) / ROOT_TWO_PI)
    elif ACTIVATION == "hardswish":
        g = g * tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z * (1.0 / 3.0) + 0.5, 1.0))
    return g


def affine(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The kernels' pointers to values per channel; for a missing weight or bias a pointer that is not read."""
    return mean, rstd, mean if weight is None else weight, mean if bias is None else bias


def affine_gradients(
    sums: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, if there are any, from [2, C]: those of bias and weight in float32."""
    return None if weight is None else sums[1].to(weight.dtype), None if bias is None else sums[0].to(bias.dtype)
