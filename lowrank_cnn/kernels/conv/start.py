"""Start a kernel, or, while kernels are compiled ahead, only compile it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lowrank_cnn.kernels.mode import is_compiling_ahead


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Call it with the kernel's arguments, as Triton's own `kernel[grid]`."""
    return partial(kernel.warmup, grid=grid) if is_compiling_ahead() else kernel[grid]
