"""The activations that the kernels between convs know; imported where Triton may be missing."""

from __future__ import annotations

ACTIVATIONS = ("", "relu", "leaky_relu", "silu", "gelu", "hardswish")
"""By their names in `torch.nn.functional`; "" is none, and the slope of "leaky_relu" is a value of its own."""
