"""Statistics of a batch per channel, over channels-last maps, and the running ones of a batch norm.

The pixels are shared out among programs, each of which leaves its mean and squared deviations to a small merge.
There are no atomics: the result is the same every time. Statistics that a conv's epilogue has gathered need the
last step alone (`batch_norm_track`).
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels import gpu
from lowrank_cnn.kernels.gpu import on_its_device
from lowrank_cnn.kernels.problem import pixels_last
from lowrank_cnn.kernels.tiles import lanes_of, power_above

VALUES = 4096
"""Values per program and turn: with 128 threads, four loads of 16 bytes of bfloat16 each."""
RESIDENT = {4096: 3, 2048: 4}
"""Programs per multiprocessor that share a sum, by values of a turn: as many as its registers hold at once."""
PARTS = 512
"""The most parts of a sum: the merge holds all parts of its channels at once."""
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
    """Mean and sum of squared deviations of a share of the pixels.

    Sums are taken of what lies above the mean of the share's first block: what cancels is then bounded by the
    number of blocks, however far the mean is from zero.
    """
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start = tl.program_id(0) * ROUNDS * PIXELS
    row = tl.arange(0, PIXELS)
    place = start * TOTAL + row[:, None] * TOTAL + lane[None, :]
    inside = (lane < TOTAL)[None, :]
    keep = (start + row < pixels)[:, None] & inside
    block = tl.load(x + place, mask=keep, other=0.0).to(tl.float32)
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
    centre, squared, running_mean, running_var, tracked, lane, inside, pixels, momentum,
    RUNNING: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Bring the running statistics [TOTAL] up by a batch's mean and squared deviations, as torch does."""
    if RUNNING:
        old = tl.load(running_mean + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_mean + lane, old + momentum * (centre - old), mask=inside)
        old = tl.load(running_var + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_var + lane, old + momentum * (squared / (pixels - 1) - old), mask=inside)
    if TRACKED:
        tl.store(tracked, tl.load(tracked) + 1, mask=tl.program_id(0) == 0)


@triton.jit
def merge(
    means, squares,  # [shares, TOTAL] float32
    mean, rstd,  # [TOTAL] float32, written
    running_mean, running_var,  # [TOTAL], brought up
    tracked,  # one whole number, brought up
    pixels, share, shares, momentum, eps,
    TOTAL: tl.constexpr, RUNNING: tl.constexpr, TRACKED: tl.constexpr, SHARES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Statistics of all pixels from those of shares of `share` pixels (Chan et al. 1979), and the running ones."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < TOTAL
    part = tl.arange(0, SHARES)
    keep = (part < shares)[:, None] & inside[None, :]
    count = tl.minimum(pixels - part * share, share).to(tl.float32)[:, None]
    place = part[:, None] * TOTAL + lane[None, :]
    first = tl.load(means + lane, mask=inside, other=0.0)
    above = tl.where(keep, (tl.load(means + place, mask=keep, other=0.0) - first[None, :]) * count, 0.0)
    centre = first + tl.sum(above, 0) / pixels
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
    running_mean, running_var,  # [TOTAL], brought up
    tracked,  # one whole number, brought up
    pixels, momentum, eps,
    TOTAL: tl.constexpr, RUNNING: tl.constexpr, TRACKED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The last step of `merge`, from a mean and a variance that are known."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < TOTAL
    centre = tl.load(mean + lane, mask=inside, other=0.0)
    spread = tl.load(variance + lane, mask=inside, other=0.0)
    tl.store(rstd + lane, tl.rsqrt(spread + eps), mask=inside)
    keep_running(
        centre, spread * pixels, running_mean, running_var, tracked, lane, inside, pixels, momentum,
        RUNNING, TRACKED,
    )  # fmt: skip


@on_its_device
def launch_statistics(
    x: Tensor, running: tuple[Tensor, Tensor] | None, tracked: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation per channel in float32; running statistics and their count follow in place."""
    channels, pixels = x.shape[1], x.numel() // x.shape[1]
    lanes, block, rounds, shares = share_out(pixels, channels, x.device)
    parts = torch.empty((2, shares, channels), device=x.device, dtype=torch.float32)
    statistics[(shares, -(-channels // lanes))](
        pixels_last(x), parts[0], parts[1], pixels,
        TOTAL=channels, ROUNDS=rounds, PIXELS=block, LANES=lanes, num_warps=4,
    )  # fmt: skip
    mean, rstd = (torch.empty(channels, device=x.device, dtype=torch.float32) for _ in range(2))
    merge[(-(-channels // MERGED),)](
        parts[0], parts[1], mean, rstd, *(running or (mean, rstd)), tracked if tracked is not None else mean,
        pixels, block * rounds, shares, momentum, eps, TOTAL=channels, RUNNING=running is not None,
        TRACKED=tracked is not None, SHARES=power_above(shares), LANES=MERGED, num_warps=4,
    )  # fmt: skip
    return mean, rstd


@on_its_device
def launch_track(
    mean: Tensor,
    variance: Tensor,
    running: tuple[Tensor, Tensor] | None,
    tracked: Tensor | None,
    pixels: int,
    momentum: float,
    eps: float,
) -> Tensor:
    """The reciprocal deviation; running statistics and their count follow in place."""
    channels, rstd = len(mean), torch.empty_like(mean)
    lanes = min(256, power_above(channels))
    track[(-(-channels // lanes),)](
        mean, variance, rstd, *(running or (mean, variance)), tracked if tracked is not None else mean,
        pixels, momentum, eps, TOTAL=channels, RUNNING=running is not None, TRACKED=tracked is not None,
        LANES=lanes, num_warps=4,
    )  # fmt: skip
    return rstd


def share_out(
    pixels: int, channels: int, device: torch.device, values: int | None = None
) -> tuple[int, int, int, int]:
    """How a sum over pixels is shared: channels and pixels of a block, blocks per share, and shares.

    A kernel that needs many registers per value takes fewer `values` at a time than the others.
    """
    values, lanes = values or VALUES, lanes_of(channels)
    block = values // lanes
    wanted = min(PARTS, max(1, gpu.multiprocessors(device) * RESIDENT.get(values, 3) // -(-channels // lanes)))
    blocks = -(-pixels // block)
    rounds = -(-blocks // wanted)
    return lanes, block, rounds, -(-blocks // rounds)


@torch.library.custom_op("lowrank::batch_norm_statistics", mutates_args=("running_mean", "running_var", "tracked"))
def batch_norm_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    tracked: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of a batch per channel; the running ones and their count are brought up.

    It is an operator of its own because one that changes its arguments cannot have a gradient in torch. The
    gradient of the normalised result counts the statistics as functions of the input, which they are.
    """
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    return launch_statistics(x, running, tracked, momentum, eps)


@batch_norm_statistics.register_fake
def _(x, running_mean, running_var, tracked, momentum, eps):
    return tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))


@torch.library.custom_op("lowrank::batch_norm_track", mutates_args=("running_mean", "running_var", "tracked"))
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
    """The reciprocal deviation of a known mean and (biased) variance; the running ones are brought up."""
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    return launch_track(mean, variance, running, tracked, pixels, momentum, eps)


@batch_norm_track.register_fake
def _(mean, variance, running_mean, running_var, tracked, pixels, momentum, eps):
    return torch.empty_like(mean)
