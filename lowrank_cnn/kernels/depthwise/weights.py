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


@triton.jit(do_not_specialize=SIZES)
def sum_bands(
    x,  # [batch, height, width, CHANNELS]
    grad,  # [batch, rows, columns, CHANNELS]
    sums,  # [shares, WIDTH] float32, written: per band [taps, channels], then the bias
    batch, height, width, rows, columns, shares,
    CHANNELS: tl.constexpr, SHARES: tl.constexpr, SLOTS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Find the band of this program, and sum over its share of the pixels."""
    share, slot = tl.program_id(0) // SLOTS, tl.program_id(0) % SLOTS
    own = sums + share * (TAPS + CHANNELS)
    for band in tl.static_range(len(SHARES)):
        if (slot >= SHARES[band][11]) & (slot < SHARES[band][11] + SHARES[band][12]):
            sum_band(
                x, grad, own, slot - SHARES[band][11], share, batch, height, width, rows, columns, shares,
                CHANNELS, *SHARES[band][:11], *SHARES[band][13:], STRIDE, DILATION, TAPS, BIAS,
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
    turns = tl.cdiv(tl.cdiv(batch * wide * high, BLOCKS), shares)
    turn = share * turns
    while turn < (share + 1) * turns:  # the interpreter has no range to a number that is not a constant
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
        turn += 1
    lane = part * LANES + tl.arange(0, LANES)
    own = lane < CHANNELS
    for tap in tl.static_range(SPAN * WIDTH):
        place = sums + WEIGHTS + (down * WIDTH + tap) * CHANNELS + lane
        tl.store(place, tl.sum(taps[tap], 0), mask=own & (down + tap // WIDTH < HEIGHT))
    if BIAS:
        tl.store(sums + TAPS + FIRST + lane, tl.sum(bias, 0), mask=own & (down == 0))


PROGRAMS = 6
"""Programs to a multiprocessor."""


@on_its_device
def launch(x: Tensor, grad: Tensor, layer: Layer, *, bias: bool) -> Tensor:
    """The sums for the weights, [taps, channels] of each band, and for the bias behind them, in float32.

    Both maps are [N, H, W, C].
    """
    division = divided_sums(layer, bias, PROGRAMS * multiprocessors(x.device))
    sums = torch.empty((division.turns, layer.taps + layer.channels), device=x.device, dtype=torch.float32)
    start(sum_bands, (division.turns * division.slots,))(
        x, grad, sums, layer.batch, *layer.input, *layer.output, division.turns,
        CHANNELS=layer.channels, SHARES=tuple(map(tuple, division.shares)), SLOTS=division.slots, TAPS=layer.taps,
        STRIDE=layer.stride, DILATION=layer.dilation, BIAS=bias, num_warps=WARPS,
    )  # fmt: skip
    return sums.sum(0)
