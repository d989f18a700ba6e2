"""`Problem`: what one fused launch computes, as data. Kernels, reference and dispatch all work on it.

A problem is hashable: choices and plans are stored per problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import ceil_div, round_up

# The activations that a conv's epilogue can apply, by name.
#
# A name is one of `ACTIVATIONS`. "leaky_relu" has a slope of 0.01; "leaky_relu:0.1" names another.

ACTIVATIONS = ("relu", "leaky_relu", "silu", "gelu", "hardswish")
DEFAULT_SLOPE = 0.01


def canonical(activation: str | None, relu: bool = False) -> str | None:
    """The one spelling of an activation, None for none; `relu` is short for "relu"."""
    if relu:
        if activation not in (None, "", "relu"):
            raise LowRankError(f"relu=True and activation={activation!r} contradict each other: pass one of them.")
        return "relu"
    if not activation:
        return None
    name, slope = parsed(activation)
    return f"leaky_relu:{slope:g}" if name == "leaky_relu" else name


def parsed(activation: str | None) -> tuple[str, float]:
    """Name and negative slope, as the kernels take them: "" for no activation, 0.0 where there is no slope."""
    if activation is None:
        return "", 0.0
    name, colon, rest = activation.partition(":")
    try:
        slope = float(rest) if colon else DEFAULT_SLOPE
    except ValueError:
        slope = float("nan")
    if name not in ACTIVATIONS or (colon and name != "leaky_relu") or slope != slope:
        known = ", ".join(ACTIVATIONS)
        raise LowRankError(f'the activation is one of {known}, or "leaky_relu:0.1", not {activation!r}.')
    return name, slope if name == "leaky_relu" else 0.0


def is_monotone(activation: str | None) -> bool:
    """Whether an activation never falls: it may then follow a max-pool instead of preceding it."""
    name, slope = parsed(activation)
    return name in ("", "relu") or (name == "leaky_relu" and slope >= 0)


def activate(y: Tensor, activation: str | None, *, inplace: bool = False) -> Tensor:
    """The activation by torch; in place if requested and torch supports it."""
    name, slope = parsed(activation)
    if name in ("", "gelu"):
        return F.gelu(y) if name else y
    slopes = {"negative_slope": slope} if name == "leaky_relu" else {}
    return getattr(F, name)(y, inplace=inplace, **slopes)


Pair = tuple[int, int]
Sides = tuple[Pair, Pair]
OVERLAPPING = "3x3/2"
"""The pool of a ResNet's stem: 3x3 windows, stride 2, padding 1."""


@dataclass(frozen=True)
class TapGroup:
    """`filters` filters of `height` x `width` taps; the first reads `top` rows above and `left` columns before."""

    height: int
    width: int
    filters: int
    top: int
    left: int

    @property
    def taps(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class Problem:
    """A composite conv of one input size, with its epilogue: bias, residual, activation, pool, in this order.

    With `add_last` the residual is added after the activation.
    """

    batch: int
    channels: int
    height: int
    width: int
    groups: tuple[TapGroup, ...]
    stride: Pair
    out_height: int
    out_width: int
    activation: str | None
    pool: str | None
    dtype: torch.dtype
    residual: bool = False
    add_last: bool = False

    @property
    def relu(self) -> bool:
        """Whether the activation is a ReLU."""
        return self.activation == "relu"

    @property
    def can_pool_first(self) -> bool:
        """Whether a kernel may pool before bias and activation: if these keep the order of values in a window."""
        return self.pool is None or (not self.residual and is_monotone(self.activation))

    @property
    def filters(self) -> int:
        """Filters of all groups."""
        return sum(group.filters for group in self.groups)

    @property
    def begins(self) -> list[int]:
        """The first filter of each group among those of all."""
        return starts(group.filters for group in self.groups)

    @property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """The weights' of each group."""
        return [(group.filters, self.channels, group.height, group.width) for group in self.groups]

    @property
    def rows(self) -> list[int]:
        """Rows of packed weights of each group: one per tap and filter."""
        return [group.taps * group.filters for group in self.groups]

    @property
    def as_dense(self) -> Problem:
        """The layer as one dense conv: one group that encloses the taps of all, see `reference.enclosed`."""
        top, left = (max(getattr(group, side) for group in self.groups) for side in ("top", "left"))
        height = max(top - group.top + group.height for group in self.groups)
        width = max(left - group.left + group.width for group in self.groups)
        return replace(self, groups=(TapGroup(height, width, self.filters, top, left),))

    @property
    def result_size(self) -> Pair:
        """Height and width of the result, after the pool."""
        if self.pool is None:
            return self.out_height, self.out_width
        spare = 0 if self.pool == "floor" else 1
        return (self.out_height + spare) // 2, (self.out_width + spare) // 2

    @property
    def padding(self) -> list[Sides]:
        """((top, bottom), (left, right)) per group."""
        rows, columns = self.stride
        return [
            (
                (g.top, (self.out_height - 1) * rows + g.height - self.height - g.top),
                (g.left, (self.out_width - 1) * columns + g.width - self.width - g.left),
            )
            for g in self.groups
        ]

    @property
    def even(self) -> bool:
        """Whether 2x2 windows tile the output."""
        return self.out_height % 2 == 0 and self.out_width % 2 == 0

    @property
    def is_small(self) -> bool:
        """Whether tiles of 128 x 128 are fewer than a GPU's multiprocessors."""
        return self.batch * self.out_height * self.out_width * self.filters < 128 * 128 * 128

    @property
    def macs(self) -> int:
        """Multiply-accumulates for the whole batch."""
        return self.batch * self.out_height * self.out_width * self.channels * sum(self.rows)

    @property
    def bytes(self) -> int:
        """The fewest bytes of memory traffic: inputs and weights read once, the result written once."""
        result = self.result_size[0] * self.result_size[1] * self.filters * (2 if self.residual else 1)
        pixels = self.height * self.width * self.channels
        return self.dtype.itemsize * (self.batch * (pixels + result) + self.channels * sum(self.rows))

    def __str__(self) -> str:
        groups = "+".join(f"{g.height}x{g.width},{g.filters}" for g in self.groups)
        sums = ["residual"] if self.residual else []
        order = [self.activation, *sums] if self.add_last else [*sums, self.activation]
        steps = (*order, f"pool-{self.pool}" if self.pool else "")
        tail = "".join(f",{step}" for step in steps if step)
        size = f"{self.batch}x{self.channels}x{self.height}x{self.width}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{size} {groups} /{self.stride[0]}x{self.stride[1]}{tail} {dtype}"


class CallOptions(NamedTuple):
    """The arguments of a call that are not tensors: hashable plain values, which torch.compile can store."""

    stride: Pair
    padding: tuple[Sides, ...]
    activation: str | None
    pool: str | None
    residual: bool
    add_last: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """As arguments of `composite_conv2d`, which takes the residual itself."""
        return {name: value for name, value in self._asdict().items() if name != "residual"}


class ConvTensors(NamedTuple):
    """The tensors of one forward launch; `packed` are the weights in the layout of its kernel.

    If given, `codes` (see `empty_codes`) and `parts` (see `conv.forward`) are written, and so is `result`, which
    may be some channels of larger maps.
    """

    x: Tensor
    packed: Tensor
    bias: Tensor | None = None
    codes: Tensor | None = None
    residual: Tensor | None = None
    parts: Tensor | None = None
    result: Tensor | None = None


class Layout(NamedTuple):
    """How a kernel packs the weights of all groups; frozen layers keep a packed copy per `name`."""

    name: str
    pack: Callable[[Sequence[Tensor], Problem, torch.dtype], Tensor]


@dataclass(frozen=True)
class ForwardKernel:
    """A kernel of the forward. `conv.plans.KERNELS` lists them.

    `tile` is a dataclass of whole numbers. `tiles(problem, capability)` gives those worth measuring on a GPU of
    this compute capability, the default first; none if another kernel is always better there. `unsupported` says
    why the kernel cannot run a problem. `launch(problem, tensors, tile)` runs it. `part_count` counts the parts of
    the statistics that the kernel stores (see `conv.forward`), 0 if it stores none. If a kernel that `decides` can
    run a problem, those listed after it are not measured.
    """

    tile: type
    tiles: Callable[[Problem, tuple[int, int]], Sequence[Any]]
    unsupported: Callable[[Problem], str | None]
    layout: Layout
    launch: Callable[[Problem, ConvTensors, Any], Tensor]
    part_count: Callable[[Problem, Any], int] = lambda problem, tile: 0
    decides: bool = False


def first_reason(checks: Mapping[str, object]) -> str | None:
    """The first reason that holds, of those why a kernel cannot run a problem; None if it can."""
    return next((reason for reason, holds in checks.items() if holds), None)


def imported(module: str, name: str) -> Callable[..., Any]:
    """A function of a module in `conv`, imported at its first call: those for Hopper need Gluon."""
    return lambda *arguments: getattr(import_module(f"lowrank_cnn.kernels.conv.{module}"), name)(*arguments)


def describe(x: Tensor, weights: Sequence[Tensor], **options: Any) -> Problem:
    """The problem of these tensors; the options are those of `pose`."""
    return pose(tuple(x.shape), [tuple(weight.shape) for weight in weights], x.dtype, **options)


def pose(
    size: Sequence[int],
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    stride: Pair,
    padding: Sequence[Sides],
    relu: bool = False,
    pool: str | None = None,
    residual: bool = False,
    activation: str | None = None,
    add_last: bool = False,
) -> Problem:
    """The problem of an input of size [N, C, H, W] and weights of shapes [filters, C, height, width]."""
    if pool not in (None, "floor", "ceil", OVERLAPPING):
        raise LowRankError(f'pool is None, "floor", "ceil" or "{OVERLAPPING}", not {pool!r}.')
    if len(padding) != len(shapes):
        raise LowRankError(f"{len(shapes)} filter groups need as many paddings, not {len(padding)}.")
    batch, channels, height, width = size
    sizes = [  # no set: a tracer's numbers have no hash
        ((height + sum(rows) - shape[2]) // stride[0] + 1, (width + sum(columns) - shape[3]) // stride[1] + 1)
        for shape, (rows, columns) in zip(shapes, padding, strict=True)
    ]
    out_height, out_width = sizes[0]
    if any(size != sizes[0] for size in sizes[1:]):
        found = " and ".join(f"{rows}x{columns}" for rows, columns in sorted(set(sizes)))
        raise LowRankError(f"all filter groups must give one output size, not {found}.")
    groups = tuple(
        TapGroup(shape[2], shape[3], shape[0], rows[0], columns[0])
        for shape, (rows, columns) in zip(shapes, padding, strict=True)
    )
    last = canonical(activation, relu)
    after = add_last and residual and last is not None  # without an activation both orders are one
    posed = (batch, channels, height, width, groups, (stride[0], stride[1]), out_height, out_width)
    return Problem(*posed, last, pool, dtype, residual, after)


def pixels_last(x: Tensor) -> Tensor:
    """A batch as contiguous [N, H, W, C]; copied only if it is not channels-last already."""
    pixels = x.permute(0, 2, 3, 1).contiguous()
    # A side of size 1 may have any stride in torch, but tensor descriptors need aligned strides.
    return pixels.view(-1).view(pixels.shape) if 1 in pixels.shape else pixels


def pixels_view(x: Tensor) -> Tensor:
    """As `pixels_last`, without a copy for some channels of larger maps, if tensor descriptors can read them."""
    return x.permute(0, 2, 3, 1) if _is_described(x) else pixels_last(x)


def _is_described(x: Tensor) -> bool:
    """Whether the channels of a pixel are neighbours, and all else lies multiples of 16 bytes apart."""
    steps = [x.element_size() * step for step in (x.stride(0), *x.stride()[2:])]
    return x.stride(1) == 1 and min(steps) > 0 and not any(step % 16 for step in (x.data_ptr(), *steps))


def empty_codes(problem: Problem, x: Tensor) -> Tensor | None:
    """Memory for the codes of a 2x2 pool, which the backward reads: each window's winner, or 4 if ReLU cut it."""
    if problem.pool not in ("floor", "ceil"):
        return None
    return torch.empty((problem.batch, *problem.result_size, problem.filters), device=x.device, dtype=torch.uint8)


def empty_result(problem: Problem, x: Tensor) -> Tensor:
    """Memory for the result, [N, filters, H, W] in channels-last order.

    Kernels write to its `permute(0, 2, 3, 1)` and return the memory itself: autograd would refuse an in-place ReLU
    on a view.
    """
    return empty_maps((problem.batch, problem.filters, *problem.result_size), x)


def result_and_residual(problem: Problem, given: ConvTensors) -> tuple[Tensor, Tensor]:
    """Memory for the result, [N, filters, H, W], and the residual [N, H, W, filters] with the same strides.

    The memory is `given.result` if kernels can write there. Without a residual the second is the result.
    """
    maps, added = given.result, given.residual
    alike = added is None or (maps is not None and added.stride() == maps.stride() and _is_described(added))
    if maps is None or not alike or not _is_described(maps):
        maps = empty_result(problem, given.x)
        return maps, maps.permute(0, 2, 3, 1) if added is None else pixels_last(added)
    return maps, (maps if added is None else added).permute(0, 2, 3, 1)


def empty_maps(size: Sequence[int], like: Tensor) -> Tensor:
    """Memory for [N, C, H, W] in channels-last order, of a tensor's type and device."""
    return torch.empty(tuple(size), device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


# Divide the output into tiles: boxes of pixels over batch, rows and columns, all powers of two.

Box = tuple[int, int, int]
OVERHEAD_BOXES = 16
"""The cost of starting and ending a program, in boxes of work."""


@lru_cache(maxsize=4096)
def box_of(batch: int, height: int, width: int, pixels: int, least: int = 1) -> Box:
    """The box (images, rows, columns) of `pixels` output pixels that wastes the fewest at the borders.

    Ties go to the fewest images, then to the squarest box: neighbouring taps then read the same cache lines.
    """
    powers = [2**i for i in range(pixels.bit_length())]
    boxes = [
        (pixels // (rows * columns), rows, columns)
        for rows, columns in product(powers, powers)
        if rows * columns <= pixels and rows >= least and columns >= least
    ]

    def cost(box: Box) -> tuple[int, int, int]:
        covered = prod(round_up(size, part) for size, part in zip((batch, height, width), box, strict=True))
        return covered, box[0], abs(box[1] - box[2])

    return min(boxes, key=cost)


def box_count(problem: Problem, box: Box) -> tuple[int, int, int]:
    """How many boxes cover the (unpooled) output: over images, rows and columns."""
    images, rows, columns = box
    return (
        ceil_div(problem.batch, images),
        ceil_div(problem.out_height, rows),
        ceil_div(problem.out_width, columns),
    )


def filter_tiles(problem: Problem, block: int) -> int:
    """Tiles of `block` output channels; none spans two groups."""
    return sum(ceil_div(group.filters, block) for group in problem.groups)


def filters_per_tile(problem: Problem, limit: int = 128) -> int:
    """Filters of a tile: at most those of the smallest group; few computed twice, and wide products preferred."""
    smallest = min(group.filters for group in problem.groups)
    sizes = [size for size in (256, 128, 64, 32, 16) if size <= min(smallest, limit)]

    def cost(size: int) -> float:
        return filter_tiles(problem, size) * size / min(1.0, 0.55 + 0.15 * (size.bit_length() - 6))

    return min(sizes, key=cost, default=0)


def starts(counts: Iterable[int]) -> list[int]:
    """The offset of each part if parts of these sizes follow each other."""
    return list(accumulate(counts, initial=0))[:-1]


def blocks_before(before: int, stride: int) -> Pair:
    """How many blocks of `stride` pixels a filter begins before its output, and pixels skipped of the first."""
    blocks = ceil_div(before, stride)
    return blocks, blocks * stride - before


@lru_cache(maxsize=4096)
def shares(tiles: int, boxes: int, programs: int) -> int:
    """Into how many shares to divide `boxes` so that the work ends soonest, with a program per tile and share.

    `programs` run at once. A few more than that would take another full round.
    """
    most = min(boxes, max(1, 4 * programs // tiles))

    def rounds(count: int) -> int:
        return ceil_div(tiles * count, programs) * (ceil_div(boxes, count) + OVERHEAD_BOXES)

    return min(range(1, most + 1), key=rounds)


def power_above(value: int) -> int:
    """The smallest power of two that is at least `value` and 16, the smallest side of a matrix product."""
    return max(16, 1 << (value - 1).bit_length())


def lanes_of(channels: int) -> int:
    """Channels per program of a kernel without matrix products: a power of two, if possible a divisor."""
    whole = min(128, channels & -channels)
    return whole if whole >= 32 else min(128, power_above(channels))


def blocks_of(pixels: int, channels: int, values: int) -> tuple[Pair, dict[str, int]]:
    """The grid of a kernel over [pixels, channels] with `values` values per program, and its constants."""
    lanes = lanes_of(channels)
    block = values // lanes
    constants = {"TOTAL": channels, "PIXELS": block, "LANES": lanes, "num_warps": 4}
    return (ceil_div(pixels, block), ceil_div(channels, lanes)), constants
