"""The places of the Hopper kernel's tiles, and the fetches of their pixels and weights."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lowrank_cnn.kernels.conv.hopper_plan import RunRow

(
    FIRST_TILE, WEIGHT_ROW, CHANNEL, FILTER_COUNT, RUNS, ALONG, ACROSS, BEFORE, BESIDE, TURNED, WIDTH, TOP_SKIP,
    LEFT_SKIP,
) = (gl.constexpr(index) for index in range(len(RunRow._fields)))  # fmt: skip


@gluon.jit
def place_of(
    index, counts,
    GROUPS: gl.constexpr, TILES: gl.constexpr, FILTERS: gl.constexpr, RUN: gl.constexpr, IMAGES: gl.constexpr,
    CROSS: gl.constexpr,
):  # fmt: skip
    """The place of a tile: its geometry and its corner.

    `counts` are the boxes along x and y for runs along the rows, then for runs along the columns. The geometry is
    (weight row, runs, along, across, before, beside, width, top skip, left skip) as in `hopper_plan.RunRow`, the
    corner (channel, turned, run, image, cross). The last tile of a group begins early enough to be whole: filters
    that it shares with the tile before are computed twice, with the same result.
    """
    tile, box = index % TILES, index // TILES
    first, weight, channel, filters, runs, along, across = 0, 0, 0, 0, 1, 0, 0
    before, beside, turned, width, top_skip, left_skip = 0, 0, 0, 1, 0, 0
    for g in gl.static_range(len(GROUPS)):
        if tile >= GROUPS[g][FIRST_TILE]:
            first, weight = GROUPS[g][FIRST_TILE], GROUPS[g][WEIGHT_ROW]
            channel, filters = GROUPS[g][CHANNEL], GROUPS[g][FILTER_COUNT]
            runs, along, across = GROUPS[g][RUNS], GROUPS[g][ALONG], GROUPS[g][ACROSS]
            before, beside, turned = GROUPS[g][BEFORE], GROUPS[g][BESIDE], GROUPS[g][TURNED]
            width, top_skip, left_skip = GROUPS[g][WIDTH], GROUPS[g][TOP_SKIP], GROUPS[g][LEFT_SKIP]
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
