"""Gradients of the composite convolution in plain Triton: three kernels, run one after the other.

1. `undo_pool` or `undo_relu` takes the gradient back through pool and ReLU, and sums the bias gradient on the way.
2. `input_gradient_kernel` is an implicit matrix product like `tiled`: a program computes one box of input pixels
   for one tile of input channels, and all groups and taps add into one accumulator.
3. `weight_gradient_kernel` is a product over pixels: a program computes filters x channels of one tap over a share
   of the boxes, and the shares are added in float32 by atomics.

Maps are [N, H, W, C] in memory. Boxes are fetched by the tensor memory accelerator, which fills zeros outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowrank_cnn.core.numbers import ceil_div, round_up
from lowrank_cnn.kernels.conv.pack import pack_turned, unpack_rows
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.device import start
from lowrank_cnn.kernels.problem import (
    Problem,
    TapGroup,
    box_count,
    box_of,
    empty_maps,
    power_above,
    shares,
    starts,
)

# How the gradients are divided for the kernels of `backward`: tiles, and the fields of each group.

INPUT_TILES = (
    Tile(),
    Tile(256, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 64, 32, 4, 4),
)
"""Pixels, channels, filters per step, warps and stages worth measuring for the input gradient."""
WEIGHT_TILES = (Tile(64, 128, 128, 4, 3), Tile(64, 128, 64, 4, 4))
"""Pixels per step, filters, channels, warps and stages for the weight gradient."""
NARROW = {128: 1.0, 64: 0.8, 32: 0.65}
"""The rough share of the tensor cores' peak that a tile of this width reaches."""


def turned(problem: Problem) -> Problem | None:
    """The convolution of the output's gradient that gives the input's; None unless one group of stride 1.

    Its weights are the layer's with the taps reversed and channels and filters exchanged.
    """
    group, *others = problem.groups
    if others or problem.stride != (1, 1):
        return None
    place = (group.height - 1 - group.top, group.width - 1 - group.left)
    reversed_taps = TapGroup(group.height, group.width, problem.channels, *place)
    before = {"channels": problem.filters, "height": problem.out_height, "width": problem.out_width}
    after = {"out_height": problem.height, "out_width": problem.width}
    return replace(problem, **before, **after, groups=(reversed_taps,), activation=None, pool=None, residual=False)


def input_tile(problem: Problem) -> Tile:
    """The default for the input gradient: the widest tile, unless a narrower one wastes less."""

    def cost(tile: Tile) -> float:
        depth = sum(group.taps * round_up(group.filters, tile.depth) for group in problem.groups)
        return round_up(problem.channels, tile.filters) * depth / (NARROW[tile.filters] * NARROW[2 * tile.depth])

    return min(INPUT_TILES, key=cost)


def weight_tile(problem: Problem) -> Tile:
    """The default for the weight gradient, chosen in the same way."""

    def cost(tile: Tile) -> float:
        filters = sum(group.taps * round_up(group.filters, tile.filters) for group in problem.groups)
        return round_up(problem.channels, tile.depth) * filters / (NARROW[tile.filters] * NARROW[tile.depth])

    return min(WEIGHT_TILES, key=cost)


def leads(problem: Problem) -> list[int]:
    """Per group, how many filters of the group before it a fetch includes, since fetches begin every 16 bytes."""
    return [begin % (16 // problem.dtype.itemsize) for begin in problem.begins]


def input_rows(problem: Problem, depth: int, begins: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """The groups for `input_gradient_kernel`, with the fields that it names.

    A group's packed weights begin at the weight row, its gradient is fetched from the channel on, and each of its
    taps takes a number of steps. `begins` are the first channels of the groups in the gradient, if they do not
    follow each other.
    """
    weights = starts(group.taps * problem.channels for group in problem.groups)
    places = zip(problem.groups, weights, begins or problem.begins, leads(problem), strict=True)
    return tuple(
        (weight, channel - lead, ceil_div(lead + g.filters, depth), g.taps, g.width, g.top, g.left)
        for g, weight, channel, lead in places
    )


def weight_rows(problem: Problem, filters: int, depth: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The groups for `weight_gradient_kernel`, with the fields that it names, and the number of tiles.

    Fetches begin at multiples of 16 bytes, `lead` filters before the group's own.
    """
    depths, places = ceil_div(problem.channels, depth), list(zip(problem.groups, leads(problem), strict=True))
    tiles = [g.taps * ceil_div(lead + g.filters, filters) * depths for g, lead in places]
    begins = zip(places, starts(tiles), starts(problem.rows), problem.begins, strict=True)
    rows = (
        (tile, weight, channel - lead, g.filters, g.width, g.top, g.left, lead)
        for (g, lead), tile, weight, channel in begins
    )
    return tuple(rows), sum(tiles)


# pyright: reportArgumentType=false, reportGeneralTypeIssues=false


DEAD = 4
"""The code of a result that the ReLU set to zero; 0 to 3 are the position of the maximum in its 2x2 window."""


@triton.jit
def undo_pool(
    grad, codes,  # [N, result_height, result_width, TOTAL]
    out,  # [N, height, width, TOTAL], written
    bias_grad,  # [TOTAL] float32, added to
    pixels, height, width, result_height, result_width,
    TOTAL: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient before a 2x2 max-pool and ReLU: each value goes to its window's winner, if the ReLU kept it.

    A program reads blocks of pooled pixels and writes four pixels for each. Threads keep their own sums until the
    end: adding across threads in every round took longer than the memory traffic.
    """
    lane = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    summed = tl.zeros((PIXELS, FILTERS), tl.float32)
    for turn in range(ROUNDS):
        pixel = (tl.program_id(0) + turn * tl.num_programs(0)) * PIXELS + tl.arange(0, PIXELS)
        if WIDE:
            pixel = pixel.to(tl.int64)
        inside = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
        source = pixel[:, None] * TOTAL + lane[None, :]
        g = tl.load(grad + source, mask=inside, other=0.0)
        won = tl.load(codes + source, mask=inside, other=4)
        if BIAS:
            summed += tl.where(won < 4, g.to(tl.float32), 0.0)
        row = pixel // result_width % result_height * 2
        column = pixel % result_width * 2
        first = (pixel // (result_width * result_height) * height + row) * width + column
        for place in tl.static_range(4):
            there = (row + place // 2 < height) & (column + place % 2 < width)
            target = (first + (place // 2 * width + place % 2))[:, None] * TOTAL + lane[None, :]
            tl.store(out + target, tl.where(won == place, g, 0.0), mask=inside & there[:, None])
    if BIAS:
        tl.atomic_add(bias_grad + lane, tl.sum(summed, 0), mask=lane < TOTAL, sem="relaxed")


@triton.jit
def undo_relu(
    grad, results,  # [pixels, TOTAL]
    out,  # [pixels, TOTAL], written if RELU
    bias_grad,  # [TOTAL] float32, added to
    pixels,
    TOTAL: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr, ROUNDS: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient before a ReLU, and the bias gradient; without a ReLU only the latter."""
    lane = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    summed = tl.zeros((PIXELS, FILTERS), tl.float32)
    for turn in range(ROUNDS):
        pixel = (tl.program_id(0) + turn * tl.num_programs(0)) * PIXELS + tl.arange(0, PIXELS)
        if WIDE:
            pixel = pixel.to(tl.int64)
        inside = (pixel < pixels)[:, None] & (lane < TOTAL)[None, :]
        place = pixel[:, None] * TOTAL + lane[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0)
        if RELU:
            g = tl.where(tl.load(results + place, mask=inside, other=0.0) > 0, g, 0.0)
            tl.store(out + place, g, mask=inside)
        if BIAS:
            summed += g.to(tl.float32)
    if BIAS:
        tl.atomic_add(bias_grad + lane, tl.sum(summed, 0), mask=lane < TOTAL, sem="relaxed")


@triton.jit
def input_gradient_kernel(
    g,  # descriptor of the gradient [N, H', W', filters]
    w,  # descriptor of [taps * CHANNELS of all groups, filters], as `pack.pack_turned` lays it
    dx,  # descriptor of the input gradient [N, H, W, CHANNELS]
    row_boxes, column_boxes,
    GROUPS: tl.constexpr, TILES: tl.constexpr, CHANNELS: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FILTERS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One box of input pixels for one tile of input channels; see `input_rows` for `GROUPS`.

    Pixels are the second factor, as in `composite_tiled`.
    """
    first = tl.program_id(0) % TILES * FILTERS
    box = tl.program_id(0) // TILES
    column = box % column_boxes * COLUMNS
    row = box // column_boxes % row_boxes * ROWS
    image = box // (column_boxes * row_boxes) * IMAGES
    acc = tl.zeros((FILTERS, IMAGES * ROWS * COLUMNS), tl.float32)
    for i in tl.static_range(len(GROUPS)):
        weight, channel, steps, taps, width, top, left = GROUPS[i]
        for step in range(taps * steps):
            tap = step // steps
            depth = step % steps * DEPTH
            # The offset of an input pixel is minus the offset of the tap.
            down, right = top - tap // width, left - tap % width
            a = g.load([image, row + down, column + right, channel + depth])
            b = w.load([weight + tap * CHANNELS + first, depth])
            acc = tl.dot(b, a.reshape(IMAGES * ROWS * COLUMNS, DEPTH).T, acc)
    out = acc.to(dx.dtype).T.reshape(IMAGES, ROWS, COLUMNS, FILTERS)
    dx.store([image, row, column, first], out)


@triton.jit
def weight_gradient_kernel(
    g,  # descriptor of the gradient [N, H', W', filters]
    x,  # descriptor of the input [N, H, W, CHANNELS]
    dw,  # [taps * filters of all groups, CHANNELS] float32, added to
    row_boxes, column_boxes,
    GROUPS: tl.constexpr, TILES: tl.constexpr, DEPTH_TILES: tl.constexpr, SPLITS: tl.constexpr,
    ROUNDS: tl.constexpr, CHANNELS: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Filters x channels of one tap of one group over one share of the boxes; see `weight_rows`.

    There are `TILES` programs per share. A share's last box may lie beyond the batch, where fetches give zeros.
    """
    tile = tl.program_id(0) % TILES
    share = tl.program_id(0) // TILES
    first, weight, channel, filters, width, top, left, lead = 0, 0, 0, 0, 1, 0, 0, 0
    for i in tl.static_range(len(GROUPS)):
        if tile >= GROUPS[i][0]:
            first, weight, channel, filters, width, top, left, lead = GROUPS[i]
    tile = tile - first
    depth = tile % DEPTH_TILES * DEPTH
    tiles = (lead + filters + FILTERS - 1) // FILTERS
    offset = tile // DEPTH_TILES % tiles * FILTERS
    tap = tile // (DEPTH_TILES * tiles)
    down, right = tap // width - top, tap % width - left
    acc = tl.zeros((FILTERS, DEPTH), tl.float32)
    for turn in range(ROUNDS):
        box = share + turn * SPLITS
        column = box % column_boxes * COLUMNS
        row = box // column_boxes % row_boxes * ROWS
        image = box // (column_boxes * row_boxes) * IMAGES
        a = g.load([image, row, column, channel + offset]).reshape(IMAGES * ROWS * COLUMNS, FILTERS)
        b = x.load([image, row + down, column + right, depth]).reshape(IMAGES * ROWS * COLUMNS, DEPTH)
        acc = tl.dot(a.T, b, acc)
    # Fetches began `lead` filters early, in another group: these are masked.
    f, c = offset - lead + tl.arange(0, FILTERS), depth + tl.arange(0, DEPTH)
    place = (weight + tap * filters + f)[:, None] * CHANNELS + c[None, :]
    inside = ((f >= 0) & (f < filters))[:, None] & (c < CHANNELS)[None, :]
    tl.atomic_add(dw + place, acc, mask=inside, sem="relaxed")


def launch_undo(
    problem: Problem, grad: Tensor, seen: Tensor, programs: int, *, need_bias: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The gradient before pool and ReLU, [N, H, W, filters], and the bias gradient in float32 if needed.

    Without pool, ReLU and bias this is `grad` itself. `programs` is how many run at once. `seen` holds the codes
    of a fused pool, else the results.
    """
    pool = problem.pool is not None
    if not pool and not problem.relu and not need_bias:
        return grad, None
    shape = (problem.batch, problem.out_height, problem.out_width, problem.filters)
    # If windows round down, the last row or column is in no window and its gradient is zero.
    make = torch.zeros if problem.pool == "floor" and not problem.even else torch.empty
    out = make(shape, device=grad.device, dtype=grad.dtype) if pool or problem.relu else grad
    bias_grad = torch.zeros(problem.filters, device=grad.device)
    filters = min(128, power_above(problem.filters))
    # This many values let four programs share a multiprocessor's registers, each with enough loads in flight.
    values = 2048 if pool else 4096 if problem.relu else 8192
    block, tiles = values // filters, ceil_div(problem.filters, filters)
    count = problem.batch * problem.result_size[0] * problem.result_size[1]
    blocks = ceil_div(count, block)
    across = max(1, min(blocks, 2 * programs // tiles))
    options = {
        "TOTAL": problem.filters, "PIXELS": block, "FILTERS": filters, "ROUNDS": ceil_div(blocks, across),
        "BIAS": need_bias, "WIDE": out.numel() >= 1 << 31,
    }  # fmt: skip
    grid = (across, tiles)
    if pool:
        size = (problem.out_height, problem.out_width, *problem.result_size)
        start(undo_pool, grid)(grad, seen, out, bias_grad, count, *size, **options)
    else:
        start(undo_relu, grid)(grad, seen, out, bias_grad, count, RELU=problem.relu, **options)
    return out, bias_grad if need_bias else None


def launch_input_gradient(
    problem: Problem, g: Tensor, weights: Sequence[Tensor], tile: Tile | None = None
) -> Tensor:
    """The gradient of the input, [N, channels, H, W], from the gradient before pool and ReLU."""
    maps = empty_maps((problem.batch, problem.channels, problem.height, problem.width), g)
    write_input_gradient(problem, g, weights, maps.permute(0, 2, 3, 1), tile)
    return maps


def write_input_gradient(
    problem: Problem,
    g: Tensor,
    weights: Sequence[Tensor],
    dx: Tensor,
    tile: Tile | None = None,
    begins: Sequence[int] | None = None,
) -> None:
    """Write the gradient into [N, H, W, channels], which may be a view; for `begins` see `input_rows`."""
    tile = tile or input_tile(problem)
    packed = pack_turned(weights, leads(problem), g.dtype)
    images, rows, columns = box_of(problem.batch, problem.height, problem.width, tile.pixels)
    counts = [ceil_div(size, part) for size, part in zip(dx.shape[:3], (images, rows, columns), strict=True)]
    depth = min(tile.depth, power_above(packed.shape[1]))
    filters = min(tile.filters, power_above(problem.channels))
    tiles = ceil_div(problem.channels, filters)
    start(input_gradient_kernel, (tiles * counts[0] * counts[1] * counts[2],))(
        TensorDescriptor.from_tensor(g, [images, rows, columns, depth]),
        TensorDescriptor.from_tensor(packed, [filters, depth]),
        TensorDescriptor.from_tensor(dx, [images, rows, columns, filters]),
        counts[1], counts[2], GROUPS=input_rows(problem, depth, begins), TILES=tiles,
        CHANNELS=problem.channels, IMAGES=images, ROWS=rows, COLUMNS=columns, FILTERS=filters, DEPTH=depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def launch_weight_gradient(
    problem: Problem, g: Tensor, pixels: Tensor, programs: int, tile: Tile | None = None
) -> list[Tensor]:
    """Gradients of the groups' weights, in float32; `programs` is how many run at once."""
    tile = tile or weight_tile(problem)
    box = box_of(problem.batch, problem.out_height, problem.out_width, tile.pixels)
    images, rows, columns = box
    counts = box_count(problem, box)
    depth = min(tile.depth, power_above(problem.channels))
    widest = max(lead + group.filters for lead, group in zip(leads(problem), problem.groups, strict=True))
    filters = min(tile.filters, power_above(widest))
    groups, tiles = weight_rows(problem, filters, depth)
    boxes = counts[0] * counts[1] * counts[2]
    splits = shares(tiles, boxes, programs)
    dw = torch.zeros((sum(problem.rows), problem.channels), device=g.device)
    start(weight_gradient_kernel, (tiles * splits,))(
        TensorDescriptor.from_tensor(g, [images, rows, columns, filters]),
        TensorDescriptor.from_tensor(pixels, [images, rows, columns, depth]),
        dw, counts[1], counts[2], GROUPS=groups, TILES=tiles,
        DEPTH_TILES=ceil_div(problem.channels, depth), SPLITS=splits, ROUNDS=ceil_div(boxes, splits),
        CHANNELS=problem.channels, IMAGES=images, ROWS=rows, COLUMNS=columns, FILTERS=filters, DEPTH=depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return unpack_rows(dw, problem.shapes)
