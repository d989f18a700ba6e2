"""Which operations cost what, and reasons in words."""

import pytest
import torch
from torch import nn

from lowrank_cnn.method.count import count, macs_of, reason_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("call", "operation", "macs"),
    [
        (lambda: (torch.randn(3, 4), torch.randn(4)), aten.mv.default, 12),
        (lambda: (torch.randn(5), torch.randn(5)), aten.dot.default, 5),
        (lambda: (torch.randn(3, 4), torch.randn(4, 5)), aten.mm.default, 60),
        (lambda: (torch.randn(3, 4),), aten.relu.default, 0),
        (lambda: (torch.randn(3, 4),), aten.linalg_inv_ex.default, None),
    ],
)
def test_an_operation_is_counted_free_or_unknown(call, operation, macs: int | None):
    arguments = call()
    out = None if macs is None else operation(*arguments)
    assert macs_of(operation, arguments, {}, out) == macs


def test_what_is_not_known_is_listed():
    class Solves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x)

    assert dict(count(Solves(), (3, 4, 4)).unsupported)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Tensor.item() cannot be called on meta tensors", "reads the values"),
        ("Can't call numpy() on a tensor", "calls numpy"),
        ("Expected all tensors to be on the same device", "register it as a buffer"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_reasons_are_in_words(message: str, says: str | None):
    reason = reason_of(RuntimeError(message))
    assert reason is None if says is None else says in str(reason)
