"""The gradients of depthwise filters and of the bias: sums over parts of the pixels, and then the sum of these.

There are no atomic additions, so that a step can be repeated bit by bit. A program takes some channels of a band
and goes through a share of the pixels, block by block; a thread holds one sum per tap. It reads the gradients of a
block first and then, as the forward does, each pixel once for all taps that meet it. Of a large filter a program
takes some rows alone, its *span*: to it they are a filter of their own, over pixels further down.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.depthwise.forward import SIZES, beyond, columns_inside, lowest
from lowrank_cnn.kernels.depthwise.plan import MANY_TAPS, WARPS, Band, Layer, divided_sums
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


@triton.jit(do_not_specialize=(*SIZES, "shares"))
def sum_bands(
    x,  # [batch, height, width, CHANNELS]
    grad,  # [batch, rows, columns, CHANNELS]
    sums,  # [shares, TAPS + CHANNELS] float32, written: per band [taps, channels], then the bias
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
    blocks = batch * ((columns + COLUMNS - 1) // COLUMNS) * ((rows + ROWS - 1) // ROWS)
    taps = ()
    for _ in tl.static_range(SPAN * WIDTH):
        taps = taps + (tl.zeros((BLOCKS, LANES), tl.float32),)
    bias = tl.zeros((BLOCKS, LANES), tl.float32)
    turn = share  # all programs advance over the pixels together, so that they find them in the cache
    while turn * BLOCKS < blocks:  # the interpreter has no range to a number that is not a constant
        taps, bias = with_blocks(
            taps, bias, x, grad, FIRST + lane, lane < CHANNELS, turn, down, batch, height, width, rows, columns,
            TOTAL, HEIGHT, WIDTH, ROWS, COLUMNS, BLOCKS, STRIDE, DILATION, VERTICAL, HORIZONTAL, BIAS,
        )  # fmt: skip
        turn += shares
    lane = part * LANES + tl.arange(0, LANES)
    own = lane < CHANNELS
    for tap in tl.static_range(SPAN * WIDTH):
        place = sums + WEIGHTS + (down * WIDTH + tap) * CHANNELS + lane
        tl.store(place, tl.sum(taps[tap], 0), mask=own & (down + tap // WIDTH < HEIGHT))
    if BIAS:
        tl.store(sums + TAPS + FIRST + lane, tl.sum(bias, 0), mask=own & (down == 0))


@triton.jit  # a function of its own: the compiler reads the body of a loop twice
def with_blocks(
    taps, bias, x, grad, channel, own, turn, down, batch, height, width, rows, columns,
    TOTAL: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, VERTICAL: tl.constexpr,
    HORIZONTAL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The sums with those of some blocks."""
    wide = (columns + COLUMNS - 1) // COLUMNS
    high = (rows + ROWS - 1) // ROWS
    block = turn * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    column, row, image = block % wide * COLUMNS, block // wide % high * ROWS, block // (wide * high)
    source = grad + ((image * rows + row) * columns + column) * TOTAL + channel
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
        source = x + ((image * height + top) * width + left) * TOTAL + channel
        for i in tl.static_range(lowest(VERTICAL), beyond(ROWS, VERTICAL)):
            inside = (image < batch) & (top + i >= 0) & (top + i < height)
            for j in tl.static_range(lowest(HORIZONTAL), beyond(COLUMNS, HORIZONTAL)):
                keep = inside & across[j - lowest(HORIZONTAL)]
                value = tl.load(source + (i * width + j) * TOTAL, mask=keep, other=0.0).to(tl.float32)
                added = ()
                for tap in tl.static_range(len(taps)):
                    if result_at(tap, WIDTH, i, j, ROWS, COLUMNS, VERTICAL, HORIZONTAL) < 0:
                        added = added + (taps[tap],)
                    else:
                        seen = given[result_at(tap, WIDTH, i, j, ROWS, COLUMNS, VERTICAL, HORIZONTAL)]
                        added = added + (taps[tap] + value * seen,)
                taps = added
    return taps, bias


@triton.jit(do_not_specialize=("width", "shares"))
def add_sums(
    sums,  # [shares, width] float32
    targets,  # of each band that has taps, [channels, taps], and of the bias; written
    fields,  # [targets, 3] int32: the first column of each, channels, taps
    width, shares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the shares of the pixels, for some values of one target."""
    program = tl.program_id(0)
    for place in tl.static_range(len(targets)):
        first, channels, taps = (
            tl.load(fields + 3 * place),
            tl.load(fields + 3 * place + 1),
            tl.load(fields + 3 * place + 2),
        )
        programs = (channels * taps + COLUMNS - 1) // COLUMNS
        if (program >= 0) & (program < programs):
            column = program * COLUMNS + tl.arange(0, COLUMNS)
            known = column < channels * taps
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            share = 0
            while share < shares:
                row = share + tl.arange(0, ROWS)[:, None]
                source = sums + row * width + first + column[None, :]
                total += tl.load(source, mask=(row < shares) & known[None, :], other=0.0)
                share += ROWS
            target = targets[place] + column % channels * taps + column // channels
            tl.store(target, tl.sum(total, 0).to(targets[place].dtype.element_ty), mask=known)
        program -= programs


PROGRAMS, MANY_PROGRAMS = 3, 6
"""Programs to a multiprocessor, and those where a band has many taps."""
ADDED = 128, 16
"""Rows and columns that a program adds at a time."""


@on_its_device
def launch(x: Tensor, grad: Tensor, layer: Layer, filters: Sequence[Tensor], bias: Tensor | None) -> None:
    """Write the gradients of the filters of each band, [channels, 1, height, width], and that of the bias.

    Both maps are [N, H, W, C].
    """
    programs = MANY_PROGRAMS if max(band.taps for band in layer.bands) >= MANY_TAPS else PROGRAMS
    division = divided_sums(layer, bias is not None, programs * multiprocessors(x.device))
    width, shares = layer.taps + layer.channels, division.turns
    sums = torch.empty((shares, width), device=x.device, dtype=torch.float32)
    start(sum_bands, (shares * division.slots,))(
        x, grad, sums, layer.batch, *layer.input, *layer.output, shares, CHANNELS=layer.channels,
        SHARES=tuple(map(tuple, division.shares)), SLOTS=division.slots, TAPS=layer.taps, STRIDE=layer.stride,
        DILATION=layer.dilation, BIAS=bias is not None, num_warps=WARPS,
    )  # fmt: skip
    targets = (*filters, bias) if bias is not None else tuple(filters)
    fields = _fields(layer.bands, bias is not None, x.device)
    programs = sum(ceil_div(target.numel(), ADDED[1]) for target in targets)
    start(add_sums, (programs,))(
        sums, targets, fields, width, shares, ROWS=ADDED[0], COLUMNS=ADDED[1], num_warps=WARPS
    )


@lru_cache(maxsize=1024)
def _fields(bands: Sequence[Band], bias: bool, device: torch.device) -> Tensor:
    rows, first = [], 0
    for band in bands:
        rows += [[first, band.channels, band.taps]] if band.taps else []
        first += band.taps * band.channels
    if bias:
        rows.append([first, sum(band.channels for band in bands), 1])
    return torch.tensor(rows, dtype=torch.int32).to(device)
