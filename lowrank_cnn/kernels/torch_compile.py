"""Decisions that torch.compile treats as constants: it calls these once per trace and does not trace into them.

Import this module only while torch.compile traces: the decorators import its compiler.
"""

from __future__ import annotations

from typing import Any

import torch

from lowrank_cnn.kernels import device as mode
from lowrank_cnn.kernels.autotune import choice

asked_for = torch.compiler.assume_constant_result(mode.asked_for)
asked_for_dense = torch.compiler.assume_constant_result(mode.asked_for_dense)


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Whether torch.export traces. Traced directly, torch 2.11 returns True under torch.compile as well."""
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def plan_text(*request: Any) -> str | None:
    """`choice.plan_text`, unaffected by a survey: a compiled graph outlives it."""
    with mode.unsurveyed():
        return choice.plan_text(*request)


@torch.compiler.assume_constant_result
def takes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, depthwise: bool = False) -> bool:
    """`device.takes`, unaffected by a survey."""
    with mode.unsurveyed():
        return mode.takes(shape, dtype, device, depthwise=depthwise)
