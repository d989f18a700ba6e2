"""The activations that a conv's epilogue can apply, by name: what they are called, and what they compute.

A name is one of `ACTIVATIONS`. "leaky_relu" has a slope of 0.01; "leaky_relu:0.1" names another.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.system.errors import LowRankError

ACTIVATIONS = ("relu", "leaky_relu", "silu", "gelu", "hardswish")
DEFAULT_SLOPE = 0.01


def canonical(activation: str | None, relu: bool = False) -> str | None:
    """The one spelling of an activation, None for none; `relu` is short for "relu"."""
    if relu:
        if activation not in (None, "", "relu"):
            raise LowRankError(f"relu=True and activation={activation!r} contradict each other: pass one of them.")
        return "relu"
    if not activation:
        return None
    name, slope = parsed(activation)
    return f"leaky_relu:{slope:g}" if name == "leaky_relu" else name


def parsed(activation: str | None) -> tuple[str, float]:
    """Name and negative slope, as the kernels take them: "" for no activation, 0.0 where there is no slope."""
    if activation is None:
        return "", 0.0
    name, colon, rest = activation.partition(":")
    try:
        slope = float(rest) if colon else DEFAULT_SLOPE
    except ValueError:
        slope = float("nan")
    if name not in ACTIVATIONS or (colon and name != "leaky_relu") or slope != slope:
        known = ", ".join(ACTIVATIONS)
        raise LowRankError(f'the activation is one of {known}, or "leaky_relu:0.1", not {activation!r}.')
    return name, slope if name == "leaky_relu" else 0.0


def is_monotone(activation: str | None) -> bool:
    """Whether an activation never falls: it may then follow a max-pool instead of preceding it."""
    name, slope = parsed(activation)
    return name in ("", "relu") or (name == "leaky_relu" and slope >= 0)


def activate(y: Tensor, activation: str | None, *, inplace: bool = False) -> Tensor:
    """The activation by torch; in place where asked for and torch has it so."""
    name, slope = parsed(activation)
    if name in ("", "gelu"):
        return F.gelu(y) if name else y
    slopes = {"negative_slope": slope} if name == "leaky_relu" else {}
    return getattr(F, name)(y, inplace=inplace, **slopes)
