"""Batch norm with a residual and an activation, by the kernels, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.between import batch_statistics, normalise
from lowrank_cnn.kernels.problem import ACTIVATIONS
from tests.kernels.helpers import assert_well_formed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, SLOPE = 1e-5, 0.1
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def prepared(x, weight, bias, residual, activation, add_last=False):
    mean, rstd = batch_statistics.batch_norm_statistics(x.detach(), None, None, None, 0.1, EPS)
    return x, mean, rstd, weight, bias, residual, activation, SLOPE, add_last


def ours(*given):
    return normalise.batch_norm_activation(*prepared(*given))


def exact(x, weight, bias, residual, activation, add_last=False):
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    y = y if residual is None or add_last else y + residual
    if activation == "leaky_relu":
        y = F.leaky_relu(y, SLOPE)
    elif activation:
        y = getattr(F, activation)(y)
    return y + residual if add_last and residual is not None else y


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


def doubled(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def close(found, right, limit):
    scale = torch.linalg.vector_norm(right).clamp(min=1e-6)
    return torch.linalg.vector_norm(found.double() - right) <= limit * scale


SIZES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3, 20, 64, 96, 130]), st.integers(2, 11), st.integers(1, 9)
)


@given(
    SIZES,
    st.sampled_from(list(ROUNDING)),
    st.sampled_from(("", *ACTIVATIONS)),
    st.booleans(),
    st.sampled_from([None, "before", "after"]),
    st.integers(0, 99),
)
@settings(max_examples=20)
def test_result_and_gradients(size, dtype, activation, with_affine, added, seed):
    x = maps(size, dtype, seed).requires_grad_()
    weight, bias = affine(size[1], with_affine)
    residual = maps(size, dtype, seed + 2).requires_grad_() if added else None
    tensors, last = (x, weight, bias, residual), added == "after"
    wide = doubled(*tensors)
    y, right = ours(*tensors, activation, last), exact(*wide, activation, last)
    assert y.dtype == dtype
    assert close(y, right, ROUNDING[dtype])
    # A value within rounding of a kink has one slope or the other; its gradient is left out.
    before = exact(*(t.detach() if t is not None else None for t in ([*wide[:3], None] if last else wide)), "")
    kinks = {"relu": (0,), "leaky_relu": (0,), "hardswish": (-3, 3)}.get(activation, ())
    clear = torch.stack([(before - at).abs() > 0.05 for at in kinks] or [before == before]).all(0)
    grad = maps(size, dtype, seed + 1) * clear
    leaves = [[t for t in given if t is not None] for given in (tensors, wide)]
    found = torch.autograd.grad(y, leaves[0], grad)
    for a, b in zip(found, torch.autograd.grad(right, leaves[1], grad.double()), strict=True):
        # Two pixels normalise to 1 and -1 whatever they are: their gradient is what rounding leaves of zero.
        few = size[0] * size[2] * size[3] < 8
        assert a.isfinite().all() if few else close(a, b, 20 * ROUNDING[dtype])


@pytest.mark.parametrize(("with_residual", "last"), [(False, False), (True, False), (True, True)])
def test_two_readers_give_their_gradients_apart(with_residual, last):
    size = (2, 24, 7, 6)
    x, (weight, bias) = maps(size).requires_grad_(), affine(24)
    residual = maps(size, seed=2).requires_grad_() if with_residual else None
    tensors = (x, weight, bias, residual)
    wide = doubled(*tensors)
    right = exact(*wide, "relu", last)
    one, other = normalise.TwiceRead.apply(*prepared(*tensors, "relu", last))
    assert torch.equal(one, other)
    weights = [maps(size, seed=seed) for seed in (3, 4)]
    leaves, doubles = ([t for t in given if t is not None] for given in (tensors, wide))
    exact_grads = torch.autograd.grad((right * (weights[0] + weights[1]).double()).sum(), doubles)
    found = torch.autograd.grad((one * weights[0] + other * weights[1]).sum(), leaves)
    assert all(close(a, b, 5e-6) for a, b in zip(found, exact_grads, strict=True))


@pytest.mark.parametrize("reader", [0, 1])
def test_one_of_two_readers_may_have_no_gradient(reader):
    x, (weight, bias) = maps((2, 8, 6, 5)).requires_grad_(), affine(8)
    right = torch.autograd.grad(ours(x, weight, bias, None, "relu").square().sum(), x)[0]
    y = normalise.TwiceRead.apply(*prepared(x, weight, bias, None, "relu"))[reader]
    assert close(torch.autograd.grad(y.square().sum(), x)[0], right.double(), 1e-6)


def test_many_shares_and_turns(monkeypatch):
    for module in (normalise, batch_statistics):
        monkeypatch.setattr(module, "VALUES", 512)
    size = (3, 40, 13, 11) if DEVICE == "cpu" else (61, 40, 53, 51)
    x, residual, (weight, bias) = maps(size).requires_grad_(), maps(size, seed=2).requires_grad_(), affine(40)
    assert batch_statistics.split_sum(x.numel() // 40, 40, x.device)[2] > 1
    tensors = (x, weight, bias, residual)
    wide = doubled(*tensors)
    y, right = ours(*tensors, "relu"), exact(*wide, "relu")
    assert close(y, right, 2e-6)
    grad = maps(size, seed=1)
    found = torch.autograd.grad(y, tensors, grad)
    for a, b in zip(found, torch.autograd.grad(right, wide, grad.double()), strict=True):
        assert close(a, b, 5e-6)


def test_a_constant_channel_and_nan():
    x = maps((2, 32, 4, 4))
    x[:, 0] = 12.34
    x[0, 1, 0, 0] = torch.nan
    y = ours(x, None, None, None, "relu")
    assert y[:, 0].abs().max() < 1e-2
    assert y[:, 1].isnan().all()
    assert close(y[:, 2:], exact(x.double(), None, None, None, "relu")[:, 2:], 2e-6)


def test_the_same_every_time_and_in_any_layout():
    x, (weight, bias), residual = maps((2, 20, 6, 5)).requires_grad_(), affine(20), maps((2, 20, 6, 5), seed=1)
    plain = x.detach().contiguous().requires_grad_()
    grad = torch.randn(2, 20, 1, 1, device=DEVICE).expand(x.shape)
    given = ((x, residual), (x, residual), (plain, residual.contiguous()))
    runs = [
        torch.autograd.grad(ours(maps_, weight, bias, added, "relu"), (maps_, weight, bias), grad)
        for maps_, added in given
    ]
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))


def test_the_result_may_be_changed_in_place():
    x, (weight, bias) = maps((2, 8, 6, 6)).requires_grad_(), affine(8)
    y = ours(x, weight, bias, None, "")
    assert not y._is_view()
    assert y.is_contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(F.relu_(y).square().sum(), x)[0]
    right = torch.autograd.grad(ours(x, weight, bias, None, "relu").square().sum(), x)[0]
    assert torch.equal(found, right)


@pytest.mark.parametrize(("with_residual", "last"), [(False, False), (True, False), (True, True)])
def test_operators_are_well_formed(with_residual, last):
    x, (weight, bias) = maps((2, 4, 5, 6)), affine(4)
    residual = maps((2, 4, 5, 6), seed=1) if with_residual else None
    arguments = prepared(x.requires_grad_(), weight, bias, residual, "relu", last)
    assert_well_formed(normalise.batch_norm_activation, arguments, gradients=True)
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments[:-1]]
    for second in (None, torch.ones_like(x.detach())):
        given = (torch.ones_like(x.detach()), second, *detached)
        assert_well_formed(normalise.batch_norm_activation_backward, given, gradients=False)
