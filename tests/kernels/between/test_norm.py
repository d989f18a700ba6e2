"""Batch norm with ReLU by the kernels against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.between import norm, norm_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def ours(x, weight, bias, relu, running=(None, None, None), momentum=0.1):
    mean, rstd = norm_ops.batch_norm_statistics(x.detach(), *running, momentum, EPS)
    return norm_ops.batch_norm_relu(x, mean, rstd, weight, bias, relu)


def exact(x, weight, bias, relu, running=(None, None), momentum=0.1):
    y = F.batch_norm(x, *running, weight, bias, training=True, momentum=momentum, eps=EPS)
    return F.relu(y) if relu else y


def maps(size, dtype=torch.float32, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def affine(channels, present=True):
    """Weights of both signs, a zero among them."""
    if not present:
        return None, None
    weight = torch.linspace(-1.5, 1, channels, device=DEVICE)
    weight[0] = 0
    return weight.requires_grad_(), torch.linspace(1, -1, channels, device=DEVICE).requires_grad_()


def close(found, right, limit):
    scale = torch.linalg.vector_norm(right).clamp(min=1e-6)
    return torch.linalg.vector_norm(found.double() - right) <= limit * scale


SIZES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3, 20, 64, 96, 130]), st.integers(2, 11), st.integers(1, 9)
)


@given(SIZES, st.sampled_from(list(ROUNDING)), st.booleans(), st.booleans(), st.integers(0, 99))
@settings(max_examples=25)
def test_result_and_gradients(size, dtype, relu, with_affine, seed):
    x = maps(size, dtype, seed).requires_grad_()
    weight, bias = affine(size[1], with_affine)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y, right = ours(x, weight, bias, relu), exact(*wide, relu)
    assert y.dtype == dtype
    assert close(y, right, ROUNDING[dtype])
    # A result within rounding of zero may be cut on one side alone; its gradient is left out.
    grad = maps(size, dtype, seed + 1) * ((right > 0) == (y > 0))
    leaves = [[t for t in given if t is not None] for given in ((x, weight, bias), wide)]
    found = torch.autograd.grad(y, leaves[0], grad)
    for a, b in zip(found, torch.autograd.grad(right, leaves[1], grad.double()), strict=True):
        # Two pixels normalise to 1 and -1 whatever they are: their gradient is what rounding leaves of zero.
        few = size[0] * size[2] * size[3] < 8
        assert a.isfinite().all() if few else close(a, b, 20 * ROUNDING[dtype])


def test_many_shares_and_turns(monkeypatch):
    monkeypatch.setattr(norm, "VALUES", 512)
    # A GPU has many multiprocessors to share pixels out to before any takes a second turn.
    size = (3, 40, 13, 11) if DEVICE == "cpu" else (61, 40, 53, 51)
    pixels = size[0] * size[2] * size[3]
    x = maps(size).requires_grad_()
    weight, bias = affine(40)
    _, block, rounds, shares = norm._cut(pixels, 40, x.device)
    assert rounds > 1
    assert shares > 1
    assert pixels % (block * rounds) != 0
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y, right = ours(x, weight, bias, True), exact(*wide, True)
    assert close(y, right, 2e-6)
    grad = maps(x.shape, seed=1)
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    for a, b in zip(found, torch.autograd.grad(right, wide, grad.double()), strict=True):
        assert close(a, b, 5e-6)


@pytest.mark.parametrize("values", [256, 4096])
@pytest.mark.parametrize("far", [100, 1000])
def test_a_mean_far_from_zero_cancels_nothing(monkeypatch, values, far):
    monkeypatch.setattr(norm, "VALUES", values)
    x = maps((4, 32, 17, 16), seed=3) + 2 * far
    x[0] += 3  # the first pixels of all are not like the rest
    mean, rstd = norm_ops.batch_norm_statistics(x, None, None, None, 0.1, EPS)
    wide = x.double()
    variance, centre = torch.var_mean(wide, (0, 2, 3), correction=0)
    assert torch.allclose(mean.double(), centre, rtol=2e-7, atol=0)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=2e-8 * far, atol=0)


@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics(momentum):
    x, channels = maps((2, 24, 5, 7), torch.bfloat16), 24
    mean, var = torch.randn(channels, device=DEVICE), torch.rand(channels, device=DEVICE) + 0.5
    tracked = torch.tensor(6, device=DEVICE)
    right_mean, right_var = mean.double(), var.double()
    exact(x.double(), None, None, False, (right_mean, right_var), momentum)
    ours(x, None, None, False, (mean, var, tracked), momentum)
    assert torch.allclose(mean.double(), right_mean, atol=1e-6)
    assert torch.allclose(var.double(), right_var, atol=1e-6)
    assert tracked.item() == 7


def test_a_constant_channel_and_nan():
    x = maps((2, 32, 4, 4))
    x[:, 0] = 12.34
    x[0, 1, 0, 0] = torch.nan
    y = ours(x, None, None, True)
    assert y[:, 0].abs().max() < 1e-2
    assert y[:, 1].isnan().all()
    assert close(y[:, 2:], exact(x.double(), None, None, True)[:, 2:], 2e-6)


def test_the_same_every_time_and_in_any_layout():
    x, (weight, bias) = maps((2, 20, 6, 5)).requires_grad_(), affine(20)
    plain = x.detach().contiguous().requires_grad_()
    grad = torch.randn(2, 20, 1, 1, device=DEVICE).expand(x.shape)
    runs = [torch.autograd.grad(ours(given, weight, bias, True), (given, weight, bias), grad) for given in (x, x)]
    runs.append(torch.autograd.grad(ours(plain, weight, bias, True), (plain, weight, bias), grad))
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))


def test_the_result_may_be_changed_in_place():
    x, (weight, bias) = maps((2, 8, 6, 6)).requires_grad_(), affine(8)
    y = ours(x, weight, bias, False)
    assert not y._is_view()
    assert y.is_contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(F.relu_(y).square().sum(), x)[0]
    right = torch.autograd.grad(ours(x, weight, bias, True).square().sum(), x)[0]
    assert torch.equal(found, right)


def test_operators_are_well_formed():
    x, (weight, bias) = maps((2, 4, 5, 6)), affine(4)
    running = (torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE), torch.tensor(0, device=DEVICE))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(norm_ops.batch_norm_statistics, (x, *running, 0.1, EPS), test_utils=tests[:2])
    mean, rstd = norm_ops.batch_norm_statistics(x, None, None, None, 0.1, EPS)
    arguments = (x.requires_grad_(), mean, rstd, weight, bias, True)
    torch.library.opcheck(norm_ops.batch_norm_relu, arguments, test_utils=tests)
    arguments = (torch.ones_like(x), *(t.detach() for t in arguments[:5]), True)
    torch.library.opcheck(norm_ops.batch_norm_relu_backward, arguments, test_utils=tests[:2])
