"""Gradients of the composite convolution: through the pool and ReLU, to the input, and to the weights.

The gradient is first undone through pool and ReLU in one pass that also sums the bias gradient. The input's
gradient is one kernel: all groups and taps add into the same accumulator. The weights' gradient is a product
over pixels, split among programs that add their parts in float32.
"""

# ruff: noqa: N803
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowrank_cnn.kernels.conv.backward_plan import gradient_rows, input_tile, leads, weight_rows, weight_tile
from lowrank_cnn.kernels.conv.pack import pack_turned, unpack_rows
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.gpu import start
from lowrank_cnn.kernels.problem import Problem, empty_maps
from lowrank_cnn.kernels.tiles import box_count, box_of, power_above, shares

DEAD = 4
"""The code of a result that ReLU cut; 0 to 3 name the pixel of the 2x2 window that won."""


@triton.jit
def undo_pool(
    grad, codes, out, bias_grad, pixels, height, width, result_height, result_width,
    TOTAL: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Gradient before a 2x2 max-pool and ReLU: each pooled value goes to the pixel of its window that won, if any.

    Pooled pixels are read once, and their four written. Sums stay with their threads until the end: adding them
    up across threads in each turn took longer than the memory.
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
    grad, results, out, bias_grad, pixels,
    TOTAL: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, FILTERS: tl.constexpr, ROUNDS: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradient before a ReLU; without one, the bias's gradient alone."""
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
def input_gradient(
    g, w, dx, row_boxes, column_boxes,
    GROUPS: tl.constexpr, TILES: tl.constexpr, CHANNELS: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FILTERS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One box of input pixels for one tile of input channels; `GROUPS` holds `gradient_rows`.

    Pixels are the second factor, as in `composite_tiled`.
    """
    first = tl.program_id(0) % TILES * FILTERS
    box = tl.program_id(0) // TILES
    column = box % column_boxes * COLUMNS
    row = box // column_boxes % row_boxes * ROWS
    image = box // (column_boxes * row_boxes) * IMAGES
    acc = tl.zeros((FILTERS, IMAGES * ROWS * COLUMNS), tl.float32)
    for i in tl.static_range(len(GROUPS)):
        for step in range(GROUPS[i][3] * GROUPS[i][2]):
            tap = step // GROUPS[i][2]
            depth = step % GROUPS[i][2] * DEPTH
            down, right = GROUPS[i][5] - tap // GROUPS[i][4], GROUPS[i][6] - tap % GROUPS[i][4]
            a = g.load([image, row + down, column + right, GROUPS[i][1] + depth])
            b = w.load([GROUPS[i][0] + tap * CHANNELS + first, depth])
            acc = tl.dot(b, a.reshape(IMAGES * ROWS * COLUMNS, DEPTH).T, acc)
    out = acc.to(dx.dtype).T.reshape(IMAGES, ROWS, COLUMNS, FILTERS)
    dx.store([image, row, column, first], out)


@triton.jit
def weight_gradient(
    g, x, dw, row_boxes, column_boxes,
    GROUPS: tl.constexpr, TILES: tl.constexpr, DEPTH_TILES: tl.constexpr, SPLITS: tl.constexpr,
    ROUNDS: tl.constexpr, CHANNELS: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Filters x channels of one tap of one group over one share of the boxes; `TILES` per share.

    A share's last box may lie beyond the batch, where every fetch gives zeros.
    """
    tile = tl.program_id(0) % TILES
    share = tl.program_id(0) // TILES
    first, weight, channel, filters, width, top, left, lead = 0, 0, 0, 0, 1, 0, 0, 0
    for i in tl.static_range(len(GROUPS)):
        if tile >= GROUPS[i][0]:
            first, weight, channel, filters = GROUPS[i][0], GROUPS[i][1], GROUPS[i][2], GROUPS[i][3]
            width, top, left, lead = GROUPS[i][4], GROUPS[i][5], GROUPS[i][6], GROUPS[i][7]
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
    f, c = offset - lead + tl.arange(0, FILTERS), depth + tl.arange(0, DEPTH)
    place = (weight + tap * filters + f)[:, None] * CHANNELS + c[None, :]
    inside = ((f >= 0) & (f < filters))[:, None] & (c < CHANNELS)[None, :]
    tl.atomic_add(dw + place, acc, mask=inside, sem="relaxed")


def launch_undo(
    problem: Problem, grad: Tensor, seen: Tensor, programs: int, *, need_bias: bool = True
) -> tuple[Tensor, Tensor | None]:
    """[N, H, W, filters] gradient before pool and ReLU, and the bias gradient in float32 where needed.

    Where nothing is to be undone the gradient is given back as it came; `programs` is how many should run at once.
    `seen` holds the codes where a pool was fused, else the results.
    """
    pool = problem.pool is not None
    if not pool and not problem.relu and not need_bias:
        return grad, None
    shape = (problem.batch, problem.out_height, problem.out_width, problem.filters)
    # Where windows round down, the last row or column is in none.
    make = torch.zeros if problem.pool == "floor" and not problem.even else torch.empty
    out = make(shape, device=grad.device, dtype=grad.dtype) if pool or problem.relu else grad
    bias_grad = torch.zeros(problem.filters, device=grad.device)
    filters = min(128, power_above(problem.filters))
    # So many values that four programs reside together, in registers, and each has enough under way.
    block, tiles = (2048 if pool else 4096) // filters, -(-problem.filters // filters)
    count = problem.batch * problem.result_size[0] * problem.result_size[1]
    blocks = -(-count // block)
    across = max(1, min(blocks, 2 * programs // tiles))
    options = {
        "TOTAL": problem.filters, "PIXELS": block, "FILTERS": filters, "ROUNDS": -(-blocks // across),
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
    """[N, channels, H, W] gradient of the input, from the gradient before pool and ReLU."""
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
    """Write the gradient into [N, H, W, channels], which may be a view; for `begins` see `gradient_rows`."""
    tile = tile or input_tile(problem)
    packed = pack_turned(weights, leads(problem), g.dtype)
    images, rows, columns = box_of(problem.batch, problem.height, problem.width, tile.pixels)
    counts = [-(-size // part) for size, part in zip(dx.shape[:3], (images, rows, columns), strict=True)]
    depth = min(tile.depth, power_above(packed.shape[1]))
    filters = min(tile.filters, power_above(problem.channels))
    tiles = -(-problem.channels // filters)
    start(input_gradient, (tiles * counts[0] * counts[1] * counts[2],))(
        TensorDescriptor.from_tensor(g, [images, rows, columns, depth]),
        TensorDescriptor.from_tensor(packed, [filters, depth]),
        TensorDescriptor.from_tensor(dx, [images, rows, columns, filters]),
        counts[1], counts[2], GROUPS=gradient_rows(problem, depth, begins), TILES=tiles,
        CHANNELS=problem.channels, IMAGES=images, ROWS=rows, COLUMNS=columns, FILTERS=filters, DEPTH=depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def launch_weight_gradient(
    problem: Problem, g: Tensor, pixels: Tensor, programs: int, tile: Tile | None = None
) -> list[Tensor]:
    """Gradients of the groups' weights, in float32; `programs` is how many should run at once."""
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
    total = sum(group.taps * group.filters for group in problem.groups)
    dw = torch.zeros((total, problem.channels), device=g.device)
    start(weight_gradient, (tiles * splits,))(
        TensorDescriptor.from_tensor(g, [images, rows, columns, filters]),
        TensorDescriptor.from_tensor(pixels, [images, rows, columns, depth]),
        dw, counts[1], counts[2], GROUPS=groups, TILES=tiles, DEPTH_TILES=-(-problem.channels // depth),
        SPLITS=splits, ROUNDS=-(-boxes // splits), CHANNELS=problem.channels, IMAGES=images,
        ROWS=rows, COLUMNS=columns, FILTERS=filters, DEPTH=depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return unpack_rows(dw, problem)
