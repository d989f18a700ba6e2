"""Depthwise filters of several shapes over one map, forward, and the gradient of their input.

The gradient of the input is again a depthwise layer, over the gradient of the output: `BACK` exchanges the two
in the relation between a result, a tap and the pixel that it reads. With a stride of two, say, every second result
has a given tap: blocks are multiples of the stride, so that this is known while the kernel is compiled.

A thread holds the results of its block (`sums`) and goes through the pixels that they need, row by row; each pixel
is read once and multiplied by every tap that meets it. Rows of large filters are a loop; all else is unrolled.
Weights are [taps, channels] in float32, band after band.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.conv.tiled import activated
from lowrank_cnn.kernels.depthwise.plan import MANY_TAPS, WARPS, Layer, divided
from lowrank_cnn.kernels.device import on_its_device, start

# An axis is (taps, stride, dilation, padding before, whether it is the gradient's). Pixels are counted from the
# place of the block.


@triton.constexpr_function
def lowest(axis):
    """The first pixel that a block reads."""
    taps, stride, dilation, before, back = axis
    return (before - (max(taps, 1) - 1) * dilation) // stride if back else -before


@triton.constexpr_function
def beyond(results, axis):
    """The pixel after the last that a block of so many results reads."""
    taps, stride, dilation, before, back = axis
    if back:
        return (results - 1 + before) // stride + 1
    return (results - 1) * stride + (max(taps, 1) - 1) * dilation + 1 - before


@triton.constexpr_function
def meeting(result, pixel, axis):
    """The tap by which a result of the block sees a pixel; -1 if it does not."""
    taps, stride, dilation, before, back = axis
    away = result + before - pixel * stride if back else pixel - result * stride + before
    tap = away // dilation
    return tap if away % dilation == 0 and 0 <= tap < max(taps, 1) else -1


@triton.constexpr_function
def met_in_order(results, axis):
    """(pixel, tap) for each tap: the first pixel that a block sees by it, in the order of these."""
    first = {}
    for pixel in range(lowest(axis), beyond(results, axis)):
        for result in range(results):
            first.setdefault(meeting(result, pixel, axis), pixel)
    return tuple(sorted((pixel, tap) for tap, pixel in first.items() if 0 <= tap < axis[0]))


@triton.constexpr_function
def tap_of(place, columns, row, column, vertical, horizontal, order):
    """The number of the tap, as loaded, by which a result of the block sees a pixel; -1 if it does not."""
    down, right = meeting(place // columns, row, vertical), meeting(place % columns, column, horizontal)
    if down < 0 or right < 0:
        return -1
    return [tap for _, tap in order].index(down) * horizontal[0] + right if order else 0


SIZES = ("batch", "height", "width", "rows", "columns")
"""Numbers that one compiled kernel serves all values of."""


@triton.jit(do_not_specialize=SIZES)
def filter_bands(
    x,  # [batch, HEIGHT, WIDTH, CHANNELS]
    y,  # [batch, rows, columns, CHANNELS], written
    weights,  # [taps, channels] of each band, float32
    scale, shift, residual,  # [CHANNELS], [CHANNELS], like y
    batch, height, width, rows, columns, slope,
    CHANNELS: tl.constexpr, SHARES: tl.constexpr, SLOTS: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, BACK: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Find the band of this program, and filter its part."""
    turn, slot = tl.program_id(0) // SLOTS, tl.program_id(0) % SLOTS
    for band in tl.static_range(len(SHARES)):
        if (slot >= SHARES[band][11]) & (slot < SHARES[band][11] + SHARES[band][12]):
            filter_band(
                x, y, weights, scale, shift, residual, turn * SHARES[band][12] + slot - SHARES[band][11],
                batch, height, width, rows, columns, slope, CHANNELS, *SHARES[band][:11],
                STRIDE, DILATION, BACK, SCALE, SHIFT, ACTIVATION, RESIDUAL,
            )  # fmt: skip


@triton.constexpr_function
def looped(height, width, stride, dilation):
    """Whether the rows of a filter are a loop: a result then meets the taps that the one above it met before."""
    return height > 1 and width > 1 and height * width >= MANY_TAPS and stride == dilation == 1


@triton.jit
def columns_inside(left, own, width, COLUMNS: tl.constexpr, HORIZONTAL: tl.constexpr):
    """For each column of pixels that blocks read, whether it is part of the map, and the channels of the band."""
    inside = ()
    for j in tl.static_range(lowest(HORIZONTAL), beyond(COLUMNS, HORIZONTAL)):
        inside = inside + ((left + j >= 0) & (left + j < width) & own,)
    return inside


@triton.jit
def sums_by_rows(
    source, table, top, left, own, known, height, width,
    TOTAL: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, VERTICAL: tl.constexpr, HORIZONTAL: tl.constexpr,
):  # fmt: skip
    """The results of blocks, one row of pixels after the other."""
    HEIGHT: tl.constexpr = VERTICAL[0]
    WIDTH: tl.constexpr = HORIZONTAL[0]
    none = tl.zeros((BLOCKS, LANES), tl.float32)
    sums = ()
    for _ in tl.static_range(ROWS * COLUMNS):
        sums = sums + (none,)
    across = columns_inside(left, own, width, COLUMNS, HORIZONTAL)
    above = ()
    for _ in tl.static_range(ROWS * WIDTH - WIDTH):
        above = above + (none,)
    for step in range(HEIGHT + ROWS - 1):
        i = lowest(VERTICAL) + step
        down = HEIGHT - 1 - step if VERTICAL[4] else step
        taps = ()
        for tap in tl.static_range(WIDTH):
            place = table + (down * WIDTH + tap) * CHANNELS
            taps = taps + (tl.load(place, mask=own & (step < HEIGHT), other=0.0),)
        taps = taps + above
        inside = known & (top + i >= 0) & (top + i < height)
        for j in tl.static_range(lowest(HORIZONTAL), beyond(COLUMNS, HORIZONTAL)):
            keep = inside & across[j - lowest(HORIZONTAL)]
            value = tl.load(source + (i * width + j) * TOTAL, mask=keep, other=0.0).to(tl.float32)
            added = ()
            for place in tl.static_range(ROWS * COLUMNS):
                if meeting(place % COLUMNS, j, HORIZONTAL) < 0:
                    added = added + (sums[place],)
                else:
                    tap = taps[place // COLUMNS * WIDTH + meeting(place % COLUMNS, j, HORIZONTAL)]
                    added = added + (sums[place] + value * tap,)
            sums = added
        above = taps[: ROWS * WIDTH - WIDTH]
    return sums


@triton.jit
def sums_unrolled(
    source, table, top, left, own, known, height, width,
    TOTAL: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, VERTICAL: tl.constexpr, HORIZONTAL: tl.constexpr,
):  # fmt: skip
    """The results of blocks: each pixel, tap and result is code of its own."""
    HEIGHT: tl.constexpr = VERTICAL[0]
    WIDTH: tl.constexpr = HORIZONTAL[0]
    ORDER: tl.constexpr = met_in_order(ROWS, VERTICAL)
    across = columns_inside(left, own, width, COLUMNS, HORIZONTAL)
    taps = ()  # loaded row by row, as they are first met: a square's 49 would fill the registers
    sums = ()
    for _ in tl.static_range(ROWS * COLUMNS):
        sums = sums + (tl.zeros((BLOCKS, LANES), tl.float32),)
    for i in tl.static_range(lowest(VERTICAL), beyond(ROWS, VERTICAL)):
        for met in tl.static_range(HEIGHT):
            if ORDER[met][0] == i:
                for tap in tl.static_range(WIDTH):
                    away = (ORDER[met][1] * WIDTH + tap) * CHANNELS
                    taps = taps + (tl.load(table + away, mask=own, other=0.0),)
        inside = known & (top + i >= 0) & (top + i < height)
        for j in tl.static_range(lowest(HORIZONTAL), beyond(COLUMNS, HORIZONTAL)):
            keep = inside & across[j - lowest(HORIZONTAL)]
            value = tl.load(source + (i * width + j) * TOTAL, mask=keep, other=0.0).to(tl.float32)
            added = ()
            for place in tl.static_range(ROWS * COLUMNS):
                if tap_of(place, COLUMNS, i, j, VERTICAL, HORIZONTAL, ORDER) < 0:
                    added = added + (sums[place],)
                elif HEIGHT == 0:
                    added = added + (sums[place] + value,)
                else:
                    tap = taps[tap_of(place, COLUMNS, i, j, VERTICAL, HORIZONTAL, ORDER)]
                    added = added + (sums[place] + value * tap,)
            sums = added
    return sums


@triton.jit(noinline=True)  # inlined, the code of all bands takes longer to compile
def filter_band(
    x, y, weights, scale, shift, residual, tile, batch, height, width, rows, columns, slope,
    TOTAL: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr, BLOCKS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, BACK: tl.constexpr,
    SCALE: tl.constexpr, SHIFT: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Blocks of pixels for some channels of one band."""
    VERTICAL: tl.constexpr = (HEIGHT, STRIDE[0], DILATION[0], TOP, BACK)
    HORIZONTAL: tl.constexpr = (WIDTH, STRIDE[1], DILATION[1], LEFT, BACK)
    PARTS: tl.constexpr = (CHANNELS + LANES - 1) // LANES
    lane = (tile % PARTS) * LANES + tl.arange(0, LANES)[None, :]
    own = lane < CHANNELS
    block = (tile // PARTS) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    wide = (columns + COLUMNS - 1) // COLUMNS
    high = (rows + ROWS - 1) // ROWS
    column, row, image = block % wide * COLUMNS, block // wide % high * ROWS, block // (wide * high)
    if BACK:
        top, left = row // STRIDE[0], column // STRIDE[1]
    else:
        top, left = row * STRIDE[0], column * STRIDE[1]
    source = x + (((image * height + top) * width + left) * TOTAL + FIRST + lane)
    table = weights + (WEIGHTS + lane + block * 0)
    if looped(HEIGHT, WIDTH, STRIDE[0], DILATION[0]):
        sums = sums_by_rows(
            source, table, top, left, own, image < batch, height, width, TOTAL, CHANNELS, ROWS, COLUMNS, BLOCKS,
            LANES, VERTICAL, HORIZONTAL,
        )  # fmt: skip
    else:
        sums = sums_unrolled(
            source, table, top, left, own, image < batch, height, width, TOTAL, CHANNELS, ROWS, COLUMNS, BLOCKS,
            LANES, VERTICAL, HORIZONTAL,
        )  # fmt: skip
    factor, offset = 1.0, 0.0
    if SCALE:
        factor = tl.load(scale + (FIRST + lane + block * 0), mask=own, other=0.0).to(tl.float32)
    if SHIFT:
        offset = tl.load(shift + (FIRST + lane + block * 0), mask=own, other=0.0).to(tl.float32)
    target = ((image * rows + row) * columns + column) * TOTAL + FIRST + lane
    for place in tl.static_range(ROWS * COLUMNS):
        keep = (image < batch) & (row + place // COLUMNS < rows) & (column + place % COLUMNS < columns) & own
        away = target + (place // COLUMNS * columns + place % COLUMNS) * TOTAL
        z = activated(sums[place] * factor + offset, ACTIVATION, slope)
        if RESIDUAL:
            z += tl.load(residual + away, mask=keep, other=0.0).to(tl.float32)
        tl.store(y + away, z.to(y.dtype.element_ty), mask=keep)


@on_its_device
def launch(
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    layer: Layer,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    slope: float = 0.0,
    back: bool = False,
) -> None:
    """Filter x, [N, H, W, C], into y; with `back`, the gradient of the output into that of the input."""
    read, written = (layer.output, layer.input) if back else (layer.input, layer.output)
    division = divided(layer, back=back)
    start(filter_bands, (division.slots * division.turns,))(
        x, y, weights, y if scale is None else scale, y if shift is None else shift,
        y if residual is None else residual, layer.batch, *read, *written, slope,
        CHANNELS=layer.channels, SHARES=tuple(map(tuple, division.shares)), SLOTS=division.slots,
        STRIDE=layer.stride, DILATION=layer.dilation, BACK=back, SCALE=scale is not None,
        SHIFT=shift is not None, ACTIVATION=activation, RESIDUAL=residual is not None, num_warps=WARPS,
    )  # fmt: skip
