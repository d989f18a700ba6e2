"""What the batch norm kernels share, each step in a kernel of its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lowrank_cnn.kernels.between.batch_statistics import activated, affine, of_channels, times_slope
from lowrank_cnn.kernels.problem import ACTIVATIONS, activate, parsed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def forward_and_slope(x, y, g, slope, ACTIVATION: tl.constexpr):
    lane = tl.arange(0, 64)
    z = tl.load(x + lane)
    tl.store(y + lane, activated(z, slope, ACTIVATION))
    tl.store(g + lane, times_slope(tl.full((64,), 1.0, tl.float32), z, slope, ACTIVATION))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
def test_activations_and_their_slopes_are_those_of_torch(activation):
    x = torch.linspace(-6, 6, 64, device=DEVICE)
    y, g = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    name, slope = parsed(activation)
    forward_and_slope[(1,)](x, y, g, slope, ACTIVATION=name)
    exact = x.double().requires_grad_()
    right = activate(exact, activation)
    assert torch.allclose(y.double(), right, atol=2e-6)
    assert torch.allclose(g.double(), torch.autograd.grad(right.sum(), exact)[0], atol=2e-6)


@triton.jit
def load_all(mean, rstd, weight, bias, out, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    m, r, w, b = of_channels(mean, rstd, weight, bias, tl.arange(0, 16), 12, WEIGHT, BIAS)
    place = tl.arange(0, 16)[None, :]
    tl.store(out + place, m * 1000 + r * 100 + w * 10 + b)


@pytest.mark.parametrize("given", [True, False])
def test_a_missing_weight_is_one_and_a_missing_bias_zero(given):
    ones, out = torch.ones(12, device=DEVICE), torch.empty(16, device=DEVICE)
    pointers = affine(ones, 2 * ones, 3 * ones if given else None, 4 * ones if given else None)
    load_all[(1,)](*pointers, out, WEIGHT=given, BIAS=given)
    assert out[:12].eq(1234 if given else 1210).all()
