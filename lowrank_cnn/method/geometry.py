"""Where filters of several sizes sit on one output grid: kernels, offsets and padding, per axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    height, width = ((size - 1) // 2 - (taps - 1) // 2 for size, taps in zip(kernel, _shape(group), strict=True))
    return height, width


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


def _shape(group: FilterGroup) -> Pair:
    return group.height, group.width


# What a convolution layer computes: `nn.Conv2d` itself, and subclasses of it that provably do the same.
#
# A subclass without a forward of its own is a plain conv. One with its own forward is a plain conv where a
# symbolic trace shows zero padding by modules, then one `conv2d` of the layer's own weight and options, and
# nothing else.


@dataclass(frozen=True)
class ConvForm:
    """The options of a conv, its padding on each side in pixels."""

    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: Sides
    dilation: tuple[int, int]
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
        graph = fx.Tracer().trace(conv)
    except Exception:  # control flow on the input, or anything else that a trace cannot follow
        return None
    sides = [[0, 0], [0, 0]]
    last = next(iter(graph.nodes))
    for node in graph.nodes:
        if node.op == "call_module" and node.args == (last,) and not node.kwargs:
            pads = _zeros_of(conv.get_submodule(str(node.target)))
            if pads is None:
                return None
            sides = [[a + b for a, b in zip(*axis, strict=True)] for axis in zip(sides, pads, strict=True)]
            last = node
        elif node.op == "call_function":
            if node.target is not F.conv2d or not _is_own_conv(node, last, conv):
                return None
            last = node
        elif node.op == "output":
            convolved = last.op == "call_function" and node.args == (last,)
            return ((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1])) if convolved else None
        elif node.op not in ("placeholder", "get_attr"):
            return None
    return None


def _zeros_of(pad: nn.Module) -> Sides | None:
    if type(pad) is nn.Identity:
        return (0, 0), (0, 0)
    if type(pad) is nn.ZeroPad2d or (type(pad) is nn.ConstantPad2d and pad.value == 0):
        left, right, top, bottom = pad.padding
        return (top, bottom), (left, right)
    return None


def _is_own_conv(node: fx.Node, x: fx.Node, conv: nn.Conv2d) -> bool:
    """Whether a call of `conv2d` takes this input and the layer's own weight, bias and options."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    defaults: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    weight, bias = given["weight"], given["bias"]
    own = isinstance(weight, fx.Node) and (weight.op, weight.target) == ("get_attr", "weight")
    if conv.bias is not None:
        own = own and isinstance(bias, fx.Node) and (bias.op, bias.target) == ("get_attr", "bias")
    else:
        own = own and bias is None
    options = (_pair(given["stride"]), _pair(given["padding"]), _pair(given["dilation"]), given["groups"])
    stated = (conv.stride, _pair(conv.padding), conv.dilation, conv.groups)
    return own and given["input"] is x and options == stated and isinstance(conv.padding, tuple)


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value
