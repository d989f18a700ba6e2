"""The layers of a chain: convs, or layers of any kind, one after the other with nothing between them.

A `FactoredConv2d` replaces a 2-D conv, a `FactoredConv3d` a 3-D one. A `FactoredLayer` replaces a linear layer,
or a 1-D, 3-D or transposed conv, by m filters of the same kernel and a pointwise layer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lowrank_cnn.kernels.reference import compose, ungrouped
from lowrank_cnn.method.layers import KINDS, Sides, enclosing_padding
from lowrank_cnn.method.spec import Kernel

if TYPE_CHECKING:
    from lowrank_cnn.method.schemes import Scheme


class FactoredConv2d(nn.Sequential):
    """Convs in a chain with nothing between them, so that together they are one linear map.

    Its children are `basis` and `join`. A separable pair has `first` and `second`. A CP form has `reduce`,
    `upright`, `lying` and `join`, of which the middle two are depthwise.

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
    # What tools read of a conv: that of the equivalent dense one. They are properties, because a chain with a
    # `__getattr__` of its own would no longer be a plain `nn.Sequential`, which the fused kernels run.
    in_channels = property(lambda self: self[0].in_channels)
    out_channels = property(lambda self: self[-1].out_channels)
    bias = property(lambda self: self[-1].bias)
    groups = property(lambda self: self[-1].groups)  # a join mixes what a basis kept apart
    kernel_size = property(lambda self: _by_axis(self, "kernel_size", max))
    stride = property(lambda self: _by_axis(self, "stride", math.prod))
    dilation = property(lambda self: _by_axis(self, "dilation", max))

    def __init__(self, stages: OrderedDict[str, nn.Module], scheme: Scheme) -> None:
        super().__init__(stages)
        self.scheme = scheme

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent dense conv, with gradients, for tools that inspect weights."""
        first, *rest = (stage for stage in self)
        whole = ungrouped(first.weight, first.groups // self.groups)  # type: ignore[arg-type, operator]
        for stage in rest:
            depthwise = stage.groups == len(whole)  # each filter has one input: its taps are multiplied
            whole = whole * stage.weight if depthwise else compose(whole, stage.weight, groups=self.groups)  # type: ignore[arg-type, operator]
        return whole

    @property
    def padding(self) -> Sides:
        """Pixels on the sides of each axis, ((top, bottom), (left, right)), as a composite layer has them."""
        stages: Any = self
        sides = [enclosing_padding(stage.padding, stage.kernel_size, stage.dilation) for stage in stages]
        axes = (zip(*axis, strict=True) for axis in zip(*sides, strict=True))
        return tuple((max(before), max(after)) for before, after in axes)

    @property
    def padding_mode(self) -> str:
        stages: Any = self  # those that pad nothing have the default
        return next((stage.padding_mode for stage in stages if stage.padding_mode != "zeros"), "zeros")


class FactoredConv3d(FactoredConv2d):
    """The same for volumes: `2+1` has a `first` conv within frames and a `second` one along time."""


def _by_axis(stages: Iterable[nn.Module], name: str, combine: Callable[[tuple[int, ...]], int]) -> Kernel:
    return tuple(map(combine, zip(*(getattr(stage, name) for stage in stages), strict=True)))


class FactoredLayer(nn.Sequential):
    """Two layers that replace one: a `basis` of m filters with the same kernel, then a pointwise `join`.

    It has the attributes of that layer (`weight`, `stride`, `in_features`, ...): forwards and tools read them.
    """

    _OF_BASIS: ClassVar[tuple[str, ...]] = (
        "in_channels", "in_features", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
        "output_padding",
    )  # fmt: skip
    _OF_JOIN: ClassVar[tuple[str, ...]] = ("out_channels", "out_features", "bias")
    __jit_unused_properties__: ClassVar[list[str]] = ["weight"]

    def __init__(self, basis: nn.Module, join: nn.Module, scheme: Scheme) -> None:
        super().__init__(OrderedDict(basis=basis, join=join))
        self.scheme = scheme

    def __getattr__(self, name: str) -> Any:
        if name in self._OF_BASIS or name in self._OF_JOIN:
            return getattr(self[0] if name in self._OF_BASIS else self[1], name)
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent single layer, with gradients."""
        basis, join = self[0].weight, self[1].weight.flatten(1)  # type: ignore[operator, union-attr]
        if isinstance(self[0], nn.Linear):
            return join @ basis  # type: ignore[operator]
        groups = groups_of(self[0])
        within, filters = join.unflatten(0, (groups, -1)), basis.unflatten(0, (groups, -1))  # type: ignore[operator]
        transposed = isinstance(self[0], _ConvTransposeNd)  # its weight has the channels first
        axes = "gdm,gcm...->gcd..." if transposed else "gdm,gm...->gd..."
        return torch.einsum(axes, within, filters).flatten(0, 1)


class FactoredTransposed(FactoredLayer):
    """The factors of a transposed conv, which may be told the size of its output."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self.join(self.basis(input, output_size))


def groups_of(layer: nn.Module) -> int:
    """Channel groups; a linear layer has one."""
    return getattr(layer, "groups", 1)


def outputs_of(layer: nn.Module) -> int:
    """Filters of a conv, outputs of a linear layer."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[return-value]


def factored_layer(layer: nn.Module, m: int, scheme: Scheme) -> FactoredLayer:
    """Build m filters with the kernel of a layer, and their join; the weights are set later."""
    filters, groups, biased = outputs_of(layer), groups_of(layer), layer.bias is not None
    if isinstance(layer, nn.Linear):
        basis = nn.Linear(layer.in_features, m, bias=False)
        return FactoredLayer(basis, nn.Linear(m, filters, bias=biased), scheme)
    assert isinstance(layer, _ConvNd)
    options: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    options |= {"groups": groups, "padding_mode": layer.padding_mode, "bias": False}
    transposed = isinstance(layer, _ConvTransposeNd)
    options |= {"output_padding": layer.output_padding} if transposed else {}
    plain: Any = next(kind for kind in KINDS if isinstance(layer, kind))
    basis = plain(layer.in_channels, m, layer.kernel_size, **options)
    pointwise = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(layer.kernel_size) - 1]
    join = pointwise(m, filters, 1, groups=groups, bias=biased)
    return (FactoredTransposed if transposed else FactoredLayer)(basis, join, scheme)
