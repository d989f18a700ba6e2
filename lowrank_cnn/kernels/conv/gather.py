"""The composite forward for few channels, or strides that no other kernel takes: pixels are gathered tap by tap.

Layout: maps are [N, H, W, C]. All groups share one matrix [VALUES, filters] over the union of their taps (see
`pack.pack_union`), so the neighbourhood of a pixel is gathered once for all groups. A program takes PIXELS result
pixels by FILTERS filters and loops over DEPTH gathered values at a time. A 2x2 pool that follows is the maximum of
four such products in registers; only pooled pixels are written.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.conv.pack import union_taps
from lowrank_cnn.kernels.conv.tiled import activated, activation_options
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import ConvTensors, Problem, empty_result, pixels_last, power_above


@dataclass(frozen=True)
class GatherTile:
    """Tuned sizes: result pixels and filters per program, gathered values per step, warps and stages.

    The offsets of gathered values take registers: twice the pixels or the depth would spill.
    """

    pixels: int = 64
    filters: int = 64
    depth: int = 32
    warps: int = 4
    stages: int = 2


@triton.jit
def composite_gather(
    x,  # [N, H, W, CHANNELS]
    w,  # [VALUES, TOTAL], as `pack.pack_union` lays it
    bias,  # [TOTAL]
    residual,  # [N, H', W', TOTAL]
    y,  # [N, H', W', TOTAL]
    places,  # [2, VALUES] int32: for each gathered value its distance in memory, and the bits it needs
    pixels, height, width, out_height, out_width, result_height, result_width,
    CHANNELS: tl.constexpr, TOTAL: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr, SPAN_Y: tl.constexpr,
    SPAN_X: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr, STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr, POOL: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ADD_LAST: tl.constexpr, PIXELS: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of result pixels for one tile of filters.

    A pixel has one bit per row and column of the taps' span, set if that lies in the image. A gathered value then
    costs one addition and one comparison of bits. Pixels run along the lanes, so each offset is computed once.
    """
    lane = tl.program_id(0) % TILES * FILTERS + tl.arange(0, FILTERS)
    pixel = tl.program_id(0) // TILES * PIXELS + tl.arange(0, PIXELS)
    column = pixel % result_width
    row = pixel // result_width % result_height
    image = pixel // (result_width * result_height)
    if WIDE:
        image = image.to(tl.int64)
    best = tl.full((PIXELS, FILTERS), float("-inf"), tl.float32)
    for quad in tl.static_range(4 if POOL else 1):
        down = row * 2 + quad // 2 if POOL else row
        right = column * 2 + quad % 2 if POOL else column
        in_y, in_x = down * STRIDE_Y, right * STRIDE_X
        bits = tl.zeros((PIXELS,), tl.int32)
        for i in tl.static_range(SPAN_Y):
            bits |= ((in_y + (FIRST_Y + i) >= 0) & (in_y + (FIRST_Y + i) < height)).to(tl.int32) << i
        for i in tl.static_range(SPAN_X):
            bits |= ((in_x + (FIRST_X + i) >= 0) & (in_x + (FIRST_X + i) < width)).to(tl.int32) << (SPAN_Y + i)
        bits = tl.where(pixel < pixels, bits, 0)
        base = ((image * height + in_y) * width + in_x) * CHANNELS
        acc = tl.zeros((PIXELS, FILTERS), tl.float32)
        for depth in range(0, VALUES, DEPTH):
            k = depth + tl.arange(0, DEPTH)
            away = tl.load(places + k)[:, None]
            needs = tl.load(places + VALUES + k)[:, None]
            a = tl.load(x + (base[None, :] + away), mask=(bits[None, :] & needs) == needs, other=0.0)
            b = tl.load(w + k[:, None] * TOTAL + lane[None, :], mask=(lane < TOTAL)[None, :], other=0.0)
            acc = tl.dot(a.T, b, acc)
        if POOL:
            seen = (down < out_height) & (right < out_width)
            best = tl.where(seen[:, None], tl.maximum(best, acc), best)
        else:
            best = acc
    if HAS_BIAS:
        best += tl.load(bias + lane, mask=lane < TOTAL, other=0.0).to(tl.float32)[None, :]
    inside = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
    place = pixel.to(tl.int64)[:, None] * TOTAL + lane[None, :]
    if ADD_LAST:
        best = activated(best, ACTIVATION, SLOPE)
    if HAS_RESIDUAL:
        best += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if not ADD_LAST:
        best = activated(best, ACTIVATION, SLOPE)
    tl.store(y + place, best.to(y.dtype.element_ty), mask=inside)


def launch_gather(problem: Problem, given: ConvTensors, tile: GatherTile | None = None) -> Tensor:
    """Run the kernel on `pack.pack_union` weights; the result is channels-last."""
    x, packed, bias, codes, residual, _ = given
    if codes is not None:
        raise LowRankError("the gather kernel has no gradient for a pool; let the library choose the kernel.")
    tile, pixels, maps = tile or GatherTile(), pixels_last(x), empty_result(problem, x)
    result = maps.permute(0, 2, 3, 1)
    values = packed.shape[0]
    filters = min(tile.filters, power_above(problem.filters))
    tiles = ceil_div(problem.filters, filters)
    count = problem.batch * problem.result_size[0] * problem.result_size[1]
    start(composite_gather, (tiles * ceil_div(count, tile.pixels),))(
        pixels, packed, bias if bias is not None else packed,
        result if residual is None else pixels_last(residual), result, _places(problem, values, x.device),
        count, problem.height, problem.width, problem.out_height, problem.out_width, *problem.result_size,
        CHANNELS=problem.channels, TOTAL=problem.filters, VALUES=values, TILES=tiles, **_span(problem),
        STRIDE_Y=problem.stride[0], STRIDE_X=problem.stride[1], POOL=problem.pool is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ADD_LAST=problem.add_last,
        **activation_options(problem), PIXELS=tile.pixels, FILTERS=filters, DEPTH=min(tile.depth, values),
        WIDE=pixels.numel() >= 1 << 31, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return maps


def gathered_values(problem: Problem) -> int:
    """Values gathered per pixel, padded to a multiple of the loop's steps and of the matrix unit's size."""
    values = len(union_taps(problem.groups)) * problem.channels
    return power_above(values) if values <= 64 else ceil_div(values, 64) * 64


def unsupported(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem, or None if it can."""
    span = _span(problem)
    if span["SPAN_Y"] + span["SPAN_X"] > 30:
        return f"taps that span {span['SPAN_Y']}x{span['SPAN_X']} pixels"
    return None


def _span(problem: Problem) -> dict[str, int]:
    """The first row and column that any tap reads, relative to its output pixel, and how many of each."""
    rows, columns = zip(*union_taps(problem.groups), strict=True)
    return {
        "FIRST_Y": min(rows),
        "SPAN_Y": max(rows) - min(rows) + 1,
        "FIRST_X": min(columns),
        "SPAN_X": max(columns) - min(columns) + 1,
    }


@lru_cache(maxsize=256)
def _places(problem: Problem, values: int, device: torch.device) -> Tensor:
    """For each gathered value its distance in memory, and the bits of its row and column."""
    span = _span(problem)
    impossible = 1 << 31 - 1
    away, needs = [], []
    for down, right in union_taps(problem.groups):
        for channel in range(problem.channels):
            away.append((down * problem.width + right) * problem.channels + channel)
            needs.append(1 << down - span["FIRST_Y"] | 1 << span["SPAN_Y"] + right - span["FIRST_X"])
    padding = values - len(away)
    return torch.tensor([away + [0] * padding, needs + [impossible] * padding], dtype=torch.int32).to(device)
