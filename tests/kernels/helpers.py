"""What tests of kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def same(height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The padding with which a filter of this size keeps the size of its input."""
    rows, columns = (height - 1) // 2, (width - 1) // 2
    return (rows, height - 1 - rows), (columns, width - 1 - columns)


def assert_well_formed(operator: Callable[..., Any], arguments: Sequence[Any], *, gradients: bool) -> None:
    """Assert that an operator has a right schema and fake kernel, and with `gradients` a formula for these."""
    tests = ("test_schema", "test_faketensor", *(("test_autograd_registration",) if gradients else ()))
    found = torch.library.opcheck(operator, tuple(arguments), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}, found
