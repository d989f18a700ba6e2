"""The GPU that kernels run on: its capability and size, and launches on the right device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lowrank_cnn.kernels.mode import is_compiling_ahead

TYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)
"""The lowest compute capability that the kernels are written for."""
P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Run a launcher on the device of its first tensor; Triton itself launches on the current device."""

    @wraps(launch)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        values = (value for part in arguments for value in (part if isinstance(part, tuple) else (part,)))
        tensor = next(value for value in values if isinstance(value, Tensor))
        with torch.cuda.device_of(tensor):
            return launch(*arguments, **options)

    # With types in place of their names, so that torch can read an operator's schema from it.
    guarded.__signature__ = signature(launch, eval_str=True)  # type: ignore[attr-defined]
    return guarded


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Triton's `kernel[grid]`; within `mode.compiling_ahead` the call only compiles the kernel."""
    return partial(kernel.warmup, grid=grid) if is_compiling_ahead() else kernel[grid]


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability; (0, 0) for a CPU, where Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 2 for a CPU, so that tests see several programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
