"""`build_conv` builds the layer or chain of layers that replaces a dense conv under a scheme."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn

from lowrank_cnn.kernels.dense import compose, ungrouped
from lowrank_cnn.method.branches import BranchedConv2d, branched_conv
from lowrank_cnn.method.geometry import Padding, Sides, enclosing_padding, pair, recentred
from lowrank_cnn.method.layers import CompositeConv2d, conv_of
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.method.spec import Composite, Pair

__all__ = ["CompositeConv2d", "FactoredConv2d", "build_conv"]

T = TypeVar("T")


class FactoredConv2d(nn.Sequential):
    """Convs in a chain with nothing between them, so that together they are one linear map.

    Its children are `basis` and `join`, `first` and `second` for a separable pair, or `reduce`, `upright`, `lying`
    and `join` for a CP form, whose middle two are depthwise.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.build_conv(16, 32, 3, "separable", padding=1)
    >>> type(layer).__name__, layer(torch.zeros(1, 16, 8, 8)).shape[1]
    ('FactoredConv2d', 32)
    """

    __jit_unused_properties__: ClassVar[list[str]] = [
        "weight", "bias", "in_channels", "out_channels", "groups", "kernel_size", "stride", "dilation",
        "padding", "padding_mode",
    ]  # fmt: skip

    def __init__(self, stages: OrderedDict[str, nn.Module], scheme: Scheme) -> None:
        super().__init__(stages)
        self.scheme = scheme

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent dense conv, with gradients, for tools that inspect weights."""
        first, *rest = (stage.weight for stage in self.children())
        if self.scheme.name == "cp":
            upright, lying, join = rest
            return compose(first * upright * lying, join)  # type: ignore[operator, arg-type]
        return compose(ungrouped(first, self[0].groups // self.groups), *rest, groups=self.groups)  # type: ignore[arg-type, operator]

    @property
    def bias(self) -> Tensor | None:
        """The bias of the last layer, which is that of the whole chain if no other layer has one."""
        return self[-1].bias  # type: ignore[return-value]

    @property
    def in_channels(self) -> int:
        return self[0].in_channels  # type: ignore[return-value]

    @property
    def out_channels(self) -> int:
        return self[-1].out_channels  # type: ignore[return-value]

    @property
    def groups(self) -> int:
        """Those of the last layer: a join mixes what a basis kept apart."""
        return self[-1].groups  # type: ignore[return-value]

    @property
    def kernel_size(self) -> Pair:
        """The kernel of the equivalent dense conv."""
        stages: Any = self
        return max(stage.kernel_size[0] for stage in stages), max(stage.kernel_size[1] for stage in stages)

    @property
    def stride(self) -> Pair:
        stages: Any = self
        return math.prod(stage.stride[0] for stage in stages), math.prod(stage.stride[1] for stage in stages)

    @property
    def dilation(self) -> Pair:
        stages: Any = self
        return max(stage.dilation[0] for stage in stages), max(stage.dilation[1] for stage in stages)

    @property
    def padding(self) -> Sides:
        """Pixels on the sides of each axis, ((top, bottom), (left, right)), as a composite layer has them."""
        sides = [_sides_of(stage) for stage in self]
        (top, bottom), (left, right) = (
            [max(side) for side in zip(*axis, strict=True)] for axis in zip(*sides, strict=True)
        )
        return (top, bottom), (left, right)

    @property
    def padding_mode(self) -> str:
        stages: Any = self  # those that pad nothing have the default
        return next((stage.padding_mode for stage in stages if stage.padding_mode != "zeros"), "zeros")


def build_conv(
    in_channels: int,
    filters: int,
    kernel: int | Sequence[int],
    scheme: str | Scheme = "dense",
    *,
    stride: int | Sequence[int] = 1,
    padding: Padding = "same",
    dilation: int | Sequence[int] = 1,
    channel_groups: int = 1,
    padding_mode: str = "zeros",
    bias: bool | Literal["last"] = True,
) -> nn.Module:
    """Build the layer, or chain of layers, that replaces a dense conv under a scheme.

    A basis takes the stride, padding and dilation of the dense conv and its join none; the halves of a separable
    pair and the strips of a CP form take those of the axis they run along. With bias="last" a chain has a bias in
    its last layer alone, so that it can be merged exactly; a CP form never has another.

    >>> import torch
    >>> import lowrank_cnn as lr
    >>> layer = lr.build_conv(64, 128, 3, "lr", padding=1)
    >>> layer(torch.zeros(1, 64, 8, 8)).shape[1]
    128
    """
    scheme, kernel = parse_scheme(scheme).for_layer(in_channels, filters, channel_groups), pair(kernel, "kernel")
    stages = scheme.stages(kernel, filters, channel_groups=channel_groups)
    stride, dilation = pair(stride, "stride"), pair(dilation, "dilation")
    sides = enclosing_padding(padding, kernel, dilation)
    common = {"channel_groups": channel_groups, "padding_mode": padding_mode}
    parts = {"channel_groups": channel_groups * scheme.channel_groups}
    whole = {
        "stride": stride,
        "padding": recentred(sides, kernel, stages[0].kernel, dilation),
        "dilation": dilation,
    }
    first = branched_conv if scheme.branches else conv_of
    if len(stages) == 1:
        shuffle = scheme.channel_groups > 1
        return first(in_channels, stages[0], **(whole | common | parts), shuffle=shuffle, bias=bool(bias))

    def along(axis: int, stage: Composite) -> dict[str, Any]:
        return _along(axis, whole, sides, kernel, stage) | common

    places = [whole | common | parts, {"padding": 0} | common]
    names: tuple[str, ...] = ("basis", "join")
    if scheme.name == "separable":
        places = [along(axis, stage) for axis, stage in zip(_axes(scheme), stages, strict=True)]
        names = ("first", "second")
    elif scheme.name == "cp":
        strips = [along(axis, stages[1 + axis]) | {"channel_groups": stages[0].filters} for axis in (0, 1)]
        places, names = [{"padding": 0}, *strips, {"padding": 0}], ("reduce", "upright", "lying", "join")
    depths = (in_channels, *(stage.filters for stage in stages[:-1]))
    biases = [bias is True and scheme.name != "cp"] * (len(stages) - 1) + [bool(bias)]
    rows = zip(names, depths, stages, places, biases, strict=True)
    make = {"basis": first}
    layers = {name: make.get(name, conv_of)(depth, s, **place, bias=own) for name, depth, s, place, own in rows}
    return FactoredConv2d(OrderedDict(layers), scheme)


def _sides_of(stage: Any) -> Sides:
    """The padding of one layer of a chain, for each side."""
    if isinstance(stage, CompositeConv2d | BranchedConv2d):
        return stage.padding
    height, width = stage.padding
    return (height, height), (width, width)


def _axes(scheme: Scheme) -> tuple[int, int]:
    """The axis (0 vertical, 1 horizontal) along which each half of a separable scheme runs."""
    return (0, 1) if scheme.shapes[0][0].endswith("x1") else (1, 0)


def _along(axis: int, whole: dict[str, Any], sides: Sides, kernel: Pair, stage: Composite) -> dict[str, Any]:
    """The stride, dilation and padding of a dense conv along one axis, and none along the other."""
    sides = recentred(sides, kernel, stage.kernel, whole["dilation"])
    return {
        "stride": _only(axis, whole["stride"], 1),
        "dilation": _only(axis, whole["dilation"], 1),
        "padding": _only(axis, sides, (0, 0)),
    }


def _only(axis: int, both: tuple[T, T], otherwise: T) -> tuple[T, T]:
    return (both[0], otherwise) if axis == 0 else (otherwise, both[1])
