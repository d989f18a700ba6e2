"""Norms and pools by the kernels between convs, against torch's own in float64: results, gradients, operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("triton")

from lowrank_cnn.kernels.between import batch_statistics, normalise
from lowrank_cnn.kernels.between.batch_statistics import batch_norm_statistics, batch_norm_track
from lowrank_cnn.kernels.between.normalise import TwiceRead, batch_norm_activation, batch_norm_activation_backward
from lowrank_cnn.kernels.between.normalise_pool import batch_norm_relu_pool, batch_norm_relu_pool_backward
from lowrank_cnn.kernels.between.pool import max_pool2d, max_pool2d_backward
from lowrank_cnn.kernels.between.response_norm import local_response_norm, local_response_norm_backward
from lowrank_cnn.kernels.problem import ACTIVATIONS
from tests.kernels.helpers import DEVICE, assert_close, assert_well_formed, channels_last

EPS, SLOPE = 1e-5, 0.1
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPES, SEEDS = st.sampled_from(list(ROUNDING)), st.integers(0, 99)
SIZES = st.tuples(
    st.integers(1, 2), st.sampled_from([1, 3, 20, 64, 96, 130]), st.integers(2, 7), st.integers(1, 5)
)
STEM = [[3, 3], [2, 2], [1, 1], False]


def maps(size, dtype=torch.float32, seed=0):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5
    return channels_last(x.to(DEVICE, dtype))


def whole(size, seed=0):
    """Few whole numbers: sums of them are exact in any order and type."""
    return torch.randint(-3, 4, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def apart(size, seed=0):
    """Maps with no two values of a channel within rounding of each other, so that one wins each window.

    The positive ones are scaled, so that the mean is none of them: normalised, it would lie on the ReLU's kink.
    """
    draw, pixels = torch.Generator().manual_seed(seed), size[0] * size[2] * size[3]
    values = torch.stack([torch.randperm(pixels, generator=draw) for _ in range(size[1])], -1) / pixels * 4 - 2
    values = torch.where(values > 0, 0.9 * values, values).view(size[0], size[2], size[3], size[1])
    return channels_last(values.permute(0, 3, 1, 2).to(DEVICE))


def affine(channels, present=True):
    """Weights of both signs."""
    if not present:
        return None, None
    weight = torch.linspace(-1.5, 1, channels, device=DEVICE) + 0.01
    return weight.requires_grad_(), torch.linspace(1, -0.5, channels, device=DEVICE).requires_grad_()


def doubled(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def assert_gradients(y, tensors, right, wide, grad, limit):
    leaves, doubles = ([t for t in given_ if t is not None] for given_ in (tensors, wide))
    exact = torch.autograd.grad(right, doubles, grad.double())
    for found, wanted in zip(torch.autograd.grad(y, leaves, grad), exact, strict=True):
        assert_close(found, wanted, limit)


def statistics(x):
    return batch_norm_statistics(x.detach(), None, None, None, 0.1, EPS)


def normed(x, weight, bias, residual, activation, add_last=False):
    return batch_norm_activation(x, *statistics(x), weight, bias, residual, activation, SLOPE, add_last)


def normed_by_torch(x, weight, bias, residual, activation, add_last=False):
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    y = y if residual is None or add_last else y + residual
    if activation:
        y = F.leaky_relu(y, SLOPE) if activation == "leaky_relu" else getattr(F, activation)(y)
    return y + residual if add_last and residual is not None else y


@pytest.mark.parametrize("values", [256, 4096])
@pytest.mark.parametrize("far", [0, 1000])
def test_a_mean_far_from_zero_cancels_nothing_in_many_shares(monkeypatch, values, far):
    monkeypatch.setattr(batch_statistics, "VALUES", values)
    x = maps((4, 32, 17, 16), seed=3) + 2 * far
    x[0] += 3  # the first pixels of all are not like the rest
    variance, centre = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    mean, rstd = statistics(x)
    assert torch.allclose(mean.double(), centre, rtol=1e-6, atol=0)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=2e-8 * far + 1e-6, atol=0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics(momentum, known):
    x, tracked = maps((2, 24, 5, 7), torch.bfloat16), torch.tensor(6, device=DEVICE)
    mean, var = torch.randn(24, device=DEVICE), torch.rand(24, device=DEVICE) + 0.5
    right_mean, right_var = mean.double(), var.double()
    F.batch_norm(x.double(), right_mean, right_var, training=True, momentum=momentum)
    variance, centre = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    if known:
        rstd = batch_norm_track(centre.float(), variance.float(), mean, var, tracked, 70, momentum, EPS)
    else:
        _, rstd = batch_norm_statistics(x, mean, var, tracked, momentum, EPS)
    assert torch.allclose(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-6, atol=0)
    assert torch.allclose(mean.double(), right_mean, atol=1e-6)
    assert torch.allclose(var.double(), right_var, atol=1e-6)
    assert tracked.item() == 7


@given(
    SIZES,
    DTYPES,
    st.sampled_from(("", *ACTIVATIONS)),
    st.booleans(),
    st.sampled_from([None, "before", "after"]),
    SEEDS,
)
@settings(max_examples=8)
def test_norm_residual_and_activation(size, dtype, activation, with_affine, added, seed):
    x = maps(size, dtype, seed).requires_grad_()
    residual = maps(size, dtype, seed + 2).requires_grad_() if added else None
    tensors, last = (x, *affine(size[1], with_affine), residual), added == "after"
    wide = doubled(*tensors)
    y, right = normed(*tensors, activation, last), normed_by_torch(*wide, activation, last)
    assert y.dtype == dtype
    assert_close(y, right, ROUNDING[dtype])
    # A value within rounding of a kink has one slope or the other; its gradient is left out.
    before = normed_by_torch(*(wide[:3] if last else wide)[:3], None if last else wide[3], "").detach()
    kinks = {"relu": (0,), "leaky_relu": (0,), "hardswish": (-3, 3)}.get(activation, ())
    clear = torch.stack([(before - at).abs() > 0.05 for at in kinks] or [before == before]).all(0)
    # Two pixels normalise to 1 and -1 whatever they are: their gradient is what rounding leaves of zero.
    if size[0] * size[2] * size[3] >= 8:
        assert_gradients(y, tensors, right, wide, maps(size, dtype, seed + 1) * clear, 20 * ROUNDING[dtype])


@pytest.mark.parametrize(("with_residual", "last"), [(False, False), (True, False), (True, True)])
def test_two_readers_give_their_gradients_apart(monkeypatch, with_residual, last):
    for module in (normalise, batch_statistics):
        monkeypatch.setattr(module, "VALUES", 256)  # many shares and turns
    size = (2, 20, 5, 4)
    residual = maps(size, seed=2).requires_grad_() if with_residual else None
    tensors = (maps(size).requires_grad_(), *affine(20), residual)
    wide = doubled(*tensors)
    right = normed_by_torch(*wide, "relu", last)
    options = (*statistics(tensors[0]), *tensors[1:], "relu", SLOPE, last)
    one, other = TwiceRead.apply(tensors[0], *options)
    assert torch.equal(one, other)
    first, second = (maps(size, seed=seed) for seed in (3, 4))
    leaves, doubles = ([t for t in given_ if t is not None] for given_ in (tensors, wide))
    exact = torch.autograd.grad((right * (first + second).double()).sum(), doubles)
    found = torch.autograd.grad((one * first + other * second).sum(), leaves)
    for ours, wanted in zip(found, exact, strict=True):
        assert_close(ours, wanted, 5e-6)
    alone = TwiceRead.apply(tensors[0], *options)[1]  # one of two readers may have no gradient
    right = normed_by_torch(*wide, "relu", last)
    assert_gradients(alone, tensors, right, wide, first, 5e-6)


@st.composite
def pools(draw, largest=5):
    kernel = [draw(st.integers(1, largest)), draw(st.integers(1, largest))]
    stride = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    padding = [draw(st.integers(0, side // 2)) for side in kernel]
    size = [draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 20, 32, 40]))]
    size += [draw(st.integers(max(3, k - 2 * p), 9)) for k, p in zip(kernel, padding, strict=True)]
    return tuple(size), [kernel, stride, padding, draw(st.booleans())]


def pooled_by_torch(x, pool):
    return F.max_pool2d(x, *pool[:3], ceil_mode=pool[3])


LARGE = ((1, 5, 17, 16), [[15, 15], [7, 7], [1, 1], True])


@given(pools(), DTYPES, st.booleans(), SEEDS)
@example(LARGE, torch.float16, False, 0)
@settings(max_examples=5)
def test_max_pool(case, dtype, ties, seed):
    size, pool = case
    x = whole(size, seed) if ties else maps(size, seed=seed)
    x = channels_last(x.to(dtype)).requires_grad_()
    y, right = max_pool2d(x, *pool, True)[0], pooled_by_torch(x.double(), pool)
    assert torch.equal(y.double(), right)
    grad = whole(y.shape, seed)
    assert torch.equal(*(torch.autograd.grad(out, x, grad.to(out.dtype))[0] for out in (y, right)))


@given(pools(4) | st.just(((2, 24, 13, 12), STEM)), st.sampled_from([torch.float32, torch.float16]), SEEDS)
@settings(max_examples=5)
def test_norm_relu_and_pool(case, dtype, seed):
    size, pool = case
    x = apart(size, seed).to(dtype).requires_grad_()
    tensors = (x, *affine(size[1], seed % 3 > 0))
    wide = doubled(*tensors)
    y = batch_norm_relu_pool(x, *statistics(x), *tensors[1:], *pool, True)[0]
    right = pooled_by_torch(normed_by_torch(*wide, None, "relu"), pool)
    assert_close(y, right, ROUNDING[dtype])
    if dtype == torch.float32:  # rounded values may win other windows
        clear = (right > 1e-4) | (right == 0)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * clear
        assert_gradients(y, tensors, right, wide, grad, 2e-5)


RESPONSES = st.tuples(
    st.integers(1, 40),
    st.sampled_from([1e-4, 0.3, 2.0]),
    st.sampled_from([0.5, 0.75, 1.3]),
    st.sampled_from([0.5, 1.0, 2.0]),
)


@given(SIZES, RESPONSES, DTYPES, SEEDS)
@settings(max_examples=4)
def test_response_norm(size, options, dtype, seed):
    x = maps(size, dtype, seed).requires_grad_()
    wide = doubled(x)
    y, right = local_response_norm(x, *options), F.local_response_norm(*wide, *options)
    assert y.dtype == dtype
    assert_close(y, right, ROUNDING[dtype])
    assert_gradients(y, [x], right, wide, maps(size, dtype, seed + 1), 2 * ROUNDING[dtype])


@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of the interpreter
def test_without_k_windows_beyond_the_borders_count_for_nothing(beta):
    x = maps((1, 20, 4, 3))
    x[:, 0] = x[:, -2:] = 0
    wide, x = doubled(x), x.requires_grad_()
    y, right = local_response_norm(x, 5, 0.5, beta, 0.0), F.local_response_norm(*wide, 5, 0.5, beta, 0.0)
    assert_close(y, right, 2e-6)
    assert_gradients(y, [x], right, wide, maps(x.shape, seed=1), 4e-6)


OPERATORS = {
    "norm": (
        lambda x: normed(x, None, None, None, ""), lambda x: normed_by_torch(x, None, None, None, ""),
    ),
    "pool": (lambda x: max_pool2d(x, *STEM, True)[0], lambda x: pooled_by_torch(x, STEM)),
    "norm and pool": (
        lambda x: batch_norm_relu_pool(x, *statistics(x), None, None, *STEM, True)[0],
        lambda x: pooled_by_torch(normed_by_torch(x, None, None, None, "relu"), STEM),
    ),
    "response norm": (
        lambda x: local_response_norm(x, 4, 0.5, 0.75, 1.0), lambda x: F.local_response_norm(x, 4, 0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_every_time_in_any_layout_and_open_to_changes_in_place(name):
    ours, torchs = OPERATORS[name]
    x = apart((2, 20, 6, 5)).requires_grad_()
    plain, runs = x.detach().contiguous().requires_grad_(), []
    for leaf in (x, x, plain):
        y = ours(leaf)
        assert not y._is_view()
        assert y.is_contiguous(memory_format=torch.channels_last)
        grad = torch.linspace(-1, 1, 40, device=DEVICE).view(2, 20, 1, 1).expand_as(y)
        runs.append(torch.autograd.grad(F.relu_(y) if name != "norm and pool" else y, leaf, grad)[0])
    assert all(torch.equal(runs[0], again) for again in runs[1:])
    wide = x.detach().double().requires_grad_()
    assert_close(runs[0], torch.autograd.grad(F.relu(torchs(wide)), wide, grad.double())[0], 2e-5)


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_stays_and_spreads_as_in_torch(name):
    ours, torchs = OPERATORS[name]
    x = apart((1, 20, 6, 6)).cpu()  # on a GPU, torch's gradient of a pool at a NaN goes elsewhere
    x[0, 7, 2, 2] = torch.nan
    x[0, 12] = 3.0 if "norm" in name else -torch.inf
    here = x.to(DEVICE).requires_grad_()
    y, right = ours(here), torchs(x.requires_grad_())
    assert torch.equal(y.isnan().cpu(), right.isnan())
    if name in ("pool", "response norm"):
        found, exact = (torch.autograd.grad(out.sum(), leaf)[0] for out, leaf in ((y, here), (right, x)))
        assert torch.equal(found.isnan().cpu(), exact.isnan())


def test_nothing_is_kept_without_a_gradient():
    x = maps((1, 4, 8, 8))
    assert max_pool2d(x, *STEM, False)[1].numel() == 0
    assert [t.numel() for t in batch_norm_relu_pool(x, *statistics(x), None, None, *STEM, False)[1:]] == [0, 0]


def test_operators_are_well_formed():
    x, (weight, bias) = maps((2, 4, 7, 6)), affine(4)
    (mean, rstd), plain, options = statistics(x), [weight.detach(), bias.detach()], (5, 0.5, 0.75, 1.0)
    running = (torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE), torch.tensor(0, device=DEVICE))
    assert_well_formed(batch_norm_statistics, (x, *running, 0.1, EPS), gradients=False)
    assert_well_formed(batch_norm_track, (mean, rstd, *running, 60, 0.1, EPS), gradients=False)
    leaf = maps((2, 4, 7, 6), seed=1).requires_grad_()
    for residual, last in ((None, False), (x, True)):
        arguments = (leaf, mean, rstd, weight, bias, residual, "relu", 0.0, last)
        assert_well_formed(batch_norm_activation, arguments, gradients=True)
        arguments = (x, residual, x, mean, rstd, *plain, residual, "relu", 0.0)
        assert_well_formed(batch_norm_activation_backward, arguments, gradients=False)
    pool = [[3, 3], [2, 2], [1, 0], True]
    assert_well_formed(batch_norm_relu_pool, (leaf, mean, rstd, weight, bias, *pool, True), gradients=True)
    y, *seen = (t.detach() for t in batch_norm_relu_pool(leaf, mean, rstd, weight, bias, *pool, True))
    arguments = (y, *seen, x, mean, rstd, plain[0], *pool[:3])
    assert_well_formed(batch_norm_relu_pool_backward, arguments, gradients=False)
    assert_well_formed(max_pool2d, (leaf, *pool, True), gradients=True)
    y, codes = (t.detach() for t in max_pool2d(leaf, *pool, True))
    assert_well_formed(max_pool2d_backward, (y, codes, [7, 6], *pool[:3]), gradients=False)
    assert_well_formed(local_response_norm, (leaf, *options), gradients=True)
    assert_well_formed(local_response_norm_backward, (x, x, *options), gradients=False)
