"""Local response norm over channels-last maps, forward and backward.

    y_i = x_i d_i^-beta, d_i = k + alpha/size (sum of x_j^2 over the channels j in the window of i)
    dx_i = g_i d_i^-beta - 2 alpha beta/size x_i (sum of g_j x_j d_j^(-beta - 1) over the windows j that hold i)

Layout: a *row* is 16 bytes of neighbouring channels of one pixel; a program takes ROWS rows, and a thread whole
rows. A thread also loads the few channels before and after its row, which hit the cache, and sums windows in its
registers. The backward recomputes the denominators, so only x is kept. There are no atomics, so results are
reproducible.

In bfloat16 the forward moves 4 bytes per value and the backward 6, which on an H200 take as long as 28 and 42
instructions (4.2 TB/s; 132 * 4 warps at 1.75 GHz). For a window of five the compiled code has 16 and 34 (the
backward computes 12 denominators for 8 values): memory should bound both.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.device import operator
from lowrank_cnn.kernels.problem import empty_maps, pixels_last

ROWS = 256
"""Rows per program."""
FORWARD, BACKWARD = 4, 8
"""Warps per program: a thread has two rows in the forward, and one in the backward, which needs more registers."""


@triton.jit
def values_of(block, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """Split a block [ROWS, 2**HALVINGS] into its columns, in float32. A thread holds whole rows: no data moves."""
    columns = (block.to(tl.float32),)
    for step in tl.static_range(HALVINGS):
        evens = ()
        odds = ()
        for i in tl.static_range(len(columns)):
            even, odd = tl.split(tl.reshape(columns[i], (ROWS, 1 << (HALVINGS - 1 - step), 2)))
            evens = evens + (even,)
            odds = odds + (odd,)
        columns = evens + odds  # this order makes the columns end up sorted
    return columns


@triton.jit
def block_of(columns, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """Join columns to a block: the inverse of `values_of`."""
    for step in tl.static_range(HALVINGS):
        joined = ()
        for i in tl.static_range(len(columns) // 2):
            pair = tl.join(columns[i], columns[i + len(columns) // 2])
            joined = joined + (tl.reshape(pair, (ROWS, 2 << step)),)
        columns = joined
    return columns[0]


@triton.jit
def first_channels(row, TOTAL: tl.constexpr, HALVINGS: tl.constexpr):
    """The pixel of each row, and its first channel."""
    groups: tl.constexpr = (TOTAL + (1 << HALVINGS) - 1) >> HALVINGS
    return (row // groups)[:, None], (row % groups << HALVINGS)[:, None]


@triton.jit
def offsets_aside(row, rows, aside, TOTAL: tl.constexpr, HALVINGS: tl.constexpr):
    """Offsets of the blocks `aside` channels away from the rows, and which of their values exist."""
    pixel, first = first_channels(row, TOTAL, HALVINGS)
    lane = first + aside + tl.arange(0, 1 << HALVINGS)[None, :]
    return pixel * TOTAL + lane, (row < rows)[:, None] & (lane >= 0) & (lane < TOTAL)


@triton.jit
def channels_about(
    x,  # [pixels, TOTAL]
    row, rows,
    TOTAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROWS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The rows' channels with `BEFORE` channels before and `AFTER` after them; zeros beyond the borders.

    Loads are of whole blocks; the compiler drops the unused parts of the outer ones.
    """
    spare: tl.constexpr = -BEFORE % (1 << HALVINGS)
    count: tl.constexpr = BEFORE + (1 << HALVINGS) + AFTER
    values = ()
    for i in tl.static_range((spare + count + (1 << HALVINGS) - 1) >> HALVINGS):
        place, keep = offsets_aside(row, rows, (i << HALVINGS) - BEFORE - spare, TOTAL, HALVINGS)
        values = values + values_of(tl.load(x + place, mask=keep, other=0.0), ROWS, HALVINGS)
    return values[spare : spare + count]


@triton.jit
def window_sums(values, SIZE: tl.constexpr):
    """The sums of `SIZE` neighbours, from sums of 1, 2, 4, ...: a window of five takes three additions."""
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
    """The denominator d of each window."""
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
    """d^-beta and 1/d; by square roots if beta is 3/4."""
    if ROOTS:
        root = tl.rsqrt(d)
        return root * tl.sqrt(root), root * root
    log = tl.log2(d)
    return tl.exp2(-beta * log), tl.exp2(-log)


@triton.jit
def response_norm(
    x,  # [pixels, TOTAL]
    y,  # [pixels, TOTAL], written
    rows, scale, beta, k,
    TOTAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROOTS: tl.constexpr,
    ROWS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """Normalise `ROWS` rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = channels_about(x, row, rows, TOTAL, BEFORE, AFTER, ROWS, HALVINGS)
    below = denominators(near, scale, k, BEFORE + 1 + AFTER)
    out = ()
    for i in tl.static_range(len(below)):
        out = out + (near[BEFORE + i] * powers(below[i], beta, ROOTS)[0],)
    place, keep = offsets_aside(row, rows, 0, TOTAL, HALVINGS)
    tl.store(y + place, block_of(out, ROWS, HALVINGS).to(y.dtype.element_ty), mask=keep)


@triton.jit
def response_norm_gradient(
    grad, x,  # [pixels, TOTAL]
    dx,  # [pixels, TOTAL], written
    rows, scale, beta, k,
    TOTAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, ROOTS: tl.constexpr, BARE: tl.constexpr,
    ROWS: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """The gradient of `ROWS` rows; a channel is in the windows of `AFTER` channels before to `BEFORE` after it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Gradients of all windows that hold a channel of the row, and the channels of all these windows.
    g = channels_about(grad, row, rows, TOTAL, AFTER, BEFORE, ROWS, HALVINGS)
    near = channels_about(x, row, rows, TOTAL, BEFORE + AFTER, BEFORE + AFTER, ROWS, HALVINGS)
    below = denominators(near, scale, k, BEFORE + 1 + AFTER)
    # Per window j: g_j d_j^-beta, and g_j x_j d_j^(-beta - 1), which all channels of the window share.
    own = ()
    shared = ()
    for i in tl.static_range(len(below)):
        power, inverse = powers(below[i], beta, ROOTS)
        own = own + (g[i] * power,)
        part = own[i] * (near[BEFORE + i] * inverse)
        if BARE:  # without k, windows beyond the borders may hold only zeros: mask their 0/0
            lane = first_channels(row, TOTAL, HALVINGS)[1] + i - AFTER
            part = tl.where((lane >= 0) & (lane < TOTAL), part, 0.0)
        shared = shared + (part,)
    shared = window_sums(shared, BEFORE + 1 + AFTER)
    out = ()
    for i in tl.static_range(len(shared)):
        out = out + (own[AFTER + i] - 2 * scale * beta * (near[BEFORE + AFTER + i] * shared[i]),)
    place, keep = offsets_aside(row, rows, 0, TOTAL, HALVINGS)
    tl.store(dx + place, block_of(out, ROWS, HALVINGS).to(dx.dtype.element_ty), mask=keep)


def _constants(x: Tensor, size: int, beta: float) -> tuple[int, dict[str, Any]]:
    """The number of rows, and the kernels' constants. As in torch, a window has size // 2 channels before its own.

    A window is cut to the number of channels; alpha is still divided by its full size.
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
    return x.numel() // channels * ceil_div(channels, 1 << halvings), options


@operator("local_response_norm", lambda x, *_: empty_maps(x.shape, x))
def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """As torch's function of this name; the result is channels-last and of the input's type."""
    y = empty_maps(x.shape, x)
    rows, options = _constants(x, size, beta)
    response_norm[(ceil_div(rows, ROWS),)](
        pixels_last(x), y.permute(0, 2, 3, 1), rows, alpha / size, beta, k, **options, num_warps=FORWARD
    )
    return y


@operator("local_response_norm_backward", lambda grad, x, *_: empty_maps(x.shape, x))
def local_response_norm_backward(
    grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float
) -> Tensor:
    """The gradient of the input, channels-last."""
    dx = empty_maps(x.shape, x)
    rows, options = _constants(x, size, beta)
    response_norm_gradient[(ceil_div(rows, ROWS),)](
        pixels_last(grad), pixels_last(x), dx.permute(0, 2, 3, 1), rows, alpha / size, beta, k,
        **options, BARE=k == 0, num_warps=BACKWARD,
    )  # fmt: skip
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return local_response_norm_backward(grad, x, *ctx.options), None, None, None, None


local_response_norm.register_autograd(_backward, setup_context=_save)
