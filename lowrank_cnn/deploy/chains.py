"""Convs in a chain as one conv, where that is exact; where it is not, the reason."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.transforms import compose_bias
from lowrank_cnn.kernels.dense import compose
from lowrank_cnn.method.building import FactoredConv2d
from lowrank_cnn.method.geometry import Sides, enclosing_padding
from lowrank_cnn.method.layers import CompositeConv2d, conv_of
from lowrank_cnn.method.spec import Composite, FilterGroup, Pair


class InexactError(Exception):
    """Two convs are not one; the message says why."""


def merge_chain(chain: FactoredConv2d) -> nn.Module:
    """The single conv that equals a chain, in float64 on the CPU; raises `InexactError` if there is none."""
    return reduce(_joined, (_Plain.of(copy.deepcopy(stage).cpu().double()) for stage in chain)).conv()


@dataclass(frozen=True)
class _Plain:
    """Any conv of ours as one dense weight and its geometry."""

    weight: Tensor
    bias: Tensor | None
    stride: Pair
    dilation: Pair
    sides: Sides
    groups: int
    mode: str

    @classmethod
    def of(cls, layer: nn.Module) -> _Plain:
        if isinstance(layer, CompositeConv2d) and (len(layer.weights) > 1 or layer.shuffle):
            layer = layer.dense_view()
        if isinstance(layer, CompositeConv2d):
            weight, sides, groups = layer.weights[0], layer.padding, layer.channel_groups
        elif type(layer) is nn.Conv2d:
            weight, groups = layer.weight, layer.groups
            sides = enclosing_padding(layer.padding, layer.kernel_size, layer.dilation)  # type: ignore[arg-type]
        else:
            raise InexactError(f"a {type(layer).__name__} is no convolution")
        bias = None if layer.bias is None else layer.bias.detach()
        return cls(weight.detach(), bias, layer.stride, layer.dilation, sides, groups, layer.padding_mode)  # type: ignore[arg-type]

    @property
    def pads(self) -> bool:
        return any(side > 0 for both in self.sides for side in both)

    def reaches(self, axis: int) -> bool:
        """Does an output look further along this axis than at its own pixel?"""
        return self.weight.shape[2 + axis] > 1 or self.stride[axis] > 1 or self.sides[axis] != (0, 0)

    def conv(self) -> nn.Module:
        filters, depth, height, width = self.weight.shape
        single = Composite((FilterGroup(height, width, filters),))
        options = {"stride": self.stride, "padding": self.sides, "dilation": self.dilation}
        options |= {"channel_groups": self.groups, "padding_mode": self.mode, "bias": self.bias is not None}
        layer = conv_of(depth * self.groups, single, **options).to(self.weight)
        target = layer.weights[0] if isinstance(layer, CompositeConv2d) else layer.weight
        with torch.no_grad():
            target.copy_(self.weight)  # type: ignore[operator]
            if self.bias is not None:
                layer.bias.copy_(self.bias)  # type: ignore[union-attr]
        return layer


def _joined(first: _Plain, second: _Plain) -> _Plain:
    """Two convs as one, or the reason why not."""
    strips = first.groups == 1 and second.groups == len(first.weight) == len(second.weight)  # one per channel
    if first.groups != second.groups and not strips:
        raise InexactError("its channel groups do not match: one conv would cost more than both")
    if any(first.reaches(axis) and second.reaches(axis) for axis in (0, 1)):
        raise InexactError("both of its layers reach along the same axis")
    if first.pads and second.pads and first.mode != second.mode:
        raise InexactError("its layers pad in different ways")
    biased = first.bias is not None and bool(first.bias.any())
    if biased and second.pads and second.mode == "zeros":
        raise InexactError("the first layer's bias meets the zero padding of the second")
    along = [second if second.reaches(axis) else first for axis in (0, 1)]
    weight = first.weight * second.weight if strips else compose(first.weight, second.weight, groups=first.groups)
    return _Plain(
        weight,
        compose_bias(first.bias, second.weight, second.bias, groups=second.groups),
        (along[0].stride[0], along[1].stride[1]),
        (along[0].dilation[0], along[1].dilation[1]),
        (along[0].sides[0], along[1].sides[1]),
        first.groups,
        second.mode if second.pads else first.mode,
    )
