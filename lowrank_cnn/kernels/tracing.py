"""What torch.compile asks once, while it traces, instead of following it; imported only then."""

from __future__ import annotations

import torch

from lowrank_cnn.kernels import mode
from lowrank_cnn.kernels.measured import choice

asked_for = torch.compiler.assume_constant_result(mode.asked_for)
fuses = torch.compiler.assume_constant_result(choice.fuses)


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Asked so, because torch 2.11 takes the question itself, wherever it compiles, for a yes."""
    return torch.compiler.is_exporting()
