"""The gradients of depthwise filters and of the bias: sums over parts of the pixels, and then the sum of these.

There are no atomic additions, so that a step can be repeated bit by bit. A program takes some channels of a band
and goes through a share of the pixels, block by block; a thread holds one sum per tap. It reads the gradients of a
block first and then, as the forward does, each pixel once for all taps that meet it. Of a large filter a program
takes some rows alone, its *span*: to it they are a filter of their own, over pixels further down.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.depthwise.forward import SIZES, beyond, columns_inside, lowest
from lowrank_cnn.kernels.depthwise.plan import WARPS, Layer, divided_sums
from lowrank_cnn.kernels.device import multiprocessors, on_its_device, start


@triton.constexpr_function
def seen_by(tap, pixel, results, axis):
    """The result of a block that sees a pixel by a tap, along one axis; -1 if none does."""
    _, stride, dilation, before, _ = axis
    away = pixel + before - tap * dilation
    return away // stride if away % stride == 0 and 0 <= away // stride < results else -1


@triton.constexpr_function
def result_at(tap, width, row, column, rows, columns, vertical, horizontal):
    """The number of the result of a block that sees a pixel by a tap; -1 if none does."""
    down = seen_by(tap // width, row, rows, vertical)
    right = seen_by(tap % width, column, columns, horizontal)
    return -1 if down < 0 or right < 0 else down * columns + right


@triton.jit(do_not_specialize=(*SIZES, "turns"))
def sum_bands(
    x,  # [batch, height, width, CHANNELS]
    grad,  # [batch, rows, columns, CHANNELS]
    sums,  # [rows, TAPS + CHANNELS] float32, written: per band [taps, channels], then the bias
    batch, height, width, rows, columns, turns,
    CHANNELS: tl.constexpr, SHARES: tl.constexpr, SLOTS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Find the band of this program, and sum over its share of the pixels."""
    turn, slot = tl.program_id(0) // SLOTS, tl.program_id(0) % SLOTS
    for band in tl.static_range(len(SHARES)):
        if (slot >= SHARES[band][11]) & (slot < SHARES[band][11] + SHARES[band][12]):
            own = slot - SHARES[band][11]
            share = turn * SHARES[band][14] + own % SHARES[band][14]
            sum_band(
                x, grad, sums + share * (TAPS + CHANNELS), own // SHARES[band][14], share,
                batch, height, width, rows, columns, turns * SHARES[band][14],
                CHANNELS, *SHARES[band][:11], SHARES[band][13], STRIDE, DILATION, TAPS, BIAS,
            )  # fmt: skip


@triton.jit(noinline=True)
def sum_band(
    x, grad, sums, part, share, batch, height, width, rows, columns, shares,
    TOTAL: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The sums of some channels and rows of taps of one band over its share of the blocks."""
    VERTICAL: tl.constexpr = (SPAN, STRIDE[0], DILATION[0], TOP, False)
    HORIZONTAL: tl.constexpr = (WIDTH, STRIDE[1], DILATION[1], LEFT, False)
    PARTS: tl.constexpr = (CHANNELS + LANES - 1) // LANES
    down = part // PARTS * SPAN
    part = part % PARTS
    lane = part * LANES + tl.arange(0, LANES)[None, :]
    own = lane < CHANNELS
    wide = (columns + COLUMNS - 1) // COLUMNS
    high = (rows + ROWS - 1) // ROWS
    taps = ()
    for _ in tl.static_range(SPAN * WIDTH):
        taps = taps + (tl.zeros((BLOCKS, LANES), tl.float32),)
    bias = tl.zeros((BLOCKS, LANES), tl.float32)
    turn = share  # all programs advance over the pixels together, so that they find them in the cache
    while turn * BLOCKS < batch * wide * high:  # the interpreter has no range to a number that is not a constant
        block = turn * BLOCKS + tl.arange(0, BLOCKS)[:, None]
        column, row, image = block % wide * COLUMNS, block // wide % high * ROWS, block // (wide * high)
        source = grad + ((image * rows + row) * columns + column) * TOTAL + FIRST + lane
        given = ()
        for place in tl.static_range(ROWS * COLUMNS):
            keep = (image < batch) & (row + place // COLUMNS < rows) & (column + place % COLUMNS < columns) & own
            away = (place // COLUMNS * columns + place % COLUMNS) * TOTAL
            given = given + (tl.load(source + away, mask=keep, other=0.0).to(tl.float32),)
        if BIAS:
            for place in tl.static_range(ROWS * COLUMNS):
                bias += given[place]
        if HEIGHT > 0:
            top, left = row * STRIDE[0] + down * DILATION[0], column * STRIDE[1]
            across = columns_inside(left, own, width, COLUMNS, HORIZONTAL)
            source = x + ((image * height + top) * width + left) * TOTAL + FIRST + lane
            for i in tl.static_range(lowest(VERTICAL), beyond(ROWS, VERTICAL)):
                inside = (image < batch) & (top + i >= 0) & (top + i < height)
                for j in tl.static_range(lowest(HORIZONTAL), beyond(COLUMNS, HORIZONTAL)):
                    keep = inside & across[j - lowest(HORIZONTAL)]
                    value = tl.load(source + (i * width + j) * TOTAL, mask=keep, other=0.0).to(tl.float32)
                    added = ()
                    for tap in tl.static_range(SPAN * WIDTH):
                        if result_at(tap, WIDTH, i, j, ROWS, COLUMNS, VERTICAL, HORIZONTAL) < 0:
                            added = added + (taps[tap],)
                        else:
                            seen = given[result_at(tap, WIDTH, i, j, ROWS, COLUMNS, VERTICAL, HORIZONTAL)]
                            added = added + (taps[tap] + value * seen,)
                    taps = added
        turn += shares
    lane = part * LANES + tl.arange(0, LANES)
    own = lane < CHANNELS
    for tap in tl.static_range(SPAN * WIDTH):
        place = sums + WEIGHTS + (down * WIDTH + tap) * CHANNELS + lane
        tl.store(place, tl.sum(taps[tap], 0), mask=own & (down + tap // WIDTH < HEIGHT))
    if BIAS:
        tl.store(sums + TAPS + FIRST + lane, tl.sum(bias, 0), mask=own & (down == 0))


@triton.jit(do_not_specialize=("turns",))
def add_sums(
    sums,  # [rows, TAPS + CHANNELS] float32
    found,  # [TAPS + CHANNELS] float32, written
    turns,
    CHANNELS: tl.constexpr, SHARES: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the shares of the pixels. Each band has as many rows as shares."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    shares = tl.zeros((COLUMNS,), tl.int32)
    for band in tl.static_range(len(SHARES)):
        first, channels = SHARES[band][0], SHARES[band][1]
        weights, taps = SHARES[band][6], SHARES[band][2] * SHARES[band][3]
        own = (column >= weights) & (column < weights + taps * channels)
        own |= (column >= TAPS + first) & (column < TAPS + first + channels)
        shares = tl.where(own, turns * SHARES[band][14], shares)
    most = tl.max(shares, 0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = 0
    while first < most:
        row = first + tl.arange(0, ROWS)[:, None]
        place = sums + row * (TAPS + CHANNELS) + column[None, :]
        total += tl.load(place, mask=row < shares[None, :], other=0.0)
        first += ROWS
    tl.store(found + column, tl.sum(total, 0), mask=column < TAPS + CHANNELS)


PROGRAMS = 6
"""Programs to a multiprocessor."""
ADDED = 64, 32
"""Rows and columns that a program adds at a time."""


@on_its_device
def launch(x: Tensor, grad: Tensor, layer: Layer, *, bias: bool) -> Tensor:
    """The sums for the weights, [taps, channels] of each band, and for the bias behind them, in float32.

    Both maps are [N, H, W, C]. Without a bias, there are no sums for it.
    """
    division = divided_sums(layer, bias, PROGRAMS * multiprocessors(x.device))
    width, turns = layer.taps + layer.channels, division.turns
    rows = turns * max(share.SPLITS for share in division.shares)
    sums = torch.empty((rows, width), device=x.device, dtype=torch.float32)
    known = {"CHANNELS": layer.channels, "SHARES": tuple(map(tuple, division.shares)), "TAPS": layer.taps}
    start(sum_bands, (turns * division.slots,))(
        x, grad, sums, layer.batch, *layer.input, *layer.output, turns, SLOTS=division.slots, STRIDE=layer.stride,
        DILATION=layer.dilation, BIAS=bias, num_warps=WARPS, **known,
    )  # fmt: skip
    found = torch.empty(width, device=x.device, dtype=torch.float32)
    start(add_sums, (ceil_div(width, ADDED[1]),))(
        sums, found, turns, ROWS=ADDED[0], COLUMNS=ADDED[1], num_warps=WARPS, **known
    )
    return found
