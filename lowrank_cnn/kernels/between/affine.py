"""Shared by the batch norm kernels: loading the values of channels, activations and their derivatives."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_PI = tl.constexpr(2.5066282746310002)


@triton.jit
def of_channels(
    mean, rstd, weight, bias,  # [TOTAL]
    lane, TOTAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Mean, reciprocal deviation, weight and bias of some channels, in float32, as [1, channels]."""
    inside = lane < TOTAL
    m = tl.load(mean + lane, mask=inside, other=0.0)
    r = tl.load(rstd + lane, mask=inside, other=0.0)
    w = tl.full(lane.shape, 1.0, tl.float32)
    b = tl.zeros(lane.shape, tl.float32)
    if WEIGHT:
        w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        b = tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    return m[None, :], r[None, :], w[None, :], b[None, :]


@triton.jit
def activated(z, slope, ACTIVATION: tl.constexpr):
    """Apply an activation, named as in `kernels.activation`; NaN stays NaN."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "leaky_relu":
        z = tl.where(z < 0, z * slope, z)
    elif ACTIVATION == "silu":
        z = z / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * ROOT_HALF))
    elif ACTIVATION == "hardswish":
        z = z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return z


@triton.jit
def times_slope(g, z, slope, ACTIVATION: tl.constexpr):
    """The gradient before the activation, from the one after it; at a kink as in torch."""
    if ACTIVATION == "relu":
        g = tl.where(z <= 0, 0.0, g)
    elif ACTIVATION == "leaky_relu":
        g = tl.where(z <= 0, g * slope, g)
    elif ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-z))
        g = g * share * (1.0 + z * (1.0 - share))
    elif ACTIVATION == "gelu":
        g = g * (0.5 * (1.0 + tl.erf(z * ROOT_HALF)) + z * tl.exp(-0.5 * z * z) / ROOT_TWO_PI)
    elif ACTIVATION == "hardswish":
        g = g * tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z * (1.0 / 3.0) + 0.5, 1.0))
    return g


def affine(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The kernels' pointers to values per channel; for a missing weight or bias a pointer that is not read."""
    return mean, rstd, mean if weight is None else weight, mean if bias is None else bias
