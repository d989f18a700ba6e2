"""What torch.compile asks once, while it traces, instead of following it; imported only then."""

from __future__ import annotations

import torch

from lowrank_cnn.kernels import dispatch

asked_for = torch.compiler.assume_constant_result(dispatch.asked_for)
fuses = torch.compiler.assume_constant_result(dispatch.fuses)
