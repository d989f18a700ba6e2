"""An allocator's error is known on any device, and other errors are not taken for one."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.core.environment import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("unable to mmap 99 bytes from file <a>: Cannot allocate memory (12)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_errors_of_an_allocator_are_known(error: Exception, known: bool) -> None:
    assert is_out_of_memory(error) is known
