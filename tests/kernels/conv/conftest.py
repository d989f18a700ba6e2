"""Random layers with their float64 answers, for the tests of the forward kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lowrank_cnn.kernels.problem import describe
from lowrank_cnn.kernels.reference import composite_reference
from tests.kernels.helpers import same

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMITS = {torch.float32: 2e-3 if GPU else 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def posed(size, groups, *, dtype=torch.float32, bias=True, stride=(1, 1), padding=None, residual=False, **options):
    """Fresh inputs, the problem they pose, its float64 answer, and the residual, if there is one."""
    x = torch.randn(size, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
    weights = [torch.randn(f, size[1], h, w, device=DEVICE).div_(h * w).to(dtype) for h, w, f in groups]
    b = torch.randn(sum(f for *_, f in groups), device=DEVICE) if bias else None
    options |= {"stride": stride, "padding": padding or [same(h, w) for h, w, _ in groups]}
    problem = describe(x, weights, residual=residual, **options)
    added = None
    if residual:
        maps = torch.randn(problem.batch, problem.filters, *problem.result_size, device=DEVICE)
        added = maps.to(dtype).contiguous(memory_format=torch.channels_last)
    numbers = [x.double(), [w.double() for w in weights], b if b is None else b.double()]
    exact = composite_reference(*numbers, **options, residual=added if added is None else added.double())
    return x, weights, b, problem, exact, added


def poison(monkeypatch, module):
    """Memory for results comes full of NaN, so that what is never written shows."""
    fill = module.empty_result
    monkeypatch.setattr(module, "empty_result", lambda *args: fill(*args).fill_(torch.nan))


def assert_agrees(y, exact, dtype):
    assert y.shape == exact.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.linalg.vector_norm(y - exact) <= LIMITS[dtype] * torch.linalg.vector_norm(exact)


@pytest.fixture(scope="session")
def layers() -> SimpleNamespace:
    """Functions that pose a layer, poison the memory of results, and compare a result with float64."""
    return SimpleNamespace(posed=posed, poison=poison, assert_agrees=assert_agrees, same=same)
