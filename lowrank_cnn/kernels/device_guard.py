"""Launches on the device of their tensors, whichever the current one is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Triton launches on the current device, and neither a custom operator nor a direct call changes that."""

    @wraps(launch)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
        with torch.cuda.device_of(tensor):
            return launch(*arguments, **options)

    return guarded
