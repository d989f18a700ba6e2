"""A first layer of stride 2 for Hopper: the tensor cores read overlapping windows in place in shared memory.

See `hopper_plan` for the idea. A strip is a few result rows of one image by up to 64 windows. The rows of the
image that it reads are fetched unchanged, 64 blocks of each. Each row of the conv is one product per slab of
weights. A 3x3 pool of stride 2 that follows is a maximum over three such rows, which stay in registers, and over
neighbouring columns, which threads exchange. Only pooled pixels are written.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

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

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.conv import hopper_plan as plan
from lowrank_cnn.kernels.conv.copies import launch_pad_channels
from lowrank_cnn.kernels.conv.hopper import accumulator, described, finished
from lowrank_cnn.kernels.conv.tiled import activation_options
from lowrank_cnn.kernels.conv.window import halves, place_of
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import ConvTensors, Problem, empty_result, pixels_last

WORDS = {2: torch.int32, 4: torch.int64}
"""A type of two values, by the bytes of one."""


@gluon.jit
def fetch_strip(
    x,  # descriptor of the image as words, see `composite_overlap`
    blocks,  # shared memory [blocks, 8]: STAGES strips
    ready,  # shared memory: a barrier per stage
    stage, index, total,
    COUNTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, FETCHED: gl.constexpr,
    STRIDE: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr, POOL: gl.constexpr,
):  # fmt: skip
    """Start to fetch the rows of a strip, if there is one: 64 blocks of each, zeros outside the image."""
    live = index < total
    image, row, column = place_of(index, COUNTS, ROWS, COLUMNS)
    # The conv's first row and column. A pool also reads the row and column before its first result's.
    y = (2 * row - 1 if POOL else row) * STRIDE + TOP
    left = (2 * column - 1 if POOL else column) + LEFT
    bar = ready.index(stage)
    STEP: gl.constexpr = x.block_shape[1]
    size: gl.constexpr = x.dtype.primitive_bitwidth // 8
    mbarrier.expect(bar, FETCHED * x.block_shape[2] * size, pred=live)
    for part in gl.static_range(FETCHED // STEP):
        target = blocks.index((stage * FETCHED + part * STEP) * (x.block_shape[2] // 4))
        target = target._reinterpret(x.dtype, x.block_shape, x.layout)
        tma.async_copy_global_to_shared(x, [image, y + part * STEP, left * 4], bar, target, pred=live)


@gluon.jit
def conv_row(
    blocks, slabs, first,
    SLABS: gl.constexpr, WINDOWS: gl.constexpr, FILTERS: gl.constexpr, VIEW: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Start the products of one row of the conv, [WINDOWS, FILTERS]; its first window begins at block `first`."""
    acc = gl.zeros([WINDOWS, FILTERS], gl.float32, layout=ACC)
    for i in gl.static_range(len(SLABS)):
        a = blocks.index(first + SLABS[i][0] * WINDOWS + SLABS[i][1])
        a = a._reinterpret(slabs.dtype, [WINDOWS, 16], VIEW)
        acc = warpgroup_mma(a, slabs.index(i).permute([1, 0]), acc, use_acc=i > 0, is_async=True)
    return acc


@gluon.jit
def store_row(
    y,  # [N, height, width, TOTAL], written
    out, dtype, image, row, column, channel, height, width,
    TOTAL: gl.constexpr, COLUMNS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Store [columns, filters] of one result row; columns outside the tile or the image are masked."""
    values = gl.convert_layout(out.to(dtype), OUT)
    across = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, OUT))
    lane = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, OUT))
    inside = (across < COLUMNS) & (column + across < width) & (row < height)
    place = ((image * height + row) * width + column + across)[:, None] * TOTAL
    gl.store(y + place + channel + lane[None, :], values, mask=inside[:, None])


@gluon.jit
def pooled_columns(out, first, out_width):
    """The maximum of columns 2j, 2j + 1 and 2j + 2 of [columns, filters]; those outside the image never win."""
    COLUMNS: gl.constexpr = out.shape[0]
    FILTERS: gl.constexpr = out.shape[1]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, out.type.layout))
    inside = (first + column >= 0) & (first + column < out_width)
    out = gl.where(inside[:, None], out, -3.0e38)
    pairs = gl.max(out.reshape([COLUMNS // 2, 2, FILTERS]), 1)
    evens = gl.where((column % 2 == 0)[:, None], out, -3.0e38)
    evens = gl.max(evens.reshape([COLUMNS // 2, 2, FILTERS]), 1)
    # The third column of a window is the first of the next.
    place = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(1, evens.type.layout))
    following = gl.minimum(place + 1, COLUMNS // 2 - 1)[:, None] + gl.zeros_like(evens).to(gl.int32)
    return gl.maximum(pairs, gl.gather(evens, following, 0))


@gluon.jit
def composite_overlap(
    x,  # descriptor of [N, H, W * 2] as 32-bit words: pixels of four 16-bit channels
    w,  # descriptor of [slabs * TOTAL, 16], see `hopper_plan.pack_overlap`
    y,  # [N, H', W', TOTAL], written
    bias,  # [TOTAL]
    total, out_height, out_width, height, width,
    COUNTS: gl.constexpr, TOTAL: gl.constexpr, FILTERS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    FETCHED: gl.constexpr, STRIDE: gl.constexpr, TOP: gl.constexpr, LEFT: gl.constexpr,
    SLABS: gl.constexpr, POOL: gl.constexpr, ACTIVATION: gl.constexpr, SLOPE: gl.constexpr,
    HAS_BIAS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr, VIEW: gl.constexpr, ACC: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Persistent over strips, with `STAGES` of them in flight; the weights are fetched once."""
    WINDOWS: gl.constexpr = x.block_shape[2] // 4
    TILES: gl.constexpr = TOTAL // FILTERS
    # One row more than is fetched: the last windows of the last row read beyond it, for results that are masked.
    blocks = gl.allocate_shared_memory(w.dtype, [(STAGES * FETCHED + 1) * WINDOWS, 8], FLAT)
    slabs = gl.allocate_shared_memory(w.dtype, [len(SLABS), FILTERS, 16], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    channel = gl.program_id(0) % TILES * FILTERS
    first, step = gl.program_id(0) // TILES, gl.num_programs(0) // TILES
    size: gl.constexpr = w.dtype.primitive_bitwidth // 8
    mbarrier.expect(ready.index(STAGES), len(SLABS) * FILTERS * 16 * size)
    for i in gl.static_range(len(SLABS)):
        tma.async_copy_global_to_shared(w, [i * TOTAL + channel, 0], ready.index(STAGES), slabs.index(i))
    for i in gl.static_range(STAGES):
        fetch_strip(
            x, blocks, ready, i, first + i * step, total, COUNTS, ROWS, COLUMNS, FETCHED, STRIDE, TOP, LEFT, POOL
        )  # fmt: skip
    mbarrier.wait(ready.index(STAGES), 0)
    done = 0
    for index in range(first, total, step):
        stage = done % STAGES
        mbarrier.wait(ready.index(stage), done // STAGES & 1)
        image, row, column = place_of(index, COUNTS, ROWS, COLUMNS)
        start = stage * FETCHED * WINDOWS
        if POOL:
            # Three rows of the conv make one row of results; the last of them is the first of the next three.
            last = conv_row(blocks, slabs, start, SLABS, WINDOWS, FILTERS, VIEW, ACC)
            for i in gl.static_range(ROWS):
                here = start + (2 * i + 1) * STRIDE * WINDOWS
                middle = conv_row(blocks, slabs, here, SLABS, WINDOWS, FILTERS, VIEW, ACC)
                below = conv_row(blocks, slabs, here + STRIDE * WINDOWS, SLABS, WINDOWS, FILTERS, VIEW, ACC)
                last, middle, below = warpgroup_mma_wait(0, deps=(last, middle, below))
                # Rows of the conv outside the image never win.
                best = gl.maximum(middle, gl.where(row + i > 0, last, middle))
                best = gl.maximum(best, gl.where(2 * (row + i) + 1 < out_height, below, best))
                last = below
                out, _ = finished(best, bias, channel, ACTIVATION, SLOPE, HAS_BIAS, False)
                out = pooled_columns(out, 2 * column - 1, out_width)
                store_row(y, out, w.dtype, image, row + i, column, channel, height, width, TOTAL, COLUMNS, OUT)
        else:
            for i in gl.static_range(ROWS):
                here = start + i * STRIDE * WINDOWS
                acc = conv_row(blocks, slabs, here, SLABS, WINDOWS, FILTERS, VIEW, ACC)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                out, _ = finished(acc, bias, channel, ACTIVATION, SLOPE, HAS_BIAS, False)
                store_row(y, out, w.dtype, image, row + i, column, channel, height, width, TOTAL, COLUMNS, OUT)
        gl.thread_barrier()
        fetch_strip(
            x, blocks, ready, stage, index + STAGES * step, total,
            COUNTS, ROWS, COLUMNS, FETCHED, STRIDE, TOP, LEFT, POOL,
        )  # fmt: skip
        done += 1  # noqa: SIM113


def launch_overlap(problem: Problem, given: ConvTensors, tile: plan.OverlapTile) -> Tensor:
    """Run the kernel on `hopper_plan.pack_overlap` weights; the result is channels-last."""
    x, packed, bias, *_ = given
    maps = empty_result(problem, x)
    result = maps.permute(0, 2, 3, 1)
    reach, filters = plan.reach_of(problem), plan.window_filters(problem)
    padded = launch_pad_channels(pixels_last(x), (problem.height, round_up(problem.width, 2)), beyond=0, border=0)
    # A fetch takes at most 256 elements along a row. As words of two values it takes twice the values.
    words = padded.view(problem.batch, problem.height, 4 * padded.shape[1]).view(WORDS[x.element_size()])
    (rows, width), columns = problem.result_size, plan.result_columns(problem)
    counts = (ceil_div(rows, tile.rows), ceil_div(width, columns))  # strips of an image, and tiles of its columns
    total, tiles = problem.batch * counts[0] * counts[1], problem.filters // filters
    programs = max(1, gpu.multiprocessors(x.device) * tile.residents // tiles)
    # Blocks of 16 bytes that follow each other; fetches need an aligned beginning.
    flat = gl.SharedLinearLayout(offset_bases=[[1], [2], [4]], alignment=1024)
    # Threads with 16 bytes of a pixel's filters each, so that whole cache lines are written.
    across = min(32, filters // 8)
    start(composite_overlap, (tiles * min(total, programs),))(
        TensorDescriptor(
            words, list(words.shape), list(words.stride()), [1, plan.FETCHED_ROWS, 4 * plan.WINDOWS],
            gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3),
        ),
        described(packed, packed.shape, packed.stride(), (filters, 16)),
        result, bias if bias is not None else packed, total, problem.out_height, problem.out_width,
        *problem.result_size,
        COUNTS=counts, TOTAL=problem.filters, FILTERS=filters, ROWS=tile.rows, STRIDE=problem.stride[0],
        COLUMNS=columns, FETCHED=plan.fetched_rows(problem, tile),
        TOP=reach.top, LEFT=reach.left, SLABS=tuple(plan.slabs_of(problem)), POOL=problem.pool is not None,
        HAS_BIAS=bias is not None, STAGES=tile.stages, FLAT=flat, VIEW=halves(), ACC=accumulator(filters),
        OUT=gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0]), **activation_options(problem),
        num_warps=4,
    )  # fmt: skip
    return maps
