"""What torch.compile asks once, while it traces, instead of following it; imported only then."""

from __future__ import annotations

from typing import Any

import torch

from lowrank_cnn.kernels import mode
from lowrank_cnn.kernels.autotune import choice

asked_for = torch.compiler.assume_constant_result(mode.asked_for)


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Asked so, because torch 2.11 takes the question itself, wherever it compiles, for a yes."""
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def plan_text(*request: Any) -> str | None:
    with mode.unsurveyed():
        return choice.plan_text(*request)
