"""Statistics of a batch by the kernels against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.between import batch_statistics as ours
from tests.kernels.helpers import assert_well_formed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def maps(size, dtype=torch.float32, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


SIZES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 3, 20, 64, 96, 130]), st.integers(2, 11), st.integers(1, 9)
)


@given(SIZES, st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.integers(0, 99))
@settings(max_examples=20)
def test_mean_and_deviation(size, dtype, seed):
    x = maps(size, dtype, seed)
    mean, rstd = ours.batch_norm_statistics(x, None, None, None, 0.1, EPS)
    variance, centre = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert torch.allclose(mean.double(), centre, rtol=1e-6, atol=1e-6)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-4, atol=0)


def test_many_shares_and_turns(monkeypatch):
    monkeypatch.setattr(ours, "VALUES", 512)
    # A GPU has many multiprocessors to share pixels out to before any takes a second turn.
    x = maps((3, 40, 13, 11) if DEVICE == "cpu" else (61, 40, 53, 51))
    pixels = x.numel() // 40
    _, block, rounds, shares = ours.split_sum(pixels, 40, x.device)
    assert rounds > 1
    assert shares > 1
    assert pixels % (block * rounds) != 0
    mean, rstd = ours.batch_norm_statistics(x, None, None, None, 0.1, EPS)
    variance, centre = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert torch.allclose(mean.double(), centre, rtol=1e-6, atol=1e-6)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("values", [256, 4096])
@pytest.mark.parametrize("far", [100, 1000])
def test_a_mean_far_from_zero_cancels_nothing(monkeypatch, values, far):
    monkeypatch.setattr(ours, "VALUES", values)
    x = maps((4, 32, 17, 16), seed=3) + 2 * far
    x[0] += 3  # the first pixels of all are not like the rest
    mean, rstd = ours.batch_norm_statistics(x, None, None, None, 0.1, EPS)
    variance, centre = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert torch.allclose(mean.double(), centre, rtol=2e-7, atol=0)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=2e-8 * far, atol=0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics(momentum, known):
    x, channels = maps((2, 24, 5, 7), torch.bfloat16), 24
    mean, var = torch.randn(channels, device=DEVICE), torch.rand(channels, device=DEVICE) + 0.5
    tracked = torch.tensor(6, device=DEVICE)
    right_mean, right_var = mean.double(), var.double()
    F.batch_norm(x.double(), right_mean, right_var, training=True, momentum=momentum)
    variance, centre = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    if known:
        rstd = ours.batch_norm_track(centre.float(), variance.float(), mean, var, tracked, 70, momentum, EPS)
    else:
        _, rstd = ours.batch_norm_statistics(x, mean, var, tracked, momentum, EPS)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-6, atol=0)
    assert torch.allclose(mean.double(), right_mean, atol=1e-6)
    assert torch.allclose(var.double(), right_var, atol=1e-6)
    assert tracked.item() == 7


def test_operators_are_well_formed():
    x = maps((2, 4, 5, 6))
    running = (torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE), torch.tensor(0, device=DEVICE))
    assert_well_formed(ours.batch_norm_statistics, (x, *running, 0.1, EPS), gradients=False)
    known = (torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE))
    assert_well_formed(ours.batch_norm_track, (*known, *running, 60, 0.1, EPS), gradients=False)
