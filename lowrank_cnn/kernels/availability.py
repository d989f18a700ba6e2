"""Whether kernels run on a device now: they are wanted there, and Triton can build and launch them."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod

import torch

from lowrank_cnn.kernels import gpu
from lowrank_cnn.kernels.mode import asked_for, by_torch, survey
from lowrank_cnn.system.memory import is_out_of_memory

LARGEST = 2**30
"""The most values of a tensor: the kernels between convs count in 32 bits."""
_ABLE: dict[torch.device, bool] = {}


def takes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels between convs run now, on maps of this shape and type."""
    return len(shape) == 4 and dtype in gpu.TYPES and 0 < prod(shape) <= LARGEST and kernels_run(device)


def kernels_run(device: torch.device) -> bool:
    """Whether kernels are wanted on a device, and Triton can build and launch them there."""
    if by_torch() or survey() is not None or not (device.type == "cuda" or asked_for()):
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
    return (device.type != "cuda" or gpu.capability_of(device) >= gpu.OLDEST) and find_spec("triton") is not None


def _runs(device: torch.device) -> bool:
    """Run a small kernel."""
    from lowrank_cnn.kernels.between import batch_statistics

    batch_statistics.batch_norm_statistics(torch.zeros(2, 8, 2, 2, device=device), None, None, None, 0.1, 1e-5)
    return True
