"""The cost of what replaces a conv under a scheme, in multiply-accumulates per output pixel."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil

from torch import nn

from lowrank_cnn.method.channel import basis_filters, channel_macs, channel_rank
from lowrank_cnn.method.scheme import Scheme


def macs_per_pixel(conv: nn.Conv2d, scheme: Scheme) -> int:
    """MACs per output pixel of what replaces a conv; for the conv itself this is its number of weights.

    The first half of a separable pair has the stride of its own axis alone, and so computes more pixels; the first
    layer of a CP form has none.
    """
    if not isinstance(conv, nn.Conv2d):
        return channel_macs(conv, basis_filters(conv, scheme))
    first, *rest = stage_weights(conv, scheme)
    rows, columns = conv.stride
    if scheme.name == "cp":
        upright, *rest = rest
        return first * rows * columns + upright * columns + sum(rest)
    if scheme.name == "separable":
        first *= rows if scheme.shapes[0][0].startswith("1x") else columns
    return first + sum(rest)


def stage_weights(conv: nn.Conv2d, scheme: Scheme) -> list[int]:
    """The number of weights of each layer that replaces a conv."""
    scheme = scheme.for_layer(conv.in_channels, conv.out_channels, conv.groups)
    stages = scheme.stages(conv.kernel_size, conv.out_channels, channel_groups=conv.groups)  # type: ignore[arg-type]
    depth, inner = conv.in_channels // conv.groups // scheme.channel_groups, stages[0].filters // conv.groups
    depths = [1, 1, inner] if scheme.name == "cp" else [inner] * (len(stages) - 1)
    return [stage.weights(channels) for stage, channels in zip(stages, (depth, *depths), strict=True)]


def relative_cost(conv: nn.Conv2d, scheme: Scheme) -> float:
    """The MACs of what replaces a conv, as a share of its own."""
    return macs_per_pixel(conv, scheme) / conv.weight.numel()


def useful_rank(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The number of basis filters per channel group beyond which a fit does not improve."""
    if not isinstance(conv, nn.Conv2d):
        return channel_rank(conv)
    if scheme.name == "cp":
        return conv.weight.numel() // max(conv.weight.shape)
    depth, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    many = replace(scheme, m=1000 * len(scheme.shapes))
    first = many.stages(conv.kernel_size, conv.out_channels)[0]  # type: ignore[arg-type]
    if scheme.name == "separable":
        lying = first.kernel[0] == 1
        (height, width), taps = conv.kernel_size, first.groups[0].taps
        return min(depth * taps, filters * (height if lying else width))
    return max(ceil(min(filters, depth * g.taps) * Fraction(first.filters, g.filters)) for g in first.groups)
