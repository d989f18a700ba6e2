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
from lowrank_cnn.method.spec import FilterGroup, Pair

Sides = tuple[Pair, Pair]
"""Padding as ((top, bottom), (left, right)); a negative side crops."""

Padding = str | int | Sequence[int] | Sides


def pair(value: int | Sequence[int], label: str) -> Pair:
    """A size given once or per axis."""
    both = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(both) != 2 or any(not isinstance(v, int) or v < 1 for v in both):
        raise LowRankError(f"{label} is a positive number or a pair of them, not {value!r}.")
    return both[0], both[1]


def enclosing_padding(padding: Padding, kernel: Pair, dilation: Pair) -> Sides:
    """Any way of writing the padding, as sides. "same" splits an odd total as torch does: less before."""
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return (totals[0] // 2, totals[0] - totals[0] // 2), (totals[1] // 2, totals[1] - totals[1] // 2)
    if padding == "valid":
        return (0, 0), (0, 0)
    both = tuple(padding) if isinstance(padding, Sequence) and not isinstance(padding, str) else (padding, padding)
    if any(isinstance(v, int) and v < 0 for v in both):
        raise LowRankError(f"padding cannot be negative: {padding!r}.")
    sides = [tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else (v, v) for v in both]
    if [len(side) for side in sides] != [2, 2] or not all(isinstance(v, int) for side in sides for v in side):
        raise LowRankError(f'padding is "same", "valid", a number or a pair, not {padding!r}.')
    (top, bottom), (left, right) = sides
    return (top, bottom), (left, right)  # type: ignore[return-value]


def offsets(group: FilterGroup, kernel: Pair) -> Pair:
    """Rows and columns of the enclosing kernel before the group's first: centre taps (k-1)//2 coincide."""
    return (kernel[0] - 1) // 2 - (group.height - 1) // 2, (kernel[1] - 1) // 2 - (group.width - 1) // 2


def recentred(sides: Sides, kernel: Pair, enclosing: Pair, dilation: Pair) -> Sides:
    """The padding of the dense kernel, for an enclosing kernel of another size on the same output grid."""
    shift = offsets(FilterGroup(*kernel, 1), enclosing)
    (top, bottom), (left, right) = (
        (before + step * first, after + step * (new - old - first))
        for (before, after), old, new, step, first in zip(sides, kernel, enclosing, dilation, shift, strict=True)
    )
    return (top, bottom), (left, right)


def symmetric(sides: Sides) -> bool:
    return all(before == after >= 0 for before, after in sides)


# Recognise subclasses of `nn.Conv2d` that compute the same as it does.
#
# A subclass without a forward of its own is a plain conv. One with its own forward is a plain conv where a
# symbolic trace shows zero padding by modules, then one `conv2d` of the layer's own weight and options, and
# nothing else.


@dataclass(frozen=True)
class ConvForm:
    """The options of a conv, its padding on each side in pixels."""

    in_channels: int
    out_channels: int
    kernel: Pair
    stride: Pair
    padding: Sides
    dilation: Pair
    groups: int
    padding_mode: str
    bias: bool


def form_of(conv: nn.Conv2d) -> ConvForm | None:
    """The options of the conv that a layer computes; None for a subclass whose forward computes something else."""
    kernel, dilation = conv.kernel_size, conv.dilation
    own = enclosing_padding(conv.padding, kernel, dilation)  # type: ignore[arg-type]
    before = ((0, 0), (0, 0)) if computes_as(conv, nn.Conv2d) else _padding_before(conv)
    if before is None or (before != ((0, 0), (0, 0)) and conv.padding_mode != "zeros"):
        return None
    (top, bottom), (left, right) = (
        (inner[0] + outer[0], inner[1] + outer[1]) for inner, outer in zip(own, before, strict=True)
    )
    return ConvForm(
        conv.in_channels, conv.out_channels, kernel, conv.stride, ((top, bottom), (left, right)),  # type: ignore[arg-type]
        dilation, conv.groups, conv.padding_mode, conv.bias is not None,  # type: ignore[arg-type]
    )  # fmt: skip


def _padding_before(conv: nn.Conv2d) -> Sides | None:
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


def _zeros_of(conv: nn.Conv2d, node: fx.Node) -> tuple[int, ...] | None:
    """The zeros above, below, left and right that a node pads with; None if it does something else."""
    pad = conv.get_submodule(str(node.target)) if node.op == "call_module" else None
    if type(pad) is nn.Identity:
        return 0, 0, 0, 0
    if type(pad) is nn.ZeroPad2d or (type(pad) is nn.ConstantPad2d and pad.value == 0):
        left, right, top, bottom = pad.padding
        return top, bottom, left, right
    return None


def _is_own_conv(node: fx.Node, conv: nn.Conv2d) -> bool:
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
