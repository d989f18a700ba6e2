"""Local response norm by the kernels against torch's own in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import FusedResponseNorm
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.between import response_norm
from lowrank_cnn.models import create_model
from tests.kernels.helpers import assert_well_formed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

ours = response_norm.local_response_norm


def maps(size, dtype=torch.float32, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def close(found, right, limit):
    return torch.linalg.vector_norm(found.double() - right) <= limit * torch.linalg.vector_norm(right) + 1e-12


def assert_right(x, options, seed=1):
    """Result and gradient are right, of the input's type, and the result is channels-last."""
    x, wide = x.requires_grad_(), x.detach().double().requires_grad_()
    y, right = ours(x, *options), F.local_response_norm(wide, *options)
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert close(y, right, ROUNDING[x.dtype])
    grad = maps(x.shape, x.dtype, seed)
    (found,), (exact,) = torch.autograd.grad(y, x, grad), torch.autograd.grad(right, wide, grad.double())
    assert found.dtype == x.dtype
    assert close(found, exact, 2 * ROUNDING[x.dtype])


@pytest.mark.parametrize("channels", [3, 64, 100, 192])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_as_googlenet_has_it(channels, dtype):
    assert_right(maps((2, channels, 5, 3), dtype), (5, 1e-4, 0.75, 1.0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9, 16, 33, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_odd_and_even_and_wider_than_the_channels(size, dtype):
    assert_right(maps((1, 20, 3, 7), dtype), (size, 0.5, 0.75, 1.0))


SIZES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3, 8, 20, 24, 100, 130]), st.integers(1, 7), st.integers(1, 9)
)
OPTIONS = st.tuples(
    st.integers(1, 12), st.sampled_from([1e-4, 0.3, 2.0]), st.sampled_from([0.5, 0.75, 1.0, 1.3]),
    st.sampled_from([0.5, 1.0, 2.0]),
)  # fmt: skip


@given(SIZES, OPTIONS, st.sampled_from(list(ROUNDING)), st.integers(0, 99))
@settings(max_examples=12)
def test_result_and_gradient(size, options, dtype, seed):
    assert_right(maps(size, dtype, seed), options, seed + 1)


@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter
def test_without_k_what_is_beyond_the_borders_counts_for_nothing(beta):
    x = maps((1, 20, 4, 3))
    x[:, 0] = x[:, -2:] = 0
    assert_right(x, (5, 0.5, beta, 0.0))


@pytest.mark.parametrize("at", [0, 7, 8, 19])
def test_nan_reaches_its_windows_alone(at):
    x = maps((1, 20, 4, 3))
    x[:, at] = torch.nan
    wide = x.double().requires_grad_()
    right = F.local_response_norm(wide, 4, 0.5, 0.75, 1.0)
    y = ours(x.requires_grad_(), 4, 0.5, 0.75, 1.0)
    assert torch.equal(y.isnan(), right.isnan())
    found, exact = (torch.autograd.grad(out.sum(), leaf)[0] for out, leaf in ((y, x), (right, wide)))
    assert torch.equal(found.isnan(), exact.isnan())


def test_the_same_every_time_and_in_any_layout():
    x = maps((2, 20, 6, 5)).requires_grad_()
    plain = x.detach().contiguous().requires_grad_()
    grad = torch.randn(2, 20, 1, 1, device=DEVICE).expand(x.shape)
    runs = [torch.autograd.grad(ours(leaf, 5, 0.5, 0.75, 1.0), leaf, grad)[0] for leaf in (x, x, plain)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_the_result_may_be_changed_in_place():
    x = maps((2, 8, 6, 6)).requires_grad_()
    y = ours(x, 5, 0.5, 0.75, 1.0)
    assert not y._is_view()
    found = torch.autograd.grad(F.relu_(y).square().sum(), x)[0]
    right = torch.autograd.grad(F.relu(F.local_response_norm(x, 5, 0.5)).square().sum(), x)[0]
    assert torch.allclose(found, right, atol=1e-5)


def test_operators_are_well_formed():
    x = maps((1, 4, 5, 6)).requires_grad_()
    options = (5, 0.5, 0.75, 1.0)
    assert_well_formed(ours, (x, *options), gradients=True)
    arguments = (torch.ones_like(x), x.detach(), *options)
    assert_well_formed(response_norm.local_response_norm_backward, arguments, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_googlenet_norms_its_responses_by_the_kernels(dtype):
    torch.manual_seed(0)
    stem, x = create_model("googlenet-lr", width=0.25).stem.to(DEVICE), torch.randn(2, 3, 32, 30, device=DEVICE)
    stem.lrn1.alpha = stem.lrn2.alpha = 0.5  # so that they do something to the responses of an untrained network
    right, twin = copy.deepcopy(stem).double(), fuse(stem)
    assert sum(isinstance(layer, FusedResponseNorm) for layer in twin.modules()) == 2
    assert not any(isinstance(layer, nn.LocalResponseNorm) for layer in twin.modules())
    found = {}
    for way, net, shown in (("on", twin, x), ("off", stem, x), ("exact", right, x.double())):
        autocast = torch.autocast(DEVICE, dtype=dtype, enabled=dtype != torch.float32 and way != "exact")
        with forced("off" if way == "exact" else way), autocast:
            y = net(shown)
        leaves = list(right.parameters() if way == "exact" else stem.parameters())
        found[way] = [y.detach(), *torch.autograd.grad(y.sum(), leaves)]
    assert found["on"][0].dtype == dtype
    # Rounded values win other windows of a pool, whose gradient then goes elsewhere: torch's own error is the
    # measure of what is to be expected. On a GPU torch rounds less: under autocast it norms and pools in float32,
    # and its small convs leave float32 as it is where the kernels' multiply in TF32.
    sure = 0.05 if DEVICE == "cuda" else 1e-5
    for found_here, by_torch, exact in zip(*found.values(), strict=True):
        expected = torch.linalg.vector_norm(by_torch - exact)
        limit = 3 * expected + sure * torch.linalg.vector_norm(exact)
        assert torch.linalg.vector_norm(found_here - exact) <= limit


def test_torch_runs_where_the_kernels_are_off_or_cannot():
    layer, x = nn.LocalResponseNorm(5, alpha=0.5, k=2), torch.randn(2, 8, 3, 4, device=DEVICE)
    twin = fuse(layer)
    assert isinstance(twin, FusedResponseNorm)
    with forced("off"):
        assert torch.equal(twin(x), layer(x))
    with forced("on"):
        assert "lowrank" in str(twin(x.clone().requires_grad_()).grad_fn)
        assert torch.equal(twin(x.double()), layer(x.double()))
        assert torch.equal(twin(x[0]), layer(x[0]))
