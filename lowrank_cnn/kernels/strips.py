"""Convolutions with 1x3 and 3x1 filters on the CPU by compiled code, as a torch operator.

The code is the package `lowrank_strips` (in native/), which needs a compiler to build and is optional: `available`
says whether it is installed. It runs Winograd's minimal filtering along the strip, on torch's threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from lowrank_cnn.core.errors import missing_extra

STEPS = {torch.float32: 6, torch.float16: 4}
"""Outputs per tile: F(6, 3) needs fewer multiplications, F(4, 3) rounds less, which half precision needs."""


def available(dtype: torch.dtype) -> bool:
    """Whether the compiled code is installed, and this processor computes in the type."""
    return dtype in STEPS and is_installed() and (dtype == torch.float32 or library().has_half())


@cache
def is_installed() -> bool:
    """Whether the package with the compiled code can be imported."""
    return find_spec("lowrank_strips") is not None


def installed_version() -> str | None:
    """The version of the package with the compiled code; None if it is not installed."""
    return version("lowrank-strips") if is_installed() else None


@cache
def library() -> ModuleType:
    """The package with the compiled code."""
    if not is_installed():
        raise missing_extra("running compiled strips", "lowrank-strips")
    package = importlib.import_module("lowrank_strips")
    # The threads of torch, not further ones.
    for runtime in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        package.use_openmp(str(runtime))
    return package


def packed_strips(weight: Tensor) -> Tensor:
    """The weight of a group, [filters, channels, 1, 3] or [filters, channels, 3, 1], as the operator takes it."""
    filters, channels = weight.shape[:2]
    step = STEPS[weight.dtype]
    size = library().packed_size(str(weight.dtype).removeprefix("torch."), filters, channels, step)
    made = weight.new_empty(size)
    library().pack(weight.detach().reshape(filters, channels, 3).contiguous(), made, step)
    return made


@torch.library.custom_op("lowrank::strips", mutates_args=(), device_types="cpu")
def strips(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor,
    filters: Sequence[int],
    across: Sequence[bool],
    relu: bool,
    pool: bool,
) -> Tensor:
    """All groups of a layer, concatenated, with its bias: stride one, an output as large as the input.

    `weights` are packed. `filters` has the number of filters of each group; they are 1x3 if `across` is true,
    otherwise 3x1. `pool` adds a 2x2 max-pool; height and width are then even.
    """
    x = x.contiguous()
    y = _result(x, bias, pool)
    first, threads = 0, torch.get_num_threads()
    for weight, count, wide in zip(weights, filters, across, strict=True):
        own = bias[first : first + count]
        library().run(x, weight, own, y, first, wide, STEPS[x.dtype], relu, pool, threads)
        first += count
    return y


@strips.register_fake
def _(x, weights, bias, filters, across, relu, pool):
    return _result(x, bias, pool)


def _result(x: Tensor, bias: Tensor, pool: bool) -> Tensor:
    by = 2 if pool else 1
    return x.new_empty(x.shape[0], bias.shape[0], x.shape[2] // by, x.shape[3] // by)
