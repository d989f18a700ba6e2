"""A pooled first layer for Hopper: the tensor cores read 4x4 windows in place, and nothing is gathered.

The four pixels of a 2x2 pool with 3x3 taps read one window of 4x4 pixels. With four channels per pixel, two pixels
are 16 bytes, and the windows of neighbouring pools begin 16 bytes apart. The tensor cores need eight consecutive
rows of 16 bytes, and the first halves of eight windows are consecutive in a row of the image. The second halves
are the same memory, 16 bytes on, so a tile takes two fetches per row of the image.

A program is persistent over tiles of ROWS x COLUMNS windows, with STAGES tiles in flight. Per tile it computes one
product for each of the four pixels of the pool; their maximum is the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.conv import hopper_plan as plan
from lowrank_cnn.kernels.conv.copies import launch_pad_channels
from lowrank_cnn.kernels.conv.hopper import accumulator, described, finished, send, shared_layout
from lowrank_cnn.kernels.conv.tiled import activation_options
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import ConvTensors, Problem, empty_result, pixels_last

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false


@gluon.jit
def place_of(box, COUNTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The image, first row and first column of a tile."""
    column = box % COUNTS[1] * COLUMNS
    row = box // COUNTS[1] % COUNTS[0] * ROWS
    return box // (COUNTS[1] * COUNTS[0]), row, column


@gluon.jit
def fetch_windows(
    x,  # descriptor of the padded pixels, see `windows_of`
    boxes,  # shared memory [STAGES * 4, windows, 16]
    ready,  # shared memory: a barrier per stage
    stage, box, total, padded_height,
    COUNTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Start the fetch of a tile, if there is one: four rows of each window, in two halves."""
    live = box < total
    image, row, column = place_of(box, COUNTS, ROWS, COLUMNS)
    bar = ready.index(stage)
    size: gl.constexpr = x.dtype.primitive_bitwidth // 8
    mbarrier.expect(bar, 64 * ROWS * COLUMNS * size, pred=live)
    target = boxes.index(stage * 4)._reinterpret(x.dtype, x.block_shape, x.layout)
    start = image * padded_height + 2 * row
    tma.async_copy_global_to_shared(x, [start, 0, 0, column * 8], bar, target, pred=live)


@gluon.jit
def product(boxes, slabs, stage, QUAD: gl.constexpr, FILTERS: gl.constexpr, ACC: gl.constexpr):
    """Start the product for pixel `QUAD` of every window's pool."""
    WINDOWS: gl.constexpr = boxes.shape[1]
    acc = gl.zeros([WINDOWS, FILTERS], gl.float32, layout=ACC)
    for tap in gl.static_range(3):
        a, b = boxes.index(stage * 4 + QUAD // 2 + tap), slabs.index(QUAD % 2 * 3 + tap)
        acc = warpgroup_mma(a, b.permute([1, 0]), acc, use_acc=tap > 0, is_async=True)
    return acc


@gluon.jit
def coded(acc, QUAD: gl.constexpr, CODES: gl.constexpr):
    """With `CODES`, put the pixel's place in the pool into the two lowest bits of its values."""
    if CODES:
        acc = (acc.to(gl.int32, bitcast=True) & ~3 | 3 - QUAD).to(gl.float32, bitcast=True)
    return acc


@gluon.jit
def composite_window(
    x,  # descriptor of the padded pixels, see `windows_of`
    w,  # descriptor of [2 * 3 * TOTAL, 16], see `hopper_plan.pack_windows`
    y,  # descriptor of [N, H', W', TOTAL], written
    codes,  # descriptor of [N, H', W', TOTAL] uint8, written: the winners of the pool
    bias,  # [TOTAL]
    total, padded_height,
    COUNTS: gl.constexpr, TOTAL: gl.constexpr, FILTERS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, CODES: gl.constexpr,
    STAGES: gl.constexpr, VIEW: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Persistent over tiles of windows, with `STAGES` of them in flight; the weights are fetched once."""
    TILES: gl.constexpr = TOTAL // FILTERS
    # Shared memory: rows of windows for STAGES tiles, all weights, the result on its way out, and barriers.
    boxes = gl.allocate_shared_memory(x.dtype, [STAGES * 4, ROWS * COLUMNS, 16], VIEW)
    slabs = gl.allocate_shared_memory(w.dtype, [6, FILTERS, 16], w.layout)
    staged = gl.allocate_shared_memory(y.dtype, y.block_shape, y.layout)
    staged_codes = staged
    if CODES:
        staged_codes = gl.allocate_shared_memory(gl.uint8, codes.block_shape, codes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    channel = gl.program_id(0) % TILES * FILTERS
    first, step = gl.program_id(0) // TILES, gl.num_programs(0) // TILES
    size: gl.constexpr = w.dtype.primitive_bitwidth // 8
    mbarrier.expect(ready.index(STAGES), 6 * FILTERS * 16 * size)
    for i in gl.static_range(6):
        tma.async_copy_global_to_shared(w, [i * TOTAL + channel, 0], ready.index(STAGES), slabs.index(i))
    for i in gl.static_range(STAGES):
        fetch_windows(x, boxes, ready, i, first + i * step, total, padded_height, COUNTS, ROWS, COLUMNS)
    mbarrier.wait(ready.index(STAGES), 0)
    done = 0
    for box in range(first, total, step):
        stage = done % STAGES
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        acc0 = product(boxes, slabs, stage, 0, FILTERS, ACC)
        acc1 = product(boxes, slabs, stage, 1, FILTERS, ACC)
        acc2 = product(boxes, slabs, stage, 2, FILTERS, ACC)
        acc3 = product(boxes, slabs, stage, 3, FILTERS, ACC)
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2, acc3))
        gl.thread_barrier()
        fetch_windows(x, boxes, ready, stage, box + STAGES * step, total, padded_height, COUNTS, ROWS, COLUMNS)
        done += 1  # noqa: SIM113
        above = gl.maximum(coded(acc0, 0, CODES), coded(acc1, 1, CODES))
        below = gl.maximum(coded(acc2, 2, CODES), coded(acc3, 3, CODES))
        out, code = finished(gl.maximum(above, below), bias, channel, ACTIVATION, SLOPE, HAS_BIAS, CODES)
        image, row, column = place_of(box, COUNTS, ROWS, COLUMNS)
        if CODES:
            send((codes, codes), staged_codes, code.to(gl.uint8), 0, [image, row, column, channel])
        send((y, y), staged, out.to(y.dtype), 0, [image, row, column, channel])
    tma.store_wait(0)


def launch_window(problem: Problem, given: ConvTensors, tile: plan.WindowTile) -> Tensor:
    """Run the kernel on `hopper_plan.pack_windows` weights; the result is channels-last."""
    x, packed, bias, codes, *_ = given
    maps = empty_result(problem, x)
    result = maps.permute(0, 2, 3, 1)
    (rows, columns), filters = plan.window_shape(problem), plan.window_filters(problem)
    size = plan.padded_size(problem)
    padded = launch_pad_channels(pixels_last(x), size, beyond=2 * rows)
    counts = plan.tile_counts(problem)
    total, tiles = problem.batch * counts[0] * counts[1], problem.filters // filters
    programs = max(1, gpu.multiprocessors(x.device) * tile.residents // tiles)
    block, winners = (1, rows, columns, filters), result if codes is None else codes
    start(composite_window, (tiles * min(total, programs),))(
        windows_of(padded, problem.batch * size[0], rows, columns),
        described(packed, packed.shape, packed.stride(), (filters, 16)),
        described(result, result.shape, result.stride(), block),
        described(winners, winners.shape, winners.stride(), block),
        bias if bias is not None else packed, total, size[0],
        COUNTS=counts, TOTAL=problem.filters, FILTERS=filters, ROWS=rows, COLUMNS=columns,
        **activation_options(problem), HAS_BIAS=bias is not None, CODES=codes is not None, STAGES=tile.stages,
        VIEW=halves(), ACC=accumulator(filters), num_warps=4,
    )  # fmt: skip
    return maps


def windows_of(padded: Tensor, rows_of_images: int, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of padded images as [image rows, halves of windows, rows of windows, values of a row]."""
    pitch = padded.shape[1] * 4
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=4)
    shape, strides = [rows_of_images, 2, rows, pitch], [pitch, 8, 2 * pitch, 1]
    return TensorDescriptor(padded, shape, strides, [4, 2, rows, columns * 8], layout)


def halves() -> Any:
    """The layout of [windows, 16] in shared memory: eight values of every window, then the other eight."""
    row = [[0, 1], [0, 2], [0, 4]] + [[2**i, 0] for i in range(plan.WINDOWS.bit_length() - 1)] + [[0, 8]]
    return gl.SharedLinearLayout(offset_bases=row, alignment=1024)


# The weight gradient of a pooled first layer for Hopper, over the 4x4 windows of `window`.
#
# In each 2x2 pool one pixel has won, and only it gets the pool's gradient. A program stores the gradients of a
# tile in shared memory four times, once per pixel of the pool, with zeros where another pixel won. The product
# of such a copy, transposed, with a row of the windows is the gradient of the weights of one row of taps. Pixels
# in the left and the right column of the pool use different columns of the window, so there are two sets of
# three accumulators.
#
# A program is persistent over tiles: it fetches the windows STAGES tiles ahead, and loads the next tile's
# gradients while it multiplies. The sums of all programs are added in device memory. The padded pixels have a
# channel of ones, whose gradient at the middle tap is the bias gradient.

FILTERS = 64
"""Filters of a tile: a matrix instruction takes 64 rows."""
GRADIENT = plan.WindowTile(stages=2, residents=2)


@gluon.jit
def read_tile(
    grad, codes,  # [N, height, width, TOTAL]
    box, total, channel, height, width,
    COUNTS: gl.constexpr, TOTAL: gl.constexpr, FILTERS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The gradients and winners of a tile of windows; beyond the borders no pixel has won (code 4)."""
    image, row, column = place_of(box, COUNTS, ROWS, COLUMNS)
    window = gl.arange(0, ROWS * COLUMNS, layout=gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, FILTERS, layout=gl.SliceLayout(0, LAYOUT))
    row, column = row + window // COLUMNS, column + window % COLUMNS
    inside = ((row < height) & (column < width) & (box < total))[:, None] & (channel + lane < TOTAL)[None, :]
    start = (image * height + row).to(gl.int64)  # a large batch has more results than 32 bits count
    place = (start * width + column)[:, None] * TOTAL + (channel + lane)[None, :]
    return gl.load(grad + place, mask=inside, other=0.0), gl.load(codes + place, mask=inside, other=4)


@gluon.jit
def times_rows(won, boxes, stage, QUAD: gl.constexpr, sums):
    """Start the products of pixel `QUAD` of the pools: its gradients times the three rows that its taps read."""
    a = won.index(QUAD).permute([1, 0])
    added = ()
    for row in gl.static_range(3):
        b = boxes.index(stage * 4 + QUAD // 2 + row)
        added = added + (warpgroup_mma(a, b, sums[row], is_async=True),)
    return added


@gluon.jit
def add_up(
    dw,  # [6 * TOTAL, 16] float32, added to
    acc, PART: gl.constexpr, channel, TOTAL: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Add an accumulator to the sum of the other programs."""
    f = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, ACC))
    v = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, ACC))
    place = (PART * TOTAL + channel + f)[:, None] * 16 + v[None, :]
    gl.atomic_add(dw + place, acc, mask=(channel + f < TOTAL)[:, None] & (v < 16)[None, :], sem="relaxed")


@gluon.jit
def window_gradient(
    x,  # descriptor of the padded pixels, see `window.windows_of`
    grad, codes,  # [N, height, width, TOTAL]: the gradient, and the winners' places
    dw,  # [6 * TOTAL, 16] float32, added to: laid out as in `hopper_plan.pack_windows`
    total, padded_height, height, width,
    COUNTS: gl.constexpr, TOTAL: gl.constexpr, FILTERS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, VIEW: gl.constexpr, WON: gl.constexpr, READ: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Persistent over tiles of windows; the next tile's gradients are loaded while one is multiplied."""
    TILES: gl.constexpr = (TOTAL + FILTERS - 1) // FILTERS
    # Shared memory: rows of windows for STAGES tiles, and the gradients by the winner's place in its pool.
    boxes = gl.allocate_shared_memory(x.dtype, [STAGES * 4, ROWS * COLUMNS, 16], VIEW)
    won = gl.allocate_shared_memory(x.dtype, [4, ROWS * COLUMNS, FILTERS], WON)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    channel = gl.program_id(0) % TILES * FILTERS
    first, step = gl.program_id(0) // TILES, gl.num_programs(0) // TILES
    for i in gl.static_range(STAGES):
        fetch_windows(x, boxes, ready, i, first + i * step, total, padded_height, COUNTS, ROWS, COLUMNS)
    g, code = read_tile(
        grad, codes, first, total, channel, height, width, COUNTS, TOTAL, FILTERS, ROWS, COLUMNS, READ
    )
    sums = ()  # of the left column of the pools, then of the right one
    for _ in gl.static_range(6):
        sums = sums + (gl.zeros([FILTERS, 16], gl.float32, layout=ACC),)
    done = 0
    for box in range(first, total, step):
        stage = done % STAGES
        # Lay the gradients out by winner: each pixel of the pool gets those that it has won.
        for quad in gl.static_range(4):
            won.index(quad).store(gl.where(code == quad, g, 0.0).to(x.dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        # Pixels 0 and 2 are in the left column of the pool, 1 and 3 in the right one.
        left = times_rows(won, boxes, stage, 0, sums[:3])
        right = times_rows(won, boxes, stage, 1, sums[3:])
        left = times_rows(won, boxes, stage, 2, left)
        right = times_rows(won, boxes, stage, 3, right)
        # Load the next tile's gradients while the products run.
        g, code = read_tile(
            grad, codes, box + step, total, channel, height, width,
            COUNTS, TOTAL, FILTERS, ROWS, COLUMNS, READ,
        )  # fmt: skip
        sums = warpgroup_mma_wait(0, deps=left + right)
        gl.thread_barrier()
        fetch_windows(x, boxes, ready, stage, box + STAGES * step, total, padded_height, COUNTS, ROWS, COLUMNS)
        done += 1  # noqa: SIM113
    for part in gl.static_range(6):
        add_up(dw, sums[part], part, channel, TOTAL, ACC)


def launch_window_gradient(
    problem: Problem, pixels: Tensor, grad: Tensor, codes: Tensor, tile: plan.WindowTile = GRADIENT
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the groups' weights and of the bias, in float32; `grad` and `codes` are [N, H, W, filters]."""
    (rows, columns), size = plan.window_shape(problem), plan.padded_size(problem)
    padded = launch_pad_channels(pixels, size, beyond=2 * rows)
    counts, tiles = plan.tile_counts(problem), ceil_div(problem.filters, FILTERS)
    total = problem.batch * counts[0] * counts[1]
    programs = max(1, gpu.multiprocessors(grad.device) * tile.residents // tiles)
    dw = torch.zeros((6 * problem.filters, 16), device=grad.device)
    start(window_gradient, (tiles * min(total, programs),))(
        windows_of(padded, problem.batch * size[0], rows, columns), grad, codes, dw, total, size[0],
        *problem.result_size,
        COUNTS=counts, TOTAL=problem.filters, FILTERS=FILTERS, ROWS=rows, COLUMNS=columns, STAGES=tile.stages,
        VIEW=halves(), WON=shared_layout((rows * columns, FILTERS), grad),
        READ=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        ACC=accumulator(16), num_warps=4,
    )  # fmt: skip
    return plan.unpack_windows(dw, problem)
