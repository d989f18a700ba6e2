"""The composite forward for Hopper: the pixels of a run of taps are fetched once and used by all of them.

The taps of a kx1 filter read boxes of pixels that differ by a shift along the rows. One fetch of the box with the
rows beyond it serves all taps, if the shift is a whole number of the 8-pixel atoms in which shared memory is
swizzled. The axis that the taps run along is therefore the outermost of the tile, before images and the other
axis. For 1xk filters the axes change places in the tensor map; a kxk filter is k runs side by side. This cuts the
bytes fetched per product by up to k. The tensor memory accelerator fills zeros outside the image.

A program is persistent: it takes tiles of PIXELS x FILTERS results in turn, and starts the fetches of the next
tile while it writes one. At stride 2 the image is viewed as in `tiled`, and each tap is a run of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from lowrank_cnn.kernels.conv.tiled import activated, activation_options, without_codes
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import (
    Box,
    ConvTensors,
    Problem,
    filter_tiles,
    pixels_last,
    pixels_view,
    result_and_residual,
)

# The places of the Hopper kernel's tiles, and the fetches of their pixels and weights.

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false


@gluon.jit
def place_of(
    index, counts,
    GROUPS: gl.constexpr, TILES: gl.constexpr, FILTERS: gl.constexpr, RUN: gl.constexpr, IMAGES: gl.constexpr,
    CROSS: gl.constexpr,
):  # fmt: skip
    """The place of a tile: its geometry and its corner.

    `counts` are the boxes along x and y for runs along the rows, then for runs along the columns. The geometry is
    (weight row, runs, along, across, before, beside, width, top skip, left skip) as in `hopper_plan.run_rows`, the
    corner (channel, turned, run, image, cross). The last tile of a group begins early enough to be whole: filters
    that it shares with the tile before are computed twice, with the same result.
    """
    tile, box = index % TILES, index // TILES
    first, weight, channel, filters, runs, along, across = 0, 0, 0, 0, 1, 0, 0
    before, beside, turned, width, top_skip, left_skip = 0, 0, 0, 1, 0, 0
    for g in gl.static_range(len(GROUPS)):
        if tile >= GROUPS[g][0]:
            (
                first, weight, channel, filters, runs, along, across, before, beside, turned, width, top_skip,
                left_skip,
            ) = GROUPS[g]  # fmt: skip
    # The last tile of a group begins early, to be whole.
    offset = gl.minimum((tile - first) * FILTERS, filters - FILTERS)
    boxes_x = gl.where(turned > 0, counts[2], counts[0])
    boxes_y = gl.where(turned > 0, counts[3], counts[1])
    x, y = box % boxes_x, box // boxes_x % boxes_y
    run = gl.where(turned > 0, x, y) * RUN
    cross = gl.where(turned > 0, y, x) * CROSS
    image = box // (boxes_x * boxes_y) * IMAGES
    geometry = (weight + offset, runs, along, across, before, beside, width, top_skip, left_skip)
    return geometry, (channel + offset, turned, run, image, cross)


@gluon.jit
def fetch_pixels(
    xs,  # descriptors of the input, see `hopper.composite_hopper`
    pixels,  # shared memory [BOXES * SPAN, IMAGES * CROSS, DEPTH]
    ready, base, live, tap, depth, geometry, corner,
    TAPS: gl.constexpr, RUN: gl.constexpr, STRIDE: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    """Start to fetch the pixels of one run of taps to the box at `base`; `tap` numbers the runs of a group."""
    _, _, _, _, before, beside, width, top_skip, left_skip = geometry
    _, turned, run, image, cross = corner
    body = pixels.index(base)._reinterpret(xs[0].dtype, xs[0].block_shape, xs[0].layout)
    if STRIDE[0] * STRIDE[1] > 1:
        # A tap reads blocks of pixels at one parity of the rows and one of the columns.
        down, right = tap // width + top_skip, tap % width + left_skip
        y, x = run + down // STRIDE[0] - before, cross + right // STRIDE[1] - beside
        place = [y, image, down % STRIDE[0], x, right % STRIDE[1] * CHANNELS + depth]
        tma.async_copy_global_to_shared(xs[0], place, ready, body, pred=live)
    else:
        start = run - before
        side = cross + tap - beside
        if turned > 0:
            tma.async_copy_global_to_shared(xs[2], [start, image, side, depth], ready, body, pred=live)
        else:
            tma.async_copy_global_to_shared(xs[0], [start, image, side, depth], ready, body, pred=live)
        if TAPS > 1:  # the rows beyond the box, which the later taps read
            rest = pixels.index(base + RUN)._reinterpret(xs[1].dtype, xs[1].block_shape, xs[1].layout)
            start += RUN
            if turned > 0:
                tma.async_copy_global_to_shared(xs[3], [start, image, side, depth], ready, rest, pred=live)
            else:
                tma.async_copy_global_to_shared(xs[1], [start, image, side, depth], ready, rest, pred=live)


@gluon.jit
def fetch_weights(
    w,  # descriptor of [taps * filters of all groups, C]
    slabs,  # shared memory [SLABS, FILTERS, DEPTH]
    ready, geometry, TAPS: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Start to fetch all weights of a tile of filters, in the order of its products."""
    weight, runs, along, across = geometry[0], geometry[1], geometry[2], geometry[3]
    size: gl.constexpr = w.dtype.primitive_bitwidth // 8
    for turn in range(runs * STEPS):
        for tap in gl.static_range(TAPS):
            slab = turn * TAPS + tap
            row = weight + tap * along + turn // STEPS * across
            mbarrier.expect(ready.index(slab), w.block_shape[0] * w.block_shape[1] * size)
            place = [row, turn % STEPS * w.block_shape[1]]
            tma.async_copy_global_to_shared(w, place, ready.index(slab), slabs.index(slab))


@gluon.jit
def fetch(
    xs, w, pixels, slabs, box_ready, slab_ready, state, total, counts,
    TAP: gl.constexpr, TAPS: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, RUN: gl.constexpr,
    IMAGES: gl.constexpr, CROSS: gl.constexpr, STEPS: gl.constexpr, STRIDE: gl.constexpr,
    CHANNELS: gl.constexpr, STAY: gl.constexpr,
):  # fmt: skip
    """Start the next fetch: the weights of one tap and, at a run's first tap, the pixels of the whole run.

    With `STAY`, weights are in shared memory already, and every call fetches the pixels of a run.

    `state` is the tile that fetches have reached, the step in it, the boxes and slabs fetched so far, and the
    tile's place. Computing a place takes divisions, which would delay the products of every tap, so it is carried.
    """
    FILTERS: gl.constexpr = w.block_shape[0]
    DEPTH: gl.constexpr = w.block_shape[1]
    SPAN: gl.constexpr = RUN + TAPS - 1
    BOXES: gl.constexpr = box_ready.shape[0]
    SLABS: gl.constexpr = slabs.shape[0]
    size: gl.constexpr = w.dtype.primitive_bitwidth // 8
    ahead, step, boxed, issued, geometry, corner = state
    weight, runs, along, across = geometry[0], geometry[1], geometry[2], geometry[3]
    live = ahead < total
    column = step // STEPS
    depth = step % STEPS * DEPTH
    if TAP == 0:
        ready = box_ready.index(boxed % BOXES)
        mbarrier.expect(ready, SPAN * IMAGES * CROSS * DEPTH * size, pred=live)
        base = boxed % BOXES * SPAN
        fetch_pixels(
            xs, pixels, ready, base, live, column, depth, geometry, corner, TAPS, RUN, STRIDE, CHANNELS
        )  # fmt: skip
        boxed += 1
    if not STAY:
        ready = slab_ready.index(issued % SLABS)
        mbarrier.expect(ready, FILTERS * DEPTH * size, pred=live)
        row = weight + TAP * along + column * across
        tma.async_copy_global_to_shared(w, [row, depth], ready, slabs.index(issued % SLABS), pred=live)
    if STAY or TAP == TAPS - 1:
        step += 1
        if step == runs * STEPS:
            step = 0
            ahead += gl.num_programs(0)
            geometry, corner = place_of(ahead, counts, GROUPS, TILES, FILTERS, RUN, IMAGES, CROSS)
    issued += 1
    return ahead, step, boxed, issued, geometry, corner


# Steps after the matrix product, also of `window` and `overlap`: pool, bias, residual, activation, and storing the
# result. Results go through shared memory, from which the tensor memory accelerator copies whole boxes to device
# memory. A residual arrives in the same shared memory: each thread reads it from where it then stores its results.


@gluon.jit
def pooled(
    acc, turned, run, cross, out_height, out_width,
    RUN: gl.constexpr, IMAGES: gl.constexpr, CROSS: gl.constexpr, WHOLE: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """The maximum of each 2x2 window of a tile; pixels outside the image never win.

    With `CODES`, the two lowest bits of a value hold its place in the window.
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
def biased(out, bias, channel, HAS_BIAS: gl.constexpr, CODES: gl.constexpr):
    """Add the bias to [pixels, filters]; with `CODES` also return each pool's winner, from the two lowest bits."""
    FILTERS: gl.constexpr = out.shape[1]
    out, code = without_codes(out, CODES)
    if HAS_BIAS:
        lanes = gl.arange(0, FILTERS, layout=gl.SliceLayout(0, out.type.layout))
        out = out + gl.load(bias + channel + lanes).to(gl.float32)[None, :]
    return out, code


@gluon.jit
def finished(
    out, bias, channel,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, CODES: gl.constexpr,
):  # fmt: skip
    """Add the bias and activate; with `CODES` also return each pool's winner, 4 if the ReLU cut it."""
    out, code = biased(out, bias, channel, HAS_BIAS, CODES)
    out = activated(out, ACTIVATION, SLOPE)
    if ACTIVATION == "relu":
        code = gl.where(out > 0, code, 4)
    return out, code


@gluon.jit
def copy_out(targets, staged, turned, place):
    """Copy a box from shared to device memory, once all threads have written it."""
    fence_async_shared()
    gl.thread_barrier()
    if turned > 0:
        tma.async_copy_shared_to_global(targets[1], place, staged)
    else:
        tma.async_copy_shared_to_global(targets[0], place, staged)


@gluon.jit
def send(targets, staged, values, turned, place):
    """Store a box through shared memory, once the box before it has left."""
    tma.store_wait(0)
    gl.thread_barrier()
    staged.store(values.reshape(staged.shape))
    copy_out(targets, staged, turned, place)


@gluon.jit
def fetch_residual(sources, staged, ready, turned, place):
    """Start to fetch a box of the residual to the memory of the results, once the box before it has left."""
    size: gl.constexpr = sources[0].dtype.primitive_bitwidth // 8
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.expect(ready, staged.shape[0] * staged.shape[1] * staged.shape[2] * staged.shape[3] * size)
    if turned > 0:
        tma.async_copy_global_to_shared(sources[1], place, ready, staged)
    else:
        tma.async_copy_global_to_shared(sources[0], place, ready, staged)


@gluon.jit
def send_added(
    targets, staged, ready, phase, values, turned, place,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, ADD_LAST: gl.constexpr,
):  # fmt: skip
    """Add the fetched residual before or after the activation; store the box through the same shared memory."""
    mbarrier.wait(ready, phase)
    box = values.reshape(staged.shape)
    if ADD_LAST:
        box = activated(box, ACTIVATION, SLOPE)
    box += staged.load(box.type.layout).to(gl.float32)
    if not ADD_LAST:
        box = activated(box, ACTIVATION, SLOPE)
    gl.thread_barrier()  # every thread has read its part
    staged.store(box.to(targets[0].dtype))
    copy_out(targets, staged, turned, place)


@gluon.jit
def store_parts(
    parts, plane, staged, out, turned, run, image, cross, batch, out_height, out_width,
    RUN: gl.constexpr, IMAGES: gl.constexpr, CROSS: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Count, mean and squared distances of a tile's pixels inside the image, per filter (see `forward`).

    Each of `WARPS` warps along the pixels sums its own pixels; the sums are combined in the results' shared
    memory. Squares are of the values themselves: in tiles this small, rounding to 16 bits loses more than
    cancellation does. Returns the values with zeros outside the image, where nothing is stored.
    """
    PIXELS: gl.constexpr = RUN * IMAGES * CROSS
    FILTERS: gl.constexpr = out.shape[1]
    pixel = gl.arange(0, PIXELS, layout=gl.SliceLayout(1, out.type.layout))
    runs = gl.where(turned > 0, out_width, out_height) - run
    crosses = gl.where(turned > 0, out_height, out_width) - cross
    inside = (pixel // (IMAGES * CROSS) < runs) & (pixel % CROSS < crosses)
    inside = inside & (image + pixel // CROSS % IMAGES < batch)
    values = gl.where(inside[:, None], out, 0.0)
    # Warps take sixteen pixels each in turn: sums over all axes but that of the warps exchange no data.
    own = values.reshape([PIXELS // (16 * WARPS), WARPS, 16, FILTERS])
    sums, squares = gl.sum(gl.sum(own, 2), 0), gl.sum(gl.sum(own * own, 2), 0)
    met = staged._reinterpret(gl.float32, [2, WARPS, FILTERS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    tma.store_wait(0)  # the results before have left
    gl.thread_barrier()
    met.index(0).store(sums)
    met.index(1).store(squares)
    gl.thread_barrier()
    total, squared = gl.sum(met.index(0).load(SUMS), 0), gl.sum(met.index(1).load(SUMS), 0)
    gl.thread_barrier()
    pixels = gl.minimum(runs, RUN) * gl.minimum(crosses, CROSS) * gl.maximum(gl.minimum(batch - image, IMAGES), 0)
    mean = total / gl.maximum(pixels * 1.0, 1.0)
    lanes = gl.arange(0, FILTERS, layout=gl.SliceLayout(0, SUMS))
    gl.store(parts + lanes, total * 0.0 + pixels)
    gl.store(parts + plane + lanes, mean)
    gl.store(parts + 2 * plane + lanes, gl.maximum(squared - total * mean, 0.0))
    return values


@gluon.jit
def halves_of(out):
    """Split [pixels, filters] into the first and the second half of the filters."""
    return out.reshape([out.shape[0], 2, out.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def write(
    ys, cs, staged, staged_codes, out, bias, channel, turned, run, image, cross,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    CODES: gl.constexpr,
):  # fmt: skip
    """Add the bias, activate, round, and store through shared memory, in parts so that these need little of it."""
    FILTERS: gl.constexpr = out.shape[1]
    out, code = finished(out, bias, channel, ACTIVATION, SLOPE, HAS_BIAS, CODES)
    if CODES:
        send(cs, staged_codes, code.to(gl.uint8), turned, [run, image, cross, channel])
    out = out.to(ys[0].dtype)
    if PARTS == 2:
        low, high = halves_of(out)
        send(ys, staged, low, turned, [run, image, cross, channel])
        send(ys, staged, high, turned, [run, image, cross, channel + FILTERS // 2])
    else:
        send(ys, staged, out, turned, [run, image, cross, channel])


@gluon.jit
def write_added(
    ys, rs, staged, ready, tiles_done, out, bias, channel, turned, run, image, cross,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr,
    ADD_LAST: gl.constexpr,
):  # fmt: skip
    """As `write`, with a residual, whose first part was fetched while the products ran."""
    FILTERS: gl.constexpr = out.shape[1]
    out, _ = biased(out, bias, channel, HAS_BIAS, False)
    place = [run, image, cross, channel]
    if PARTS == 2:
        second = [run, image, cross, channel + FILTERS // 2]
        low, high = halves_of(out)
        send_added(ys, staged, ready, 0, low, turned, place, ACTIVATION, SLOPE, ADD_LAST)
        fetch_residual(rs, staged, ready, turned, second)
        send_added(ys, staged, ready, 1, high, turned, second, ACTIVATION, SLOPE, ADD_LAST)
    else:
        send_added(ys, staged, ready, tiles_done & 1, out, turned, place, ACTIVATION, SLOPE, ADD_LAST)


@gluon.jit
def composite_hopper(
    x_rows, x_rows_rest, x_columns, x_columns_rest,  # descriptors of [N, H, W, C], the run's axis first
    w,  # descriptor of [taps * filters of all groups, C]
    y_rows, y_columns,  # descriptors of the result [N, H', W', filters], the run's axis first
    r_rows, r_columns,  # descriptors of the residual, like the result
    code_rows, code_columns,  # descriptors of the winners of a pool, uint8, like the result
    bias,  # [filters]
    parts,  # [3, boxes, filters], float32: statistics of the results, see `forward`
    total, batch, filters, rows_x, rows_y, turned_x, turned_y, out_height, out_width,
    GROUPS: gl.constexpr, TILES: gl.constexpr, TAPS: gl.constexpr, RUN: gl.constexpr, IMAGES: gl.constexpr,
    CROSS: gl.constexpr, STEPS: gl.constexpr, STRIDE: gl.constexpr, CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr, SLOPE: gl.constexpr, POOL: gl.constexpr, WHOLE: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ADD_LAST: gl.constexpr, BOXES: gl.constexpr,
    SLABS: gl.constexpr, PARTS: gl.constexpr, CODES: gl.constexpr, STATISTICS: gl.constexpr, ACC: gl.constexpr,
    STAY: gl.constexpr, WARPS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Persistent over tiles, with `BOXES` runs of pixels and `SLABS` taps of weights in flight or in use.

    A slab is refilled once the product before the current one is done. Its box is then free as well, because
    SLABS <= TAPS * (BOXES - 1) + 1. With `STAY`, a program keeps the weights of its tile of filters in shared
    memory. It meets no other tile of filters, because the number of programs is a multiple of `TILES`.
    """
    FILTERS: gl.constexpr = w.block_shape[0]
    DEPTH: gl.constexpr = w.block_shape[1]
    SPAN: gl.constexpr = RUN + TAPS - 1
    PIXELS: gl.constexpr = RUN * IMAGES * CROSS
    SHRINK: gl.constexpr = 2 if POOL else 1
    xs = (x_rows, x_rows_rest, x_columns, x_columns_rest)
    ys, rs, cs = (y_rows, y_columns), (r_rows, r_columns), (code_rows, code_columns)
    counts = (rows_x, rows_y, turned_x, turned_y)
    # Shared memory: a ring of boxes of pixels, a ring of slabs of weights, the result on its way out, and a
    # barrier for each fetch.
    pixels = gl.allocate_shared_memory(w.dtype, [BOXES * SPAN, IMAGES * CROSS, DEPTH], w.layout)
    slabs = gl.allocate_shared_memory(w.dtype, [SLABS, FILTERS, DEPTH], w.layout)
    staged = gl.allocate_shared_memory(w.dtype, y_rows.block_shape, y_rows.layout)
    staged_codes = staged
    if CODES:
        staged_codes = gl.allocate_shared_memory(gl.uint8, code_rows.block_shape, code_rows.layout)
    box_ready = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    slab_ready = gl.allocate_shared_memory(gl.int64, [SLABS, 1], mbarrier.MBarrierLayout())
    residual_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BOXES):
        mbarrier.init(box_ready.index(i), count=1)
    for i in gl.static_range(SLABS):
        mbarrier.init(slab_ready.index(i), count=1)
    mbarrier.init(residual_ready.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    # Fill the rings.
    geometry, corner = place_of(gl.program_id(0), counts, GROUPS, TILES, FILTERS, RUN, IMAGES, CROSS)
    state = (gl.program_id(0), 0, 0, 0, geometry, corner)
    if STAY:
        fetch_weights(w, slabs, slab_ready, geometry, TAPS, STEPS)
    for i in gl.static_range(BOXES - 1 if STAY else SLABS - 1):
        state = fetch(
            xs, w, pixels, slabs, box_ready, slab_ready, state, total, counts,
            0 if STAY else i % TAPS, TAPS, GROUPS, TILES, RUN, IMAGES, CROSS, STEPS, STRIDE, CHANNELS, STAY,
        )  # fmt: skip
    boxes_used, products, tiles_done = 0, 0, 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        geometry, corner = place_of(index, counts, GROUPS, TILES, FILTERS, RUN, IMAGES, CROSS)
        runs = geometry[1]
        channel, turned, run, image, cross = corner
        if HAS_RESIDUAL:  # in flight while the products run
            fetch_residual(rs, staged, residual_ready.index(0), turned, [run, image, cross, channel])
        # One product per tap and block of channels; a box serves all taps of a run, each from another row.
        acc = gl.zeros([PIXELS, FILTERS], gl.float32, layout=ACC)
        for turn in range(runs * STEPS):
            box = boxes_used % BOXES
            mbarrier.wait(box_ready.index(box), boxes_used // BOXES & 1)
            for tap in gl.static_range(TAPS):
                slab = turn * TAPS + tap if STAY else products % SLABS
                mbarrier.wait(slab_ready.index(slab), 0 if STAY else products // SLABS & 1)
                a = pixels.index(box * SPAN + tap)._reinterpret(w.dtype, [PIXELS, DEPTH], w.layout)
                acc = warpgroup_mma(a, slabs.index(slab).permute([1, 0]), acc, is_async=True)
                # All earlier products are done: the slab of the last of them may be refilled, or its box.
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if not STAY or tap == 0:
                    gl.thread_barrier()
                    state = fetch(
                        xs, w, pixels, slabs, box_ready, slab_ready, state, total, counts,
                        0 if STAY else (tap + SLABS - 1) % TAPS,
                        TAPS, GROUPS, TILES, RUN, IMAGES, CROSS, STEPS, STRIDE, CHANNELS, STAY,
                    )  # fmt: skip
                products += 1
            boxes_used += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if POOL:
            acc = pooled(acc, turned, run, cross, out_height, out_width, RUN, IMAGES, CROSS, WHOLE, CODES)
        if STATISTICS:
            # Statistics of the rounded values, which replace the others: registers have no room for both.
            acc = biased(acc, bias, channel, HAS_BIAS, False)[0].to(w.dtype).to(gl.float32)
            acc = store_parts(
                parts + index // TILES * filters + channel, total // TILES * filters, staged, acc,
                turned, run, image, cross, batch, out_height, out_width, RUN, IMAGES, CROSS, WARPS, SUMS,
            )  # fmt: skip
        if HAS_RESIDUAL:
            write_added(
                ys, rs, staged, residual_ready.index(0), tiles_done, acc, bias, channel, turned, run, image,
                cross, ACTIVATION, SLOPE, HAS_BIAS, PARTS, ADD_LAST,
            )  # fmt: skip
        else:
            write(
                ys, cs, staged, staged_codes, acc, bias, channel, turned, run // SHRINK, image, cross // SHRINK,
                ACTIVATION, SLOPE, HAS_BIAS and not STATISTICS, PARTS, CODES,
            )  # fmt: skip
        tiles_done += 1  # noqa: SIM113
    tma.store_wait(0)


def launch_hopper(problem: Problem, given: ConvTensors, tile: plan.HopperTile) -> Tensor:
    """Run the kernel on `pack.pack_rows` weights; the result is channels-last."""
    x, packed, bias, codes, residual, parts, _ = given
    maps, added = result_and_residual(problem, given)
    result = maps.permute(0, 2, 3, 1)
    pixels = pixels_last(x) if plan.is_strided(problem) else pixels_view(x)
    winners = result if codes is None else codes
    box = plan.run_box(problem, tile)
    run, images, cross = box
    shrink = 1 if problem.pool is None else 2
    out = (run // shrink, images, cross // shrink, tile.filters // tile.parts)
    rows, turned = plan.box_counts(problem, box)
    tiles = filter_tiles(problem, tile.filters)
    total = tiles * plan.box_total(problem, box)
    grid = min(total, gpu.multiprocessors(x.device) * tile.residents)
    if tile.weights_stay:
        grid = max(1, grid // tiles) * tiles
    # [warps, filters] with all warps' values of a filter in one thread.
    sums = gl.BlockedLayout([tile.warp_grid[0], 1], [1, 32], [1, tile.warps], [1, 0])
    start(composite_hopper, (grid,))(
        *described_input(problem, pixels, box, tile.depth),
        described(packed, packed.shape, packed.stride(), (tile.filters, tile.depth)),
        *described_both(result, out), *described_both(added, out), *described_both(winners, out),
        bias if bias is not None else packed, parts if parts is not None else result,
        total, problem.batch, problem.filters, *rows, *turned, problem.out_height, problem.out_width,
        GROUPS=plan.run_rows(problem, tile.filters), TILES=tiles, TAPS=plan.run_length(problem), RUN=run,
        IMAGES=images, CROSS=cross, STEPS=ceil_div(problem.channels, tile.depth), STRIDE=problem.stride,
        CHANNELS=problem.channels, POOL=problem.pool is not None,
        WHOLE=problem.pool != "ceil" or problem.even, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, ADD_LAST=problem.add_last, BOXES=tile.boxes,
        SLABS=plan.slab_count(problem, tile), PARTS=tile.parts,
        CODES=codes is not None, STATISTICS=parts is not None, STAY=tile.weights_stay, WARPS=tile.warp_grid[0],
        ACC=accumulator(tile.filters // tile.warp_grid[1], tile.warp_grid), SUMS=sums,
        **activation_options(problem), num_warps=tile.warps,
    )  # fmt: skip
    return maps


def described_input(problem: Problem, pixels: Tensor, box: Box, depth: int) -> list[TensorDescriptor]:
    """Descriptors of the input for runs along rows and along columns: the box, and the rows beyond it."""
    run, images, cross = box
    if plan.is_strided(problem):
        (down, across), (batch, height, width, channels) = problem.stride, pixels.shape
        row, image = width * channels, height * width * channels
        shape = (height // down, batch, down, width // across, across * channels)
        strides = (down * row, image, row, across * channels, 1)
        return [described(pixels, shape, strides, (run, images, 1, cross, depth))] * 4
    block, beyond = (run, images, cross, depth), (max(plan.run_length(problem) - 1, 1), images, cross, depth)
    (rows, columns), (rest, columns_rest) = described_both(pixels, block), described_both(pixels, beyond)
    return [rows, rest, columns, columns_rest]


def accumulator(filters: int, warps: tuple[int, int] = (4, 1)) -> gl.NVMMADistributedLayout:
    """The layout of an accumulator with this many filters per warp, by warps along pixels and filters."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=list(warps), instr_shape=[16, filters, 16])


def described_both(pixels: Tensor, block: tuple[int, ...]) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of [N, H, W, C], which may be a view, with the run's axis first: the rows, and the columns."""
    (batch, height, width, channels), (image, row, column, _) = pixels.shape, pixels.stride()
    return (
        described(pixels, (height, batch, width, channels), (row, image, column, 1), block),
        described(pixels, (width, batch, height, channels), (column, image, row, 1), block),
    )


def described(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    return TensorDescriptor(base, list(shape), list(strides), list(block), shared_layout(block, base))


def shared_layout(block: Sequence[int], like: Tensor) -> Any:
    """The layout of a block in shared memory, for values of a tensor's type."""
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(like.dtype).removeprefix("torch.")))
