"""What torch.compile asks once, while it traces, of the layers between convs; imported only then."""

from __future__ import annotations

import torch

from lowrank_cnn.kernels.mode import unsurveyed
from lowrank_cnn.kernels.modules import takes


@torch.compiler.assume_constant_result
def takes_while_tracing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """`modules.takes`, answered once per size."""
    with unsurveyed():
        return takes(shape, dtype, device)
