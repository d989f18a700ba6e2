"""The weight gradient for Hopper: one fetch of pixels serves all taps of a run.

The gradient of a tap is a matrix product over pixels: the pixels that the tap reads, transposed, times the
gradient of the output. A program computes one tile of one group: [DEPTH channels, FILTERS filters] for each of up
to five taps of a run, all held in registers. It walks over a share of the boxes. Per step it fetches two things to
shared memory, STAGES steps ahead: the gradient of a box, and the input's box with the rows beyond it. The taps of
a run read the same pixels shifted by whole rows of the box (see `hopper`), so each tap is a product from another
offset. In the end the shares are added up in device memory, in float32, by atomics.
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

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.conv import hopper_plan as plan
from lowrank_cnn.kernels.conv.hopper import accumulator, described_both, described_input, shared_layout
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import Problem, shares


@gluon.jit
def part_of(tile, GROUPS: gl.constexpr, DEPTHS: gl.constexpr, FILTERS: gl.constexpr, DEPTH: gl.constexpr):
    """A tile's group, as in `hopper_plan.weight_run_rows`, and its first channel, run and filter in it."""
    first, start, channel, filters, columns, along, across, before, beside, turned = 0, 0, 0, 0, 1, 0, 0, 0, 0, 0
    for g in gl.static_range(len(GROUPS)):
        if tile >= GROUPS[g][0]:
            first, start, channel, filters, columns, along, across, before, beside, turned = GROUPS[g]
    tile = tile - first
    depth = tile % DEPTHS * DEPTH
    column = tile // DEPTHS % columns
    filter = tile // (DEPTHS * columns) * FILTERS
    return start, channel, filters, along, across, before, beside, turned, depth, column, filter


@gluon.jit
def fetch_step(
    xs, gs,  # descriptors of input and gradient: boxes and rests of either direction
    pixels,  # shared memory [STAGES * SPAN, IMAGES * CROSS, DEPTH]
    grads,  # shared memory [STAGES, pixels of a box, FILTERS]
    ready,  # shared memory [STAGES, 1]: a barrier per stage
    step, steps, place, origin, turned,
    SPAN: gl.constexpr, RUN: gl.constexpr, TAPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the fetches of a step, if there is one: the gradient of a box, and its pixels with the rows beyond."""
    run, image, cross = place
    before, beside, depth, channel = origin
    live = step < steps
    stage = step % STAGES
    bar = ready.index(stage)
    size: gl.constexpr = xs[0].dtype.primitive_bitwidth // 8
    per_row: gl.constexpr = xs[0].block_shape[1] * xs[0].block_shape[2]
    taken: gl.constexpr = SPAN * per_row * xs[0].block_shape[3] + RUN * per_row * gs[0].block_shape[3]
    mbarrier.expect(bar, taken * size, pred=live)
    body = pixels.index(stage * SPAN)._reinterpret(xs[0].dtype, xs[0].block_shape, xs[0].layout)
    grad = grads.index(stage)._reinterpret(gs[0].dtype, gs[0].block_shape, gs[0].layout)
    start, side = run - before, cross - beside
    if turned > 0:
        tma.async_copy_global_to_shared(gs[1], [run, image, cross, channel], bar, grad, pred=live)
        tma.async_copy_global_to_shared(xs[2], [start, image, side, depth], bar, body, pred=live)
        if TAPS > 1:
            rest = pixels.index(stage * SPAN + RUN)._reinterpret(xs[3].dtype, xs[3].block_shape, xs[3].layout)
            tma.async_copy_global_to_shared(xs[3], [start + RUN, image, side, depth], bar, rest, pred=live)
    else:
        tma.async_copy_global_to_shared(gs[0], [run, image, cross, channel], bar, grad, pred=live)
        tma.async_copy_global_to_shared(xs[0], [start, image, side, depth], bar, body, pred=live)
        if TAPS > 1:
            rest = pixels.index(stage * SPAN + RUN)._reinterpret(xs[1].dtype, xs[1].block_shape, xs[1].layout)
            tma.async_copy_global_to_shared(xs[1], [start + RUN, image, side, depth], bar, rest, pred=live)


@gluon.jit
def next_box(place, limits, RUN: gl.constexpr, IMAGES: gl.constexpr, CROSS: gl.constexpr):
    """The next box: across, then along the run, then the next images."""
    run, image, cross = place
    cross += CROSS
    over = cross >= limits[1]
    cross = gl.where(over, 0, cross)
    run = gl.where(over, run + RUN, run)
    done = run >= limits[0]
    return gl.where(done, 0, run), gl.where(done, image + IMAGES, image), cross


@gluon.jit
def times_all(pixels, grad, row, sums, PIXELS: gl.constexpr, DEPTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Add the product of each tap of a run: the pixels that it reads, transposed, times the gradient."""
    added = ()
    for tap in gl.static_range(len(sums)):
        a = pixels.index(row + tap)._reinterpret(pixels.dtype, [PIXELS, DEPTH], LAYOUT)
        added = added + (warpgroup_mma(a.permute([1, 0]), grad, sums[tap], is_async=True),)
    return added


@gluon.jit
def all_but(LEFT: gl.constexpr, sums):
    """Wait until at most `LEFT` products are in flight."""
    waited = warpgroup_mma_wait(LEFT, deps=sums)
    return (waited,) if len(sums) == 1 else waited


@gluon.jit
def add_share(
    dw,  # [channels, width] float32, added to
    acc, channels, filters, width,
):  # fmt: skip
    """Add a tap's [channels, filters] to the sum of the other shares."""
    c = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    f = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    inside = (c < channels)[:, None] & (f < filters)[None, :]
    gl.atomic_add(dw + c[:, None] * width + f[None, :], acc, mask=inside, sem="relaxed")


@gluon.jit
def weights_hopper(
    x_rows, x_rows_rest, x_columns, x_columns_rest,  # descriptors of [N, H, W, C], the run's axis first
    g_rows, g_columns,  # descriptors of [N, H', W', filters], the run's axis first
    dw,  # [height, width, C, filters] of each group in turn, float32, added to
    steps, boxes, channels, rows_x, rows_y, turned_x, turned_y,
    GROUPS: gl.constexpr, TILES: gl.constexpr, DEPTHS: gl.constexpr, TAPS: gl.constexpr, RUN: gl.constexpr,
    IMAGES: gl.constexpr, CROSS: gl.constexpr, DEPTH: gl.constexpr, FILTERS: gl.constexpr, STAGES: gl.constexpr,
    PIXEL_LAYOUT: gl.constexpr, GRAD_LAYOUT: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """One tile of one group over one share of the boxes: `steps` of all `boxes`."""
    SPAN: gl.constexpr = RUN + TAPS - 1
    PIXELS: gl.constexpr = RUN * IMAGES * CROSS
    xs, gs = (x_rows, x_rows_rest, x_columns, x_columns_rest), (g_rows, g_columns)
    # Shared memory for STAGES steps, and a barrier for each: it opens when all fetches of its step have arrived.
    pixels = gl.allocate_shared_memory(g_rows.dtype, [STAGES * SPAN, IMAGES * CROSS, DEPTH], PIXEL_LAYOUT)
    grads = gl.allocate_shared_memory(g_rows.dtype, [STAGES, PIXELS, FILTERS], GRAD_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    start, channel, filters, along, across, before, beside, turned, depth, column, filter = part_of(
        gl.program_id(0) % TILES, GROUPS, DEPTHS, FILTERS, DEPTH
    )
    # The first box of this share, as a place (along the run, image, across), for runs of the group's direction.
    first = gl.program_id(0) // TILES * steps
    across_boxes = gl.where(turned > 0, turned_y, rows_x)
    along_boxes = gl.where(turned > 0, turned_x, rows_y)
    image = first // (across_boxes * along_boxes) * IMAGES
    place = (first // across_boxes % along_boxes * RUN, image, first % across_boxes * CROSS)
    limits = (along_boxes * RUN, across_boxes * CROSS)
    origin = (before, beside - column, depth, channel + filter)
    target = dw + start + (column * across * channels + depth) * filters + filter
    tap = along * channels * filters
    inside = (channels - depth, filters - filter, filters)
    # The last share may have fewer boxes, or none.
    steps = gl.maximum(gl.minimum(steps, boxes - first), 0)
    for i in gl.static_range(STAGES - 1):
        fetch_step(xs, gs, pixels, grads, ready, i, steps, place, origin, turned, SPAN, RUN, TAPS, STAGES)
        place = next_box(place, limits, RUN, IMAGES, CROSS)
    sums = ()
    for _ in gl.static_range(TAPS):
        sums = sums + (gl.zeros([DEPTH, FILTERS], gl.float32, layout=ACC),)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        grad, row = grads.index(stage), stage * SPAN
        sums = times_all(pixels, grad, row, sums, PIXELS, DEPTH, PIXEL_LAYOUT)
        # The products of the previous step are done: their shared memory may be refilled.
        sums = all_but(TAPS, sums)
        gl.thread_barrier()
        ahead = step + STAGES - 1
        fetch_step(xs, gs, pixels, grads, ready, ahead, steps, place, origin, turned, SPAN, RUN, TAPS, STAGES)
        place = next_box(place, limits, RUN, IMAGES, CROSS)
    sums = all_but(0, sums)
    for i in gl.static_range(TAPS):
        add_share(target + i * tap, sums[i], *inside)


def launch_weights_hopper(
    problem: Problem, g: Tensor, pixels: Tensor, programs: int, tile: Tile | None = None
) -> list[Tensor]:
    """Gradients of the groups' weights, in float32, as `backward.launch_weight_gradient` gives them."""
    tile = tile or plan.weight_tile(problem)
    box = plan.weight_box(problem, tile)
    run, images, cross = box
    rows, turned = plan.box_counts(problem, box)
    boxes = plan.box_total(problem, box)
    groups, tiles = plan.weight_run_rows(problem, tile)
    splits = shares(tiles, boxes, programs)
    dw = torch.zeros(problem.channels * sum(problem.rows), device=g.device)
    start(weights_hopper, (tiles * splits,))(
        *described_input(problem, pixels, box, tile.depth), *described_both(g, (*box, tile.filters)),
        dw, ceil_div(boxes, splits), boxes, problem.channels, *rows, *turned,
        GROUPS=groups, TILES=tiles, DEPTHS=ceil_div(problem.channels, tile.depth),
        TAPS=plan.run_length(problem), RUN=run, IMAGES=images, CROSS=cross,
        DEPTH=tile.depth, FILTERS=tile.filters, STAGES=tile.stages,
        PIXEL_LAYOUT=shared_layout((tile.pixels, tile.depth), g),
        GRAD_LAYOUT=shared_layout((tile.pixels, tile.filters), g),
        ACC=accumulator(tile.filters, (tile.warps, 1)), num_warps=tile.warps,
    )  # fmt: skip
    parts = dw.split([problem.channels * rows for rows in problem.rows])
    return [
        part.view(height, width, channels, filters).permute(3, 2, 0, 1)
        for part, (filters, channels, height, width) in zip(parts, problem.shapes, strict=True)
    ]
