"""Batch norm, ReLU and max-pool in one step, by the kernels, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.between.batch_statistics import batch_norm_statistics
from lowrank_cnn.kernels.between.normalise_pool import batch_norm_relu_pool, batch_norm_relu_pool_backward
from tests.kernels.helpers import assert_well_formed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def ours(x, weight, bias, pool, codes=True):
    mean, rstd = batch_norm_statistics(x.detach(), None, None, None, 0.1, EPS)
    kernel, stride, padding, ceil = pool
    return batch_norm_relu_pool(
        x, mean, rstd, weight, bias, list(kernel), list(stride), list(padding), ceil, codes
    )


def exact(x, weight, bias, pool):
    kernel, stride, padding, ceil = pool
    y = F.relu(F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS))
    return F.max_pool2d(y, kernel, stride, padding, ceil_mode=ceil)


def maps(size, dtype=torch.float32, seed=0):
    """Maps in channels-last order, no two values of a channel within rounding of each other, so that one wins.

    The positive ones are scaled, so that the mean is none of them: normalised, it would lie on the ReLU's kink.
    """
    draw = torch.Generator().manual_seed(seed)
    pixels = size[0] * size[2] * size[3]
    values = torch.stack([torch.randperm(pixels, generator=draw) for _ in range(size[1])], -1) / pixels * 4 - 2
    values = torch.where(values > 0, 0.9 * values, values)
    x = values.view(size[0], size[2], size[3], size[1]).permute(0, 3, 1, 2)
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def affine(channels, present=True):
    if not present:
        return None, None
    weight = torch.linspace(-1.5, 1, channels, device=DEVICE) + 0.01
    return weight.requires_grad_(), torch.linspace(1, -0.5, channels, device=DEVICE).requires_grad_()


def close(found, right, limit):
    scale = torch.linalg.vector_norm(right).clamp(min=1e-6)
    return torch.linalg.vector_norm(found.double() - right) <= limit * scale


@st.composite
def pools(draw):
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    padding = tuple(draw(st.integers(0, side // 2)) for side in kernel)
    size = [draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 20, 32, 40]))]
    size += [draw(st.integers(max(3, k - 2 * p), 9)) for k, p in zip(kernel, padding, strict=True)]
    return tuple(size), (kernel, stride, padding, draw(st.booleans()))


STEM = ((2, 24, 13, 12), ((3, 3), (2, 2), (1, 1), False))


@given(pools() | st.just(STEM), st.booleans(), st.integers(0, 99))
@settings(max_examples=6)
def test_result_and_gradients(case, with_affine, seed):
    size, pool = case
    x = maps(size, seed=seed).requires_grad_()
    weight, bias = affine(size[1], with_affine)
    tensors = [t for t in (x, weight, bias) if t is not None]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y, right = ours(x, weight, bias, pool)[0], exact(*wide, pool)
    assert close(y, right, 2e-6)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    grad = grad * ((right > 1e-4) | (right == 0))  # near the kink either side is right
    found = torch.autograd.grad(y, tensors, grad)
    for a, b in zip(
        found, torch.autograd.grad(right, [t for t in wide if t is not None], grad.double()), strict=True
    ):
        assert close(a, b, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    size, pool = STEM
    x, (weight, bias) = maps(size, dtype).requires_grad_(), affine(24)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y, right = ours(x, weight, bias, pool)[0], exact(*wide, pool)
    assert y.dtype == dtype
    assert close(y, right, ROUNDING[dtype])
    grad = torch.ones_like(y) * (right > 0.05)
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    for a, b in zip(found, torch.autograd.grad(right, wide, grad.double()), strict=True):
        assert close(a, b, 5 * ROUNDING[dtype])


def test_nan_wins_and_what_relu_cut_gets_nothing():
    x = maps((1, 32, 6, 6))
    x[0, 1, 2, 2] = torch.nan
    bias = torch.full((32,), -100.0, device=DEVICE)
    bias[1] = 0
    y, codes, _ = ours(x.requires_grad_(), None, bias, STEM[1])
    assert y[:, 1].isnan().all()
    assert not y[:, 2:].any()
    assert (codes[..., 2:] == 255).all()
    (dx,) = torch.autograd.grad(y.nan_to_num().sum(), x)
    assert not dx[:, 2:].any()


def test_nothing_is_kept_without_a_gradient():
    _, codes, won = ours(maps(STEM[0]), None, None, STEM[1], codes=False)
    assert codes.numel() == won.numel() == 0


def test_the_same_every_time_and_in_any_layout():
    size, pool = STEM
    x, (weight, bias) = maps(size).requires_grad_(), affine(24)
    plain = x.detach().contiguous().requires_grad_()
    grad = torch.randn(2, 24, 1, 1, device=DEVICE)
    runs = []
    for given_ in (x, x, plain):
        y = ours(given_, weight, bias, pool)[0]
        runs.append(torch.autograd.grad(y, (given_, weight, bias), grad.expand_as(y)))
    for again in runs[1:]:
        assert all(map(torch.equal, runs[0], again))


def test_operators_are_well_formed():
    x, (weight, bias) = maps((1, 4, 7, 6)), affine(4)
    mean, rstd = batch_norm_statistics(x, None, None, None, 0.1, EPS)
    pool = ([3, 3], [2, 2], [1, 0], True)
    arguments = (x.requires_grad_(), mean, rstd, weight, bias, *pool, True)
    assert_well_formed(batch_norm_relu_pool, arguments, gradients=True)
    y, codes, won = (t.detach() for t in batch_norm_relu_pool(*arguments))
    arguments = (torch.ones_like(y), codes, won, x.detach(), mean, rstd, weight.detach(), *pool)
    assert_well_formed(batch_norm_relu_pool_backward, arguments, gradients=False)
