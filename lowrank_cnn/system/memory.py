"""Detect out-of-memory errors and estimate free memory."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's, on any device."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or any(word in str(error).lower() for word in words)


def room(device: torch.device) -> float:
    """Bytes that a GPU can still give, counting what torch has reserved and not used; elsewhere no limit."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
