"""The composite forward for Hopper: pixels of a run of taps are fetched once and used by all of them.

The taps of a kx1 filter read boxes of pixels that differ by a shift along the rows. One fetch of the box and
the rows beyond it serves all taps, if the shift is a whole number of the 8-pixel atoms in which shared memory
is swizzled: so the axis the taps run along is the outermost of the tile, ahead of images and the other axis.
For 1xk filters the axes change places in the tensor map, nothing else; a kxk filter is k runs side by side.
This cuts the bytes fetched per product by up to k and leaves borders to the tensor memory accelerator, which
fills zeros. Programs are persistent: the loads of the next tile are under way while one is written.
"""

# ruff: noqa: N803, N806
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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

from lowrank_cnn.kernels.conv.hopper_plan import (
    HopperTile,
    box_counts,
    box_total,
    default_tile,
    run_box,
    run_length,
    run_rows,
)
from lowrank_cnn.kernels.conv.start import start
from lowrank_cnn.kernels.problem import Problem, empty_result, pixels_last
from lowrank_cnn.kernels.tiles import filter_tiles


@gluon.jit
def place_of(
    index, rows_x, rows_y, turned_x, turned_y,
    GROUPS: gl.constexpr, TILES: gl.constexpr, FILTERS: gl.constexpr, RUN: gl.constexpr, IMAGES: gl.constexpr,
    CROSS: gl.constexpr,
):  # fmt: skip
    """Group and box of a tile: its row of `GROUPS` (see `hopper_plan.run_rows`) and where its pixels begin.

    The last tile of a group begins early enough to be whole: what it shares with the tile before is computed
    twice, to the same bits.
    """
    tile, box = index % TILES, index // TILES
    first, weight, channel, filters, columns, along, across = 0, 0, 0, 0, 1, 0, 0
    before, beside, turned = 0, 0, 0
    for g in gl.static_range(len(GROUPS)):
        if tile >= GROUPS[g][0]:
            first, weight, channel, filters = GROUPS[g][0], GROUPS[g][1], GROUPS[g][2], GROUPS[g][3]
            columns, along, across = GROUPS[g][4], GROUPS[g][5], GROUPS[g][6]
            before, beside, turned = GROUPS[g][7], GROUPS[g][8], GROUPS[g][9]
    offset = gl.minimum((tile - first) * FILTERS, filters - FILTERS)
    boxes_x = gl.where(turned > 0, turned_x, rows_x)
    boxes_y = gl.where(turned > 0, turned_y, rows_y)
    x, y = box % boxes_x, box // boxes_x % boxes_y
    run = gl.where(turned > 0, x, y) * RUN
    cross = gl.where(turned > 0, y, x) * CROSS
    image = box // (boxes_x * boxes_y) * IMAGES
    return weight + offset, channel + offset, columns, along, across, before, beside, turned, run, image, cross


@gluon.jit
def fetch(
    xs, w, pixels, slabs, box_ready, slab_ready, state, total, sizes,
    TAP: gl.constexpr, TAPS: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, RUN: gl.constexpr,
    IMAGES: gl.constexpr, CROSS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Begin the next fetch: the weights of one tap and, at a run's first tap, the pixels of the whole run.

    `state` is the tile that fetches have reached and its place, the step in it, and the boxes and slabs so far.
    The place costs divisions, which would stand between the products of every tap: it is carried along.
    """
    FILTERS: gl.constexpr = w.block_shape[0]
    DEPTH: gl.constexpr = w.block_shape[1]
    SPAN: gl.constexpr = RUN + TAPS - 1
    BOXES: gl.constexpr = box_ready.shape[0]
    SLABS: gl.constexpr = slabs.shape[0]
    size: gl.constexpr = w.dtype.primitive_bitwidth // 8
    ahead, step, boxed, issued, weight, columns, along, across, before, beside, turned, run, image, cross = state
    live = ahead < total
    column = step // STEPS
    depth = step % STEPS * DEPTH
    if TAP == 0:
        ready = box_ready.index(boxed % BOXES)
        mbarrier.expect(ready, SPAN * IMAGES * CROSS * DEPTH * size, pred=live)
        base = boxed % BOXES * SPAN
        body = pixels.index(base)._reinterpret(w.dtype, xs[0].block_shape, xs[0].layout)
        start = run - before
        side = cross + column - beside
        if turned > 0:
            tma.async_copy_global_to_shared(xs[2], [start, image, side, depth], ready, body, pred=live)
        else:
            tma.async_copy_global_to_shared(xs[0], [start, image, side, depth], ready, body, pred=live)
        if TAPS > 1:
            rest = pixels.index(base + RUN)._reinterpret(w.dtype, xs[1].block_shape, xs[1].layout)
            start += RUN
            if turned > 0:
                tma.async_copy_global_to_shared(xs[3], [start, image, side, depth], ready, rest, pred=live)
            else:
                tma.async_copy_global_to_shared(xs[1], [start, image, side, depth], ready, rest, pred=live)
        boxed += 1
    ready = slab_ready.index(issued % SLABS)
    mbarrier.expect(ready, FILTERS * DEPTH * size, pred=live)
    row = weight + TAP * along + column * across
    tma.async_copy_global_to_shared(w, [row, depth], ready, slabs.index(issued % SLABS), pred=live)
    if TAP == TAPS - 1:
        step += 1
        if step == columns * STEPS:
            step = 0
            ahead += gl.num_programs(0)
            weight, _, columns, along, across, before, beside, turned, run, image, cross = place_of(
                ahead, sizes[0], sizes[1], sizes[2], sizes[3], GROUPS, TILES, FILTERS, RUN, IMAGES, CROSS
            )
    issued += 1
    return ahead, step, boxed, issued, weight, columns, along, across, before, beside, turned, run, image, cross


@gluon.jit
def pooled(
    acc, turned, run, cross, out_height, out_width,
    RUN: gl.constexpr, IMAGES: gl.constexpr, CROSS: gl.constexpr, WHOLE: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """The maximum of each 2x2 window of a tile; pixels outside the image never win.

    Where codes are wanted, each value carries its place in the window in its two lowest bits.
    """
    FILTERS: gl.constexpr = acc.shape[1]
    pixel = gl.arange(0, RUN * IMAGES * CROSS, layout=gl.SliceLayout(1, acc.type.layout))
    ahead, beside = pixel // (IMAGES * CROSS), pixel % CROSS
    if not WHOLE:
        out_run = gl.where(turned > 0, out_width, out_height)
        out_cross = gl.where(turned > 0, out_height, out_width)
        inside = (run + ahead < out_run) & (cross + beside < out_cross)
        acc = gl.where(inside[:, None], acc, -3.0e38)
    if CODES:
        place = gl.where(turned > 0, beside % 2 * 2 + ahead % 2, ahead % 2 * 2 + beside % 2)
        bits = acc.to(gl.int32, bitcast=True) & ~3 | 3 - place[:, None]
        acc = bits.to(gl.float32, bitcast=True)
    quads = acc.reshape([RUN // 2, 2, IMAGES, CROSS // 2, 2, FILTERS])
    return gl.max(gl.max(quads, 4), 1).reshape([RUN // 2 * IMAGES * (CROSS // 2), FILTERS])


@gluon.jit
def send(targets, staged, values, turned, place):
    """Write a tile through shared memory, once what was sent through it before has left."""
    tma.store_wait(0)
    gl.thread_barrier()
    staged.store(values.reshape(staged.shape))
    fence_async_shared()
    gl.thread_barrier()
    if turned > 0:
        tma.async_copy_shared_to_global(targets[1], place, staged)
    else:
        tma.async_copy_shared_to_global(targets[0], place, staged)


@gluon.jit
def finished(out, bias, channel, RELU: gl.constexpr, HAS_BIAS: gl.constexpr, CODES: gl.constexpr):
    """Bias and ReLU; with `CODES` also each pool's winner, from the values' lowest bits, 4 where ReLU cut it."""
    FILTERS: gl.constexpr = out.shape[1]
    bits = out.to(gl.int32, bitcast=True)
    code = 3 - (bits & 3)
    if CODES:  # with its place left in it, a zero would be above zero
        out = (bits & ~3).to(gl.float32, bitcast=True)
    if HAS_BIAS:
        lanes = gl.arange(0, FILTERS, layout=gl.SliceLayout(0, out.type.layout))
        out = out + gl.load(bias + channel + lanes).to(gl.float32)[None, :]
    if RELU:
        out = gl.maximum(out, 0.0)
        code = gl.where(out > 0, code, 4)
    return out, code


@gluon.jit
def write(
    ys, cs, staged, staged_codes, out, bias, channel, turned, run, image, cross,
    RELU: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Bias, ReLU and rounding, then out through shared memory, in parts so that little of it is taken."""
    FILTERS: gl.constexpr = out.shape[1]
    out, code = finished(out, bias, channel, RELU, HAS_BIAS, CODES)
    if CODES:
        send(cs, staged_codes, code.to(gl.uint8), turned, [run, image, cross, channel])
    out = out.to(ys[0].dtype)
    if PARTS == 2:
        low, high = out.reshape([out.shape[0], 2, FILTERS // 2]).permute(0, 2, 1).split()
        send(ys, staged, low, turned, [run, image, cross, channel])
        send(ys, staged, high, turned, [run, image, cross, channel + FILTERS // 2])
    else:
        send(ys, staged, out, turned, [run, image, cross, channel])


@gluon.jit
def composite_hopper(
    x_rows, x_rows_rest, x_columns, x_columns_rest, w, y_rows, y_columns, code_rows, code_columns, bias, total,
    rows_x, rows_y, turned_x, turned_y, out_height, out_width,
    GROUPS: gl.constexpr, TILES: gl.constexpr, TAPS: gl.constexpr, RUN: gl.constexpr, IMAGES: gl.constexpr,
    CROSS: gl.constexpr, STEPS: gl.constexpr, RELU: gl.constexpr, POOL: gl.constexpr, WHOLE: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOXES: gl.constexpr, SLABS: gl.constexpr, PARTS: gl.constexpr,
    CODES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Persistent over tiles. `BOXES` runs of pixels and `SLABS` taps of weights are in flight or in use.

    A slab is refilled once the product before the current one is done; its box then is free as well, because
    SLABS <= TAPS * (BOXES - 1) + 1.
    """
    FILTERS: gl.constexpr = w.block_shape[0]
    DEPTH: gl.constexpr = w.block_shape[1]
    SPAN: gl.constexpr = RUN + TAPS - 1
    PIXELS: gl.constexpr = RUN * IMAGES * CROSS
    SHRINK: gl.constexpr = 2 if POOL else 1
    xs = (x_rows, x_rows_rest, x_columns, x_columns_rest)
    ys, cs = (y_rows, y_columns), (code_rows, code_columns)
    sizes = (rows_x, rows_y, turned_x, turned_y)
    pixels = gl.allocate_shared_memory(w.dtype, [BOXES * SPAN, IMAGES * CROSS, DEPTH], w.layout)
    slabs = gl.allocate_shared_memory(w.dtype, [SLABS, FILTERS, DEPTH], w.layout)
    staged = gl.allocate_shared_memory(w.dtype, y_rows.block_shape, y_rows.layout)
    staged_codes = staged
    if CODES:
        staged_codes = gl.allocate_shared_memory(gl.uint8, code_rows.block_shape, code_rows.layout)
    box_ready = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    slab_ready = gl.allocate_shared_memory(gl.int64, [SLABS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BOXES):
        mbarrier.init(box_ready.index(i), count=1)
    for i in gl.static_range(SLABS):
        mbarrier.init(slab_ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    weight, channel, columns, along, across, before, beside, turned, run, image, cross = place_of(
        gl.program_id(0), rows_x, rows_y, turned_x, turned_y, GROUPS, TILES, FILTERS, RUN, IMAGES, CROSS
    )
    ahead, step, boxed, issued = gl.program_id(0), 0, 0, 0
    state = (ahead, step, boxed, issued, weight, columns, along, across, before, beside, turned, run, image, cross)
    for i in gl.static_range(SLABS - 1):
        state = fetch(
            xs, w, pixels, slabs, box_ready, slab_ready, state, total, sizes,
            i % TAPS, TAPS, GROUPS, TILES, RUN, IMAGES, CROSS, STEPS,
        )  # fmt: skip
    used, done = 0, 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _, channel, columns, _, _, _, _, turned, run, image, cross = place_of(
            index, rows_x, rows_y, turned_x, turned_y, GROUPS, TILES, FILTERS, RUN, IMAGES, CROSS
        )
        acc = gl.zeros([PIXELS, FILTERS], gl.float32, layout=ACC)
        for turn in range(columns * STEPS):  # noqa: B007
            box = used % BOXES
            mbarrier.wait(box_ready.index(box), used // BOXES & 1)
            for tap in gl.static_range(TAPS):
                slab = done % SLABS
                mbarrier.wait(slab_ready.index(slab), done // SLABS & 1)
                a = pixels.index(box * SPAN + tap)._reinterpret(w.dtype, [PIXELS, DEPTH], w.layout)
                acc = warpgroup_mma(a, slabs.index(slab).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                gl.thread_barrier()
                state = fetch(
                    xs, w, pixels, slabs, box_ready, slab_ready, state, total, sizes,
                    (tap + SLABS - 1) % TAPS, TAPS, GROUPS, TILES, RUN, IMAGES, CROSS, STEPS,
                )  # fmt: skip
                done += 1
            used += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if POOL:
            acc = pooled(acc, turned, run, cross, out_height, out_width, RUN, IMAGES, CROSS, WHOLE, CODES)
        write(
            ys, cs, staged, staged_codes, acc, bias, channel, turned, run // SHRINK, image, cross // SHRINK,
            RELU, HAS_BIAS, PARTS, CODES,
        )  # fmt: skip
    tma.store_wait(0)


def launch_hopper(
    problem: Problem,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    tile: HopperTile | None = None,
    codes: Tensor | None = None,
) -> Tensor:
    """Run the kernel on `pack.pack_rows` weights; the result is channels-last."""
    tile = tile or default_tile(problem)
    pixels, maps = pixels_last(x), empty_result(problem, x)
    result = maps.permute(0, 2, 3, 1)
    taps, box = run_length(problem), run_box(problem, tile)
    run, images, cross = box
    shrink = 1 if problem.pool is None else 2
    block, beyond = (run, images, cross, tile.depth), (max(taps - 1, 1), images, cross, tile.depth)
    out = (run // shrink, images, cross // shrink, tile.filters // tile.parts)
    rows, turned = box_counts(problem, box)
    tiles = filter_tiles(problem, tile.filters)
    total = tiles * box_total(problem, box)
    grid = min(total, multiprocessors(x.device) * tile.residents)
    start(composite_hopper, (grid,))(
        described_pixels(pixels, block), described_pixels(pixels, beyond),
        described_pixels(pixels, block, turned=True), described_pixels(pixels, beyond, turned=True),
        described(packed, packed.shape, packed.stride(), (tile.filters, tile.depth)),
        described_pixels(result, out), described_pixels(result, out, turned=True),
        described_pixels(result if codes is None else codes, out),
        described_pixels(result if codes is None else codes, out, turned=True),
        bias if bias is not None else packed, total, *rows, *turned, problem.out_height, problem.out_width,
        GROUPS=run_rows(problem, tile.filters, taps), TILES=tiles, TAPS=taps, RUN=run, IMAGES=images,
        CROSS=cross, STEPS=-(-problem.channels // tile.depth), RELU=problem.relu,
        POOL=problem.pool is not None, WHOLE=problem.pool != "ceil" or problem.even,
        HAS_BIAS=bias is not None, BOXES=tile.boxes, SLABS=tile.slabs, PARTS=tile.parts,
        CODES=codes is not None, ACC=_accumulator(tile), num_warps=tile.warps,
    )  # fmt: skip
    return maps


def _accumulator(tile: HopperTile) -> gl.NVMMADistributedLayout:
    filters = tile.filters // tile.warp_grid[1]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=list(tile.warp_grid), instr_shape=[16, filters, 16]
    )


def described_pixels(pixels: Tensor, block: tuple[int, ...], *, turned: bool = False) -> TensorDescriptor:
    """[N, H, W, C] memory seen with the run's axis first: rows, images, columns, or columns, images, rows."""
    batch, height, width, channels = pixels.shape
    row, image, column = width * channels, height * width * channels, channels
    if turned:
        return described(pixels, (width, batch, height, channels), (column, image, row, 1), block)
    return described(pixels, (height, batch, width, channels), (row, image, column, 1), block)


def described(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    kind = getattr(gl, str(base.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return TensorDescriptor(base, list(shape), list(strides), list(block), layout)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
