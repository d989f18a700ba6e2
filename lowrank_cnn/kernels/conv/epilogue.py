"""Steps after the matrix product in the Triton kernels: activations, and the codes of a pool.

`hopper_epilogue` has the same steps in Gluon.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lowrank_cnn.kernels.activation import parsed
from lowrank_cnn.kernels.problem import Problem


@triton.jit
def normal_below(x):
    """The normal distribution function to 1e-7 (Abramowitz and Stegun, 7.1.26); it needs few registers."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    beyond = 0.5 * tail * tl.exp(-0.5 * x * x)
    return tl.where(x > 0, 1.0 - beyond, beyond)


@triton.jit
def activated(out, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr):
    """The activation of float32 values; `ACTIVATION` is a name of `kernels.activation`, "" for none."""
    if ACTIVATION == "relu":
        out = tl.maximum(out, 0.0)
    elif ACTIVATION == "leaky_relu":
        out = tl.where(out > 0, out, out * SLOPE)
    elif ACTIVATION == "silu":
        out = out / (1.0 + tl.exp(-out))
    elif ACTIVATION == "gelu":
        out = out * normal_below(out)
    elif ACTIVATION == "hardswish":
        out = out * tl.minimum(tl.maximum(out + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return out


@triton.jit
def without_codes(best, CODES: tl.constexpr):
    """Split pooled values from their winners: with `CODES`, the two lowest bits are 3 minus the winner's place.

    The bits are cleared: a zero that kept them would compare as greater than zero.
    """
    bits = best.to(tl.int32, bitcast=True)
    code = 3 - (bits & 3)
    if CODES:
        best = (bits & ~3).to(tl.float32, bitcast=True)
    return best, code


def activation_options(problem: Problem) -> dict[str, Any]:
    """The activation of a problem as constants of a kernel."""
    name, slope = parsed(problem.activation)
    return {"ACTIVATION": name, "SLOPE": slope}
