"""Knowing the errors of an allocator: they say what is free now, and nothing of what was tried."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's, on any device."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or any(word in str(error).lower() for word in words)
