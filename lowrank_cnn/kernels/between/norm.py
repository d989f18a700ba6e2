"""Batch norm in training with the ReLU behind it, over channels-last maps.

Forward: a pass for the statistics, one for the result. Backward: a pass for two sums, one for the gradient.
Nothing but the input and its statistics is kept: which results ReLU cut is computed again. Programs share the
pixels and leave their part of each sum to a small merge, without atomics: the result is the same every time.
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.device_guard import on_its_device
from lowrank_cnn.kernels.problem import empty_maps, pixels_last
from lowrank_cnn.kernels.tiles import lanes_of, power_above

VALUES = 4096
"""Values per program and turn: with 128 threads, four loads of 16 bytes of bfloat16 each."""
RESIDENT = 3
"""Programs per multiprocessor that share the pixels of a sum: as many as its registers hold at once."""
PARTS = 512
"""The most parts of a sum: the merge holds all parts of its channels at once."""
MERGED = 8
"""Channels per program of the merge."""


@triton.jit
def statistics(
    x, means, squares, pixels,
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
def merge(
    means, squares, mean, rstd, running_mean, running_var, tracked, pixels, share, shares, momentum, eps,
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
    if RUNNING:
        old = tl.load(running_mean + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_mean + lane, old + momentum * (centre - old), mask=inside)
        old = tl.load(running_var + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(running_var + lane, old + momentum * (squared / (pixels - 1) - old), mask=inside)
    if TRACKED:
        tl.store(tracked, tl.load(tracked) + 1, mask=tl.program_id(0) == 0)


@triton.jit
def of_channels(mean, rstd, weight, bias, lane, TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """Mean, reciprocal deviation, weight and bias of channels, in float32 and ready to meet pixels."""
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
def normalise(
    x, y, mean, rstd, weight, bias, pixels,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """A block of results for a block of channels."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel[:, None] * TOTAL + lane[None, :]
    out = (tl.load(x + place, mask=keep, other=0.0).to(tl.float32) - m) * r * w + b
    if RELU:
        out = tl.where(out < 0, 0.0, out)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=keep)


@triton.jit
def normed_and_cut(grad, x, place, keep, m, r, w, b, RELU: tl.constexpr):
    """Normalised values, and the gradient before ReLU."""
    g = tl.load(grad + place, mask=keep, other=0.0).to(tl.float32)
    normed = (tl.load(x + place, mask=keep, other=0.0).to(tl.float32) - m) * r
    if RELU:
        g = tl.where(normed * w + b <= 0, 0.0, g)
    return normed, g


@triton.jit
def gradient_sums(
    grad, x, sums, mean, rstd, weight, bias, pixels,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, ROUNDS: tl.constexpr,
    PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Over a share of the pixels: the gradient's sum, and that of the gradient times the normalised value."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start = tl.program_id(0) * ROUNDS * PIXELS
    row = tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    plain = tl.zeros((PIXELS, LANES), tl.float32)
    weighted = tl.zeros((PIXELS, LANES), tl.float32)
    for turn in range(ROUNDS):
        pixel = start + turn * PIXELS + row
        keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
        place = pixel[:, None] * TOTAL + lane[None, :]
        normed, g = normed_and_cut(grad, x, place, keep, m, r, w, b, RELU)
        plain += g
        weighted += g * normed
    target = tl.program_id(0) * TOTAL + lane
    tl.store(sums + target, tl.sum(plain, 0), mask=lane < TOTAL)
    target += tl.num_programs(0) * TOTAL
    tl.store(sums + target, tl.sum(weighted, 0), mask=lane < TOTAL)


@triton.jit
def input_gradient(
    grad, x, dx, sums, mean, rstd, weight, bias, pixels,
    TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """A block of the input's gradient: what mean and deviation take away is in `sums`, over all pixels."""
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m, r, w, b = of_channels(mean, rstd, weight, bias, lane, TOTAL, WEIGHT, BIAS)
    plain = tl.load(sums + lane, mask=lane < TOTAL, other=0.0) / pixels
    weighted = tl.load(sums + TOTAL + lane, mask=lane < TOTAL, other=0.0) / pixels
    keep = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel[:, None] * TOTAL + lane[None, :]
    normed, g = normed_and_cut(grad, x, place, keep, m, r, w, b, RELU)
    out = (g - plain[None, :] - normed * weighted[None, :]) * (w * r)
    tl.store(dx + place, out.to(dx.dtype.element_ty), mask=keep)


@on_its_device
def launch_statistics(
    x: Tensor, running: tuple[Tensor, Tensor] | None, tracked: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation per channel in float32; running statistics and their count follow in place."""
    channels, pixels = x.shape[1], x.numel() // x.shape[1]
    lanes, block, rounds, shares = _cut(pixels, channels, x.device)
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
def launch_normalise(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    """The result, channels-last."""
    y, channels = empty_maps(x.shape, x), x.shape[1]
    pixels, lanes = x.numel() // channels, lanes_of(channels)
    block = VALUES // lanes
    normalise[(-(-pixels // block), -(-channels // lanes))](
        pixels_last(x), y.permute(0, 2, 3, 1), *_affine(mean, rstd, weight, bias), pixels,
        TOTAL=channels, WEIGHT=weight is not None, BIAS=bias is not None, RELU=relu, PIXELS=block, LANES=lanes,
        num_warps=4,
    )  # fmt: skip
    return y


@on_its_device
def launch_gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of the input, channels-last, and [2, C]: those of bias and weight, in float32."""
    dx, channels = empty_maps(x.shape, x), x.shape[1]
    pixels = x.numel() // channels
    lanes, block, rounds, shares = _cut(pixels, channels, x.device)
    g, source, affine = pixels_last(grad), pixels_last(x), _affine(mean, rstd, weight, bias)
    options: dict[str, Any] = {
        "TOTAL": channels, "WEIGHT": weight is not None, "BIAS": bias is not None, "RELU": relu,
        "PIXELS": block, "LANES": lanes, "num_warps": 4,
    }  # fmt: skip
    tiles = -(-channels // lanes)
    parts = torch.empty((2, shares, channels), device=x.device, dtype=torch.float32)
    gradient_sums[(shares, tiles)](g, source, parts, *affine, pixels, ROUNDS=rounds, **options)
    sums = parts.sum(1)
    out = dx.permute(0, 2, 3, 1)
    input_gradient[(-(-pixels // block), tiles)](g, source, out, sums, *affine, pixels, **options)
    return dx, sums


def _affine(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """What the kernels read per channel; where there is no weight or bias, anything: it is not read."""
    return mean, rstd, mean if weight is None else weight, mean if bias is None else bias


def _cut(pixels: int, channels: int, device: torch.device) -> tuple[int, int, int, int]:
    """How a sum over pixels is shared: channels and pixels of a block, blocks per share, and shares."""
    lanes = lanes_of(channels)
    block = VALUES // lanes
    wanted = min(PARTS, max(1, _programs(device) // -(-channels // lanes)))
    blocks = -(-pixels // block)
    rounds = -(-blocks // wanted)
    return lanes, block, rounds, -(-blocks // rounds)


@lru_cache(maxsize=64)
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2 * RESIDENT
    return RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
