"""Kernels, offsets and padding per axis, for filters of several sizes on one output grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import computes_as
from lowrank_cnn.method.spec import Kernel, Pair

Sides = tuple[Pair, ...]
"""Padding as ((top, bottom), (left, right)), before these in time over volumes; a negative side crops."""

Padding = str | int | Sequence[int] | Sides


def per_axis(value: int | Sequence[int], label: str, axes: int = 2) -> Kernel:
    """A size given once or per axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(sizes) != axes or any(not isinstance(v, int) or v < 1 for v in sizes):
        several = "a pair" if axes == 2 else "three"
        raise LowRankError(f"{label} is a positive number or {several} of them, not {value!r}.")
    return sizes


def enclosing_padding(padding: Padding, kernel: Kernel, dilation: Kernel) -> Sides:
    """Any way of writing the padding, as sides. "same" splits an odd total as torch does: less before."""
    if padding == "same":
        totals = (step * (size - 1) for size, step in zip(kernel, dilation, strict=True))
        return tuple((total // 2, total - total // 2) for total in totals)
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    several = isinstance(padding, Sequence) and not isinstance(padding, str)
    axes: tuple[Any, ...] = tuple(padding) if several else (padding,) * len(kernel)  # type: ignore[arg-type]
    if any(isinstance(v, int) and v < 0 for v in axes):
        raise LowRankError(f"padding cannot be negative: {padding!r}.")
    sides = tuple(tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else (v, v) for v in axes)
    twos = [len(side) for side in sides] == [2] * len(kernel)
    if not twos or not all(isinstance(v, int) for side in sides for v in side):
        numbers = "a pair" if len(kernel) == 2 else "three"
        raise LowRankError(f'padding is "same", "valid", a number or {numbers}, not {padding!r}.')
    return sides  # type: ignore[return-value]


def offsets(own: Kernel, kernel: Kernel) -> Kernel:
    """Taps of the enclosing kernel before the own one's first, per axis: centre taps (k-1)//2 coincide."""
    return tuple((k - 1) // 2 - (n - 1) // 2 for n, k in zip(own, kernel, strict=True))


def recentred(sides: Sides, kernel: Kernel, enclosing: Kernel, dilation: Kernel) -> Sides:
    """The padding of the dense kernel, for an enclosing kernel of another size on the same output grid."""
    shift = offsets(kernel, enclosing)
    return tuple(
        (before + step * first, after + step * (new - old - first))
        for (before, after), old, new, step, first in zip(sides, kernel, enclosing, dilation, shift, strict=True)
    )


def symmetric(sides: Sides) -> bool:
    return all(before == after >= 0 for before, after in sides)


# Recognise subclasses of `nn.Conv2d` and `nn.Conv3d` that compute the same as these.
#
# A subclass without a forward of its own is a plain conv. One with its own forward is a plain conv where a
# symbolic trace shows zero padding by modules, then one `conv2d` of the layer's own weight and options, and
# nothing else.


@dataclass(frozen=True)
class ConvForm:
    """The options of a conv, its padding on each side in pixels."""

    in_channels: int
    out_channels: int
    kernel: Kernel
    stride: Kernel
    padding: Sides
    dilation: Kernel
    groups: int
    padding_mode: str
    bias: bool


def form_of(conv: nn.Conv2d | nn.Conv3d) -> ConvForm | None:
    """The options of the conv that a layer computes; None for a subclass whose forward computes something else."""
    kernel, dilation = conv.kernel_size, conv.dilation
    own = enclosing_padding(conv.padding, kernel, dilation)
    nothing = ((0, 0),) * len(kernel)
    plain = computes_as(conv, nn.Conv3d if isinstance(conv, nn.Conv3d) else nn.Conv2d)
    before = nothing if plain else _padding_before(conv)
    if before is None or (before != nothing and conv.padding_mode != "zeros"):
        return None
    padding = tuple((a + c, b + d) for (a, b), (c, d) in zip(own, before, strict=True))
    return ConvForm(
        conv.in_channels, conv.out_channels, kernel, conv.stride, padding,
        dilation, conv.groups, conv.padding_mode, conv.bias is not None,
    )  # fmt: skip


def _padding_before(conv: nn.Module) -> Sides | None:
    """The zeros that a traced forward puts around its input before one `conv2d`; None for any other forward."""
    if "forward" in vars(conv) or type(conv).__call__ is not nn.Conv2d.__call__:
        return None  # a trace follows the forward of the class alone
    try:
        nodes = [node for node in fx.Tracer().trace(conv).nodes if node.op != "get_attr"]
        _, *pads, convolved, _ = nodes
    except Exception:  # control flow on the input, or anything else that a trace cannot follow
        return None
    in_a_row = all(node.args[:1] == (before,) for before, node in pairwise(nodes))
    if not in_a_row or not _is_own_conv(convolved, conv):
        return None
    zeros = [_zeros_of(conv, pad) for pad in pads]
    if None in zeros:
        return None
    top, bottom, left, right = (sum(sides) for sides in zip((0, 0, 0, 0), *zeros, strict=True))
    return (top, bottom), (left, right)


def _zeros_of(conv: nn.Module, node: fx.Node) -> tuple[int, ...] | None:
    """The zeros above, below, left and right that a node pads with; None if it does something else."""
    pad = conv.get_submodule(str(node.target)) if node.op == "call_module" else None
    if type(pad) is nn.Identity:
        return 0, 0, 0, 0
    if type(pad) is nn.ZeroPad2d or (type(pad) is nn.ConstantPad2d and pad.value == 0):
        left, right, top, bottom = pad.padding
        return top, bottom, left, right
    return None


def _is_own_conv(node: fx.Node, conv: nn.Module) -> bool:
    """Whether a node calls `conv2d` with the layer's own weight, bias and options."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return value.target if value.op == "get_attr" else value
        return (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value

    names = ("weight", "bias", "stride", "padding", "dilation", "groups")
    given = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given |= dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    own = {name: getattr(conv, name) for name in names[2:]}
    own |= {"weight": "weight", "bias": None if conv.bias is None else "bias"}
    return node.target is F.conv2d and {name: plain(value) for name, value in given.items()} == {
        name: plain(value) for name, value in own.items()
    }
