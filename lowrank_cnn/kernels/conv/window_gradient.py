"""The weights' gradient of a pooled first layer for Hopper, over the 4x4 windows of `window`.

In each 2x2 pool one pixel has won, and only it gets the pool's gradient. A program stores the gradients of a tile
in shared memory four times, once per pixel of the pool, with zeros where another pixel won. The product of such a
copy, transposed, with a row of the windows is the gradient of the weights of one row of taps. Pixels in the left
and the right column of the pool use different columns of the window, so there are two sets of three accumulators.

A program is persistent over tiles: it fetches the windows STAGES tiles ahead, and loads the next tile's gradients
while it multiplies. The sums of all programs are added in device memory. The padded pixels have a channel of ones,
whose gradient at the middle tap is the bias gradient.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowrank_cnn.kernels import gpu
from lowrank_cnn.kernels.conv.pad_channels import launch_pad_channels
from lowrank_cnn.kernels.conv.window import fetch_windows, halves, place_of, windows_of
from lowrank_cnn.kernels.conv.window_plan import (
    WindowTile,
    padded_size,
    tile_counts,
    unpack_windows,
    window_shape,
)
from lowrank_cnn.kernels.gpu import start
from lowrank_cnn.kernels.problem import Problem
from lowrank_cnn.system.arithmetic import ceil_div

FILTERS = 64
"""Filters of a tile: the matrix unit takes 64 rows at once."""
GRADIENT = WindowTile(stages=2, residents=2)


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
def times_rows(won, boxes, stage, QUAD: gl.constexpr, acc0, acc1, acc2):
    """Start the products of pixel `QUAD` of the pools: its gradients times the three rows that its taps read."""
    a = won.index(QUAD).permute([1, 0])
    first = stage * 4 + QUAD // 2
    acc0 = warpgroup_mma(a, boxes.index(first), acc0, is_async=True)
    acc1 = warpgroup_mma(a, boxes.index(first + 1), acc1, is_async=True)
    acc2 = warpgroup_mma(a, boxes.index(first + 2), acc2, is_async=True)
    return acc0, acc1, acc2


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
    dw,  # [6 * TOTAL, 16] float32, added to: laid out as in `window_plan.pack_windows`
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
    left0 = gl.zeros([FILTERS, 16], gl.float32, layout=ACC)
    left1 = gl.zeros([FILTERS, 16], gl.float32, layout=ACC)
    left2 = gl.zeros([FILTERS, 16], gl.float32, layout=ACC)
    right0 = gl.zeros([FILTERS, 16], gl.float32, layout=ACC)
    right1 = gl.zeros([FILTERS, 16], gl.float32, layout=ACC)
    right2 = gl.zeros([FILTERS, 16], gl.float32, layout=ACC)
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
        left0, left1, left2 = times_rows(won, boxes, stage, 0, left0, left1, left2)
        right0, right1, right2 = times_rows(won, boxes, stage, 1, right0, right1, right2)
        left0, left1, left2 = times_rows(won, boxes, stage, 2, left0, left1, left2)
        right0, right1, right2 = times_rows(won, boxes, stage, 3, right0, right1, right2)
        # Load the next tile's gradients while the products run.
        g, code = read_tile(
            grad, codes, box + step, total, channel, height, width,
            COUNTS, TOTAL, FILTERS, ROWS, COLUMNS, READ,
        )  # fmt: skip
        left0, left1, left2, right0, right1, right2 = warpgroup_mma_wait(
            0, deps=(left0, left1, left2, right0, right1, right2)
        )
        gl.thread_barrier()
        fetch_windows(x, boxes, ready, stage, box + STAGES * step, total, padded_height, COUNTS, ROWS, COLUMNS)
        done += 1  # noqa: SIM113
    add_up(dw, left0, 0, channel, TOTAL, ACC)
    add_up(dw, left1, 1, channel, TOTAL, ACC)
    add_up(dw, left2, 2, channel, TOTAL, ACC)
    add_up(dw, right0, 3, channel, TOTAL, ACC)
    add_up(dw, right1, 4, channel, TOTAL, ACC)
    add_up(dw, right2, 5, channel, TOTAL, ACC)


def launch_window_gradient(
    problem: Problem, pixels: Tensor, grad: Tensor, codes: Tensor, tile: WindowTile = GRADIENT
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the groups' weights and of the bias, in float32; `grad` and `codes` are [N, H, W, filters]."""
    (rows, columns), size = window_shape(problem), padded_size(problem)
    padded = launch_pad_channels(pixels, size, beyond=2 * rows)
    counts, tiles = tile_counts(problem), ceil_div(problem.filters, FILTERS)
    total = problem.batch * counts[0] * counts[1]
    programs = max(1, gpu.multiprocessors(grad.device) * tile.residents // tiles)
    dw = torch.zeros((6 * problem.filters, 16), device=grad.device)
    kind = getattr(gl, str(grad.dtype).removeprefix("torch."))
    start(window_gradient, (tiles * min(total, programs),))(
        windows_of(padded, problem.batch * size[0], rows, columns), grad, codes, dw, total, size[0],
        *problem.result_size,
        COUNTS=counts, TOTAL=problem.filters, FILTERS=FILTERS, ROWS=rows, COLUMNS=columns, STAGES=tile.stages,
        VIEW=halves(), WON=gl.NVMMASharedLayout.get_default_for([rows * columns, FILTERS], kind),
        READ=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]),
        ACC=gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]),
        num_warps=4,
    )  # fmt: skip
    return unpack_windows(dw, problem)
