"""Local response norm over channels-last maps, forward and backward, each value written once.

    y_i = x_i d_i^-beta, d_i = k + alpha/size (sum of x_j^2 over the channels j in the window of i)
    dx_i = g_i d_i^-beta - 2 alpha beta/size x_i (sum of g_j x_j d_j^(-beta - 1) over the windows j that hold i)

The backward computes the denominators again, so that nothing but x is kept, and nothing is added by atomics: the
result is the same every time.

A thread takes 16 bytes of a pixel's channels and the few about them, which its neighbours fetch as well and the
cache gives, and adds up windows in its registers. In bfloat16 that is 4 bytes of memory per value forward and 6
backward, on an H200 the time of 28 and 42 instructions (4.2 TB/s; 132 * 4 warps at 1.75 GHz). For a window of five
the compiled code has 16 and 34 (the backward makes 12 denominators for 8 values): memory should bound both.
"""

# ruff: noqa: N803, RUF005  (Triton has no starred tuples)
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.kernels.gpu import on_its_device
from lowrank_cnn.kernels.problem import empty_maps, pixels_last

ROWS = 256
"""Rows per program, each of 16 bytes of neighbouring channels of a pixel."""
FORWARD, BACKWARD = 4, 8
"""Warps per program: a thread has two rows forward, and in the backward, which needs more registers, one."""


@triton.jit
def values_of(block, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """The columns of a block as blocks of one, in float32. A thread holds whole rows: nothing moves."""
    columns = (block.to(tl.float32),)
    for step in tl.static_range(HALVINGS):
        evens = ()
        odds = ()
        for i in tl.static_range(len(columns)):
            even, odd = tl.split(tl.reshape(columns[i], (ROWS, 1 << (HALVINGS - 1 - step), 2)))
            evens = evens + (even,)
            odds = odds + (odd,)
        columns = evens + odds  # so that they end in their order
    return columns


@triton.jit
def block_of(columns, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """The block that has these columns."""
    for step in tl.static_range(HALVINGS):
        joined = ()
        for i in tl.static_range(len(columns) // 2):
            pair = tl.join(columns[i], columns[i + len(columns) // 2])
            joined = joined + (tl.reshape(pair, (ROWS, 2 << step)),)
        columns = joined
    return columns[0]


@triton.jit
def groups_of(row, TOTAL: tl.constexpr, HALVINGS: tl.constexpr):
    """The pixel of each row, and the first of its channels."""
    groups: tl.constexpr = (TOTAL + (1 << HALVINGS) - 1) >> HALVINGS
    return (row // groups)[:, None], (row % groups << HALVINGS)[:, None]


@triton.jit
def place_of(row, rows, aside, TOTAL: tl.constexpr, HALVINGS: tl.constexpr):
    """Where the blocks so many channels aside of the rows lie, and which of their values there are."""
    pixel, first = groups_of(row, TOTAL, HALVINGS)
    lane = first + aside + tl.arange(0, 1 << HALVINGS)[None, :]
    return pixel * TOTAL + lane, (row < rows)[:, None] & (lane >= 0) & (lane < TOTAL)


@triton.jit
def channels_about(
    x, row, rows,
    TOTAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROWS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The rows' channels with those before and after them; beyond the borders zeros.

    They are asked for in whole blocks; of the outer ones the compiler fetches what is used.
    """
    spare: tl.constexpr = -BEFORE % (1 << HALVINGS)
    count: tl.constexpr = BEFORE + (1 << HALVINGS) + AFTER
    values = ()
    for i in tl.static_range((spare + count + (1 << HALVINGS) - 1) >> HALVINGS):
        place, keep = place_of(row, rows, (i << HALVINGS) - BEFORE - spare, TOTAL, HALVINGS)
        values = values + values_of(tl.load(x + place, mask=keep, other=0.0), ROWS, HALVINGS)
    return values[spare : spare + count]


@triton.jit
def window_sums(values, SIZE: tl.constexpr):
    """Sums of `SIZE` neighbours each, from sums of 1, 2, 4, ...: three additions for a window of five."""
    spans = values
    sums = values
    for bit in tl.static_range(16):
        if SIZE >> bit & 1:
            if SIZE & ((1 << bit) - 1):
                longer = ()
                for i in tl.static_range(len(values) + 1 - (SIZE & ((2 << bit) - 1))):
                    longer = longer + (sums[i] + spans[i + (SIZE & ((1 << bit) - 1))],)
                sums = longer
            else:
                sums = spans
        if SIZE >> bit > 1:
            twice = ()
            for i in tl.static_range(len(spans) - (1 << bit)):
                twice = twice + (spans[i] + spans[i + (1 << bit)],)
            spans = twice
    return sums


@triton.jit
def denominators(values, scale, k, SIZE: tl.constexpr):
    """One per window."""
    squares = ()
    for i in tl.static_range(len(values)):
        squares = squares + (values[i] * values[i],)
    sums = window_sums(squares, SIZE)
    out = ()
    for i in tl.static_range(len(sums)):
        out = out + (k + scale * sums[i],)
    return out


@triton.jit
def powers(d, beta, ROOTS: tl.constexpr):
    """d^-beta and 1/d; by roots where beta is 3/4."""
    if ROOTS:
        root = tl.rsqrt(d)
        return root * tl.sqrt(root), root * root
    log = tl.log2(d)
    return tl.exp2(-beta * log), tl.exp2(-log)


@triton.jit
def response_norm(
    x, y, rows, scale, beta, k,
    TOTAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROOTS: tl.constexpr,
    ROWS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Results of a share of the rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = channels_about(x, row, rows, TOTAL, BEFORE, AFTER, ROWS, HALVINGS)
    below = denominators(near, scale, k, BEFORE + 1 + AFTER)
    out = ()
    for i in tl.static_range(len(below)):
        out = out + (near[BEFORE + i] * powers(below[i], beta, ROOTS)[0],)
    place, keep = place_of(row, rows, 0, TOTAL, HALVINGS)
    tl.store(y + place, block_of(out, ROWS, HALVINGS).to(y.dtype.element_ty), mask=keep)


@triton.jit
def response_norm_gradient(
    grad, x, dx, rows, scale, beta, k,
    TOTAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROOTS: tl.constexpr, BARE: tl.constexpr,
    ROWS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The gradient of a share of the rows; `AFTER` channels before to `BEFORE` after have one in their window."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    g = channels_about(grad, row, rows, TOTAL, AFTER, BEFORE, ROWS, HALVINGS)
    near = channels_about(x, row, rows, TOTAL, BEFORE + AFTER, BEFORE + AFTER, ROWS, HALVINGS)
    below = denominators(near, scale, k, BEFORE + 1 + AFTER)
    own = ()
    shared = ()
    for i in tl.static_range(len(below)):
        power, inverse = powers(below[i], beta, ROOTS)
        own = own + (g[i] * power,)
        part = own[i] * (near[BEFORE + i] * inverse)
        if BARE:  # without k, the windows beyond the borders may be nothing but zeros: 0/0 for what is not there
            lane = groups_of(row, TOTAL, HALVINGS)[1] + i - AFTER
            part = tl.where((lane >= 0) & (lane < TOTAL), part, 0.0)
        shared = shared + (part,)
    shared = window_sums(shared, BEFORE + 1 + AFTER)
    out = ()
    for i in tl.static_range(len(shared)):
        out = out + (own[AFTER + i] - 2 * scale * beta * (near[BEFORE + AFTER + i] * shared[i]),)
    place, keep = place_of(row, rows, 0, TOTAL, HALVINGS)
    tl.store(dx + place, block_of(out, ROWS, HALVINGS).to(dx.dtype.element_ty), mask=keep)


@on_its_device
def launch_forward(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """The result, channels-last."""
    y = empty_maps(x.shape, x)
    rows, options = _cut(x, size, beta)
    response_norm[(-(-rows // ROWS),)](
        pixels_last(x), y.permute(0, 2, 3, 1), rows, alpha / size, beta, k, **options, num_warps=FORWARD
    )
    return y


@on_its_device
def launch_backward(grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """The gradient of the input, channels-last."""
    dx = empty_maps(x.shape, x)
    rows, options = _cut(x, size, beta)
    response_norm_gradient[(-(-rows // ROWS),)](
        pixels_last(grad), pixels_last(x), dx.permute(0, 2, 3, 1), rows, alpha / size, beta, k,
        **options, BARE=k == 0, num_warps=BACKWARD,
    )  # fmt: skip
    return dx


def _cut(x: Tensor, size: int, beta: float) -> tuple[int, dict[str, Any]]:
    """How many rows there are, and what the kernels are compiled for: torch pads by size // 2 before.

    A window that reaches beyond all channels is cut; what it is divided by stays.
    """
    channels, halvings = x.shape[1], 2 if x.dtype.itemsize > 2 else 3
    options = {
        "TOTAL": channels,
        "BEFORE": min(size // 2, channels - 1),
        "AFTER": min((size - 1) // 2, channels - 1),
        "ROOTS": beta == 0.75,
        "ROWS": ROWS,
        "HALVINGS": halvings,
    }
    return x.numel() // channels * (-(-channels >> halvings)), options


@torch.library.custom_op("lowrank::local_response_norm", mutates_args=())
def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """What torch's function of this name gives, channels-last and in the input's type."""
    return launch_forward(x, size, alpha, beta, k)


@local_response_norm.register_fake
def _(x, size, alpha, beta, k):
    return empty_maps(x.shape, x)


@torch.library.custom_op("lowrank::local_response_norm_backward", mutates_args=())
def local_response_norm_backward(
    grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float
) -> Tensor:
    """The gradient of the input."""
    return launch_backward(grad, x, size, alpha, beta, k)


@local_response_norm_backward.register_fake
def _(grad, x, size, alpha, beta, k):
    return empty_maps(x.shape, x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return local_response_norm_backward(grad, x, *ctx.options), None, None, None, None


local_response_norm.register_autograd(_backward, setup_context=_save)
