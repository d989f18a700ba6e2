"""The GPU that kernels run on: whether Triton can use it, its size, and launches on the right device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from importlib.util import find_spec
from inspect import signature
from math import prod
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lowrank_cnn.kernels.mode import asked_for, is_compiling_ahead, mode, survey
from lowrank_cnn.system.memory import is_out_of_memory

TYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)
"""The lowest compute capability that the kernels are written for."""
LARGEST = 2**30
"""The most values of a tensor: the kernels between convs count in 32 bits."""
_ABLE: dict[torch.device, bool] = {}
P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Run a launcher on the device of its first tensor; Triton itself launches on the current device."""

    @wraps(launch)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
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


def kernels_take(x: Tensor) -> bool:
    """Whether the kernels between convs run now, on maps like `x`."""
    # index() turns symbolic sizes of torch.compile into numbers: the answer holds for one size.
    asked = tuple(map(index, x.shape)), x.dtype, x.device
    if torch.compiler.is_compiling():
        from lowrank_cnn.kernels import torch_compile

        return not torch_compile.exporting() and torch_compile.takes(*asked)
    return not torch.compiler.is_exporting() and takes(*asked)


def takes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """`kernels_take` for plain values."""
    return len(shape) == 4 and dtype in TYPES and 0 < prod(shape) <= LARGEST and kernels_run(device)


def kernels_run(device: torch.device) -> bool:
    """Whether kernels are wanted on a device, and Triton can build and launch them there."""
    if mode() == "off" or survey() is not None or not (device.type == "cuda" or asked_for()):
        return False
    return _able(device)


def _able(device: torch.device) -> bool:
    """Whether Triton can build and launch a kernel here; without a C compiler, for example, it cannot."""
    if device not in _ABLE:
        try:
            _ABLE[device] = _is_recent(device) and _runs(device)
        except Exception as error:  # whatever the reason, torch's own operations remain
            if is_out_of_memory(error):
                return False  # for now: ask again later
            _ABLE[device] = False
    return _ABLE[device]


def _is_recent(device: torch.device) -> bool:
    return (device.type != "cuda" or capability_of(device) >= OLDEST) and find_spec("triton") is not None


def _runs(device: torch.device) -> bool:
    """Run a small kernel."""
    from lowrank_cnn.kernels.between import batch_statistics

    batch_statistics.batch_norm_statistics(torch.zeros(2, 8, 2, 2, device=device), None, None, None, 0.1, 1e-5)
    return True
