"""What a scheme makes of a conv, in multiply-accumulates per output pixel, from its options alone."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from torch import nn

from lowrank_cnn.method.channel import basis_filters, channel_macs, channel_rank
from lowrank_cnn.method.scheme import Scheme


def macs_per_pixel(conv: nn.Conv2d, scheme: Scheme) -> int:
    """MACs per pixel of the output of what replaces a conv; of the conv itself these are its weights.

    The first half of a separable pair has the stride of its own axis alone, and so computes more pixels.
    """
    if not isinstance(conv, nn.Conv2d):
        return channel_macs(conv, basis_filters(conv, scheme))
    depth, groups = conv.in_channels // conv.groups, conv.groups
    basis, *rest = scheme.stages(conv.kernel_size, conv.out_channels, channel_groups=groups)  # type: ignore[arg-type]
    first = basis.weights(depth)
    if scheme.name == "separable":
        first *= conv.stride[0] if basis.kernel[0] == 1 else conv.stride[1]
    return first + sum(stage.weights(basis.filters // groups) for stage in rest)


def relative_cost(conv: nn.Conv2d, scheme: Scheme) -> float:
    """The MACs of what replaces a conv, as a share of its own."""
    return macs_per_pixel(conv, scheme) / conv.weight.numel()


def useful_rank(conv: nn.Conv2d, scheme: Scheme) -> int:
    """With so many basis filters per channel group a fit is as near as the scheme allows."""
    if not isinstance(conv, nn.Conv2d):
        return channel_rank(conv)
    depth, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    many = replace(scheme, m=1000 * len(scheme.shapes))
    first = many.stages(conv.kernel_size, conv.out_channels)[0]  # type: ignore[arg-type]
    if scheme.name == "separable":
        lying = first.kernel[0] == 1
        (height, width), taps = conv.kernel_size, first.groups[0].taps
        return min(depth * taps, filters * (height if lying else width))
    return max(ceil(min(filters, depth * g.taps) * Fraction(first.filters, g.filters)) for g in first.groups)
