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
from lowrank_cnn.kernels.conv.hopper_epilogue import (
    biased,
    fetch_residual,
    pooled,
    store_parts,
    write,
    write_added,
)
from lowrank_cnn.kernels.conv.hopper_plan import (
    HopperTile,
    RunRow,
    box_counts,
    box_total,
    default_tile,
    is_strided,
    run_box,
    run_length,
    run_rows,
    slab_count,
)
from lowrank_cnn.kernels.conv.tiled import activation_options
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import ConvTensors, Problem, empty_result, filter_tiles, pixels_last

# The places of the Hopper kernel's tiles, and the fetches of their pixels and weights.

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false


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


# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false


@gluon.jit
def composite_hopper(
    x_rows, x_rows_rest, x_columns, x_columns_rest,  # descriptors of [N, H, W, C], the run's axis first
    w,  # descriptor of [taps * filters of all groups, C]
    y_rows, y_columns,  # descriptors of the result [N, H', W', filters], the run's axis first
    r_rows, r_columns,  # descriptors of the residual, like the result
    code_rows, code_columns,  # descriptors of the winners of a pool, uint8, like the result
    bias,  # [filters]
    parts,  # [3, boxes, filters], float32: statistics of the results, see `result_statistics`
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
            # Of the rounded values, which replace the others: registers have no room for both.
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


def launch_hopper(problem: Problem, given: ConvTensors, tile: HopperTile | None = None) -> Tensor:
    """Run the kernel on `pack.pack_rows` weights; the result is channels-last."""
    x, packed, bias, codes, residual, parts = given
    tile = tile or default_tile(problem)
    pixels, maps = pixels_last(x), empty_result(problem, x)
    result = maps.permute(0, 2, 3, 1)
    added = result if residual is None else pixels_last(residual)
    winners = result if codes is None else codes
    box = run_box(problem, tile)
    run, images, cross = box
    shrink = 1 if problem.pool is None else 2
    out = (run // shrink, images, cross // shrink, tile.filters // tile.parts)
    rows, turned = box_counts(problem, box)
    tiles = filter_tiles(problem, tile.filters)
    total = tiles * box_total(problem, box)
    grid = min(total, gpu.multiprocessors(x.device) * tile.residents)
    if tile.weights_stay:
        grid = max(1, grid // tiles) * tiles
    start(composite_hopper, (grid,))(
        *_described_input(problem, pixels, box, tile.depth),
        described(packed, packed.shape, packed.stride(), (tile.filters, tile.depth)),
        described_pixels(result, out), described_pixels(result, out, turned=True),
        described_pixels(added, out), described_pixels(added, out, turned=True),
        described_pixels(winners, out), described_pixels(winners, out, turned=True),
        bias if bias is not None else packed, parts if parts is not None else result,
        total, problem.batch, problem.filters, *rows, *turned, problem.out_height, problem.out_width,
        GROUPS=tuple(map(tuple, run_rows(problem, tile.filters))), TILES=tiles, TAPS=run_length(problem), RUN=run,
        IMAGES=images, CROSS=cross, STEPS=ceil_div(problem.channels, tile.depth), STRIDE=problem.stride,
        CHANNELS=problem.channels, POOL=problem.pool is not None,
        WHOLE=problem.pool != "ceil" or problem.even, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, ADD_LAST=problem.add_last, BOXES=tile.boxes,
        SLABS=slab_count(problem, tile), PARTS=tile.parts,
        CODES=codes is not None, STATISTICS=parts is not None, ACC=_accumulator(tile),
        STAY=tile.weights_stay, WARPS=tile.warp_grid[0], SUMS=_by_filter(tile),
        **activation_options(problem), num_warps=tile.warps,
    )  # fmt: skip
    return maps


def _described_input(
    problem: Problem, pixels: Tensor, box: tuple[int, int, int], depth: int
) -> list[TensorDescriptor]:
    """Descriptors of the input for runs along rows and along columns: the box, and the rows beyond it."""
    run, images, cross = box
    if is_strided(problem):
        (down, across), (batch, height, width, channels) = problem.stride, pixels.shape
        row, image = width * channels, height * width * channels
        shape = (height // down, batch, down, width // across, across * channels)
        strides = (down * row, image, row, across * channels, 1)
        return [described(pixels, shape, strides, (run, images, 1, cross, depth))] * 4
    block, beyond = (run, images, cross, depth), (max(run_length(problem) - 1, 1), images, cross, depth)
    return [described_pixels(pixels, part, turned=turned) for turned in (False, True) for part in (block, beyond)]


def _accumulator(tile: HopperTile) -> gl.NVMMADistributedLayout:
    filters = tile.filters // tile.warp_grid[1]
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=list(tile.warp_grid), instr_shape=[16, filters, 16]
    )


def _by_filter(tile: HopperTile) -> gl.BlockedLayout:
    """A layout of [warps, filters] with all warps' values of a filter in one thread."""
    return gl.BlockedLayout([tile.warp_grid[0], 1], [1, 32], [1, tile.warps], [1, 0])


def described_pixels(pixels: Tensor, block: tuple[int, ...], *, turned: bool = False) -> TensorDescriptor:
    """A descriptor of [N, H, W, C], which may be a view, with the run's axis first.

    The axes are rows, images, columns; if `turned` columns, images, rows.
    """
    (batch, height, width, channels), (image, row, column, _) = pixels.shape, pixels.stride()
    if turned:
        return described(pixels, (width, batch, height, channels), (column, image, row, 1), block)
    return described(pixels, (height, batch, width, channels), (row, image, column, 1), block)


def described(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    kind = getattr(gl, str(base.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return TensorDescriptor(base, list(shape), list(strides), list(block), layout)
