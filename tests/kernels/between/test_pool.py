"""The max-pool kernels against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.between import pool as pooling
from tests.kernels.helpers import assert_well_formed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ours(x, kernel, stride, padding, ceil, codes=True):
    return pooling.max_pool2d(x, list(kernel), list(stride), list(padding), ceil, codes)


def maps(size, dtype, *, ties=False, seed=0):
    """Maps in channels-last order; with ties, windows often hold their maximum several times."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, size, generator=generator) if ties else torch.randn(size, generator=generator)
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


@st.composite
def pools(draw):
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    padding = tuple(draw(st.integers(0, side // 2)) for side in kernel)
    size = [draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 20, 32, 40]))]
    size += [draw(st.integers(max(1, k - 2 * p), 9)) for k, p in zip(kernel, padding, strict=True)]
    return tuple(size), kernel, stride, padding, draw(st.booleans())


@given(pools(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.booleans(), st.integers(0, 99))
@settings(max_examples=9)
def test_result_and_gradient(case, dtype, ties, seed):
    size, kernel, stride, padding, ceil = case
    x = maps(size, dtype, ties=ties, seed=seed).requires_grad_()
    y, _ = ours(x, kernel, stride, padding, ceil)
    right = F.max_pool2d(x.double(), kernel, stride, padding, ceil_mode=ceil)
    assert torch.equal(y.double(), right)
    # Whole numbers add up exactly in any order, and few of them in any type.
    grad = torch.randint(-3, 4, y.shape, device=DEVICE)
    found, exact = (torch.autograd.grad(out, x, grad.to(out.dtype))[0] for out in (y, right))
    assert torch.equal(found, exact)


@pytest.mark.parametrize(("kernel", "stride"), [((15, 15), (7, 7)), ((13, 2), (1, 3)), ((6, 6), (8, 9))])
def test_large_windows(kernel, stride):
    x = maps((1, 5, 17, 16), torch.float32, ties=True).requires_grad_()
    y, right = ours(x, kernel, stride, (1, 1), True)[0], F.max_pool2d(x, kernel, stride, 1, ceil_mode=True)
    assert torch.equal(y, right)
    grad = torch.randint(-3, 4, y.shape, device=DEVICE).float()
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (y, right)))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradient_of_any_layout(memory_format):
    x = torch.randn(2, 6, 7, 8, device=DEVICE).contiguous(memory_format=memory_format).requires_grad_()
    y, right = ours(x, (3, 3), (2, 2), (0, 0), True)[0], F.max_pool2d(x, 3, 2, ceil_mode=True)
    assert torch.equal(y, right)
    grad = torch.randn(2, 6, 1, 1, device=DEVICE).expand_as(y)
    found, exact = (torch.autograd.grad(out, x, grad)[0] for out in (y, right))
    assert torch.allclose(found, exact)


def test_nan_and_infinity():
    x = maps((1, 32, 6, 6), torch.float32)
    x[:, :4, 2, 3] = torch.nan
    x[:, 4:8] = -torch.inf
    x.requires_grad_()
    plain = x.detach().cpu().requires_grad_()  # on a GPU, torch's gradient at a NaN goes elsewhere
    y, right = ours(x, (3, 3), (2, 2), (1, 1), False)[0], F.max_pool2d(plain, 3, 2, 1)
    assert torch.equal(y.isnan().cpu(), right.isnan())
    assert torch.equal(y.nan_to_num().cpu(), right.nan_to_num())
    found, exact = (torch.autograd.grad(out.sum(), leaf)[0] for out, leaf in ((y, x), (right, plain)))
    assert torch.equal(found.cpu(), exact)


def test_the_result_may_be_changed_in_place():
    x = maps((2, 8, 6, 6), torch.float32).requires_grad_()
    y = ours(x, (3, 3), (2, 2), (0, 0), True)[0]
    assert not y._is_view()
    assert y.is_contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(F.relu_(y).sum(), x)[0]
    right = torch.autograd.grad(F.relu(F.max_pool2d(x, 3, 2, ceil_mode=True)).sum(), x)[0]
    assert torch.equal(found, right)


def test_no_codes_where_none_are_asked_for():
    assert ours(maps((1, 4, 4, 4), torch.float32), (2, 2), (2, 2), (0, 0), False, codes=False)[1].numel() == 0


@pytest.mark.parametrize("ceil", [False, True])
def test_operators_are_well_formed(ceil):
    x = maps((1, 4, 7, 6), torch.float32).requires_grad_()
    arguments = (x, [3, 3], [2, 2], [1, 0], ceil, True)
    assert_well_formed(pooling.max_pool2d, arguments, gradients=True)
    y, codes = pooling.max_pool2d(*arguments)
    arguments = (torch.ones_like(y), codes, [7, 6], *arguments[1:5])
    assert_well_formed(pooling.max_pool2d_backward, arguments, gradients=False)
