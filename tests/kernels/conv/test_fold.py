"""Convs over blocks of pixels: the same results and gradients, for any taps, padding, stride and size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")


from lowrank_cnn.kernels import choose, forced
from lowrank_cnn.kernels.conv import forward, gradients
from lowrank_cnn.kernels.conv.equivalent import fold_pixels, fold_weights, folded, unfold_pixels, unfold_weights
from lowrank_cnn.kernels.conv.plans import KernelPlan, plans
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import describe, empty_codes
from lowrank_cnn.kernels.reference import composite_by_torch, composite_reference

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LIMIT = 2e-3 if GPU else 1e-5


@given(
    side=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2),
    stride=st.sampled_from([(2, 2), (1, 2), (2, 1), (1, 1)]),
    channels=st.integers(1, 5),
)
def test_the_same_by_blocks(side, taps, padding, stride, channels):
    x = torch.randn(2, channels, *side, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, channels, *taps, dtype=torch.float64, requires_grad=True)
    problem = describe(x, [weight], stride=stride, padding=[padding])
    inner = folded(problem)
    if inner is None:  # whole already
        assert (stride, channels % 2) == ((1, 1), 0)
        return
    (group,) = problem.groups

    right = composite_reference(x, [weight], None, stride=stride, padding=[padding])
    grad = torch.randn_like(right)
    exact = torch.autograd.grad(right, [x, weight], grad)

    blocks = fold_pixels(x.detach(), stride).requires_grad_()
    filters = fold_weights(weight.detach(), group, stride, inner.channels).contiguous().requires_grad_()
    assert blocks.shape == (2, inner.channels, inner.height, inner.width)
    ours = composite_by_torch(blocks, [filters], None, stride=(1, 1), padding=inner.padding)
    torch.testing.assert_close(ours, right)
    dx, dw = torch.autograd.grad(ours, [blocks, filters], grad)
    torch.testing.assert_close(unfold_pixels(dx, problem), exact[0])
    torch.testing.assert_close(unfold_weights(dw, group, stride, channels), exact[1])


def test_what_is_whole_or_has_a_larger_stride_is_not_folded():
    x, weight = torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3)
    for stride in ((1, 1), (3, 3), (1, 3)):
        assert folded(describe(x, [weight], stride=stride, padding=[((1, 1), (1, 1))])) is None


CASES = [
    pytest.param((2, 3, 11, 9), [(7, 7, 16)], (2, 2), None, id="first layer of GoogLeNet"),
    pytest.param((2, 3, 8, 8), [(7, 1, 8), (1, 7, 8)], (2, 2), "floor", id="its low-rank one, pooled"),
    pytest.param((1, 3, 8, 8), [(7, 7, 16)], (1, 1), None, id="the same at stride 1"),
    pytest.param((1, 16, 7, 8), [(3, 3, 16)], (2, 2), None, id="many channels"),
    pytest.param((1, 24, 6, 6), [(3, 1, 8), (1, 3, 8)], (2, 1), "ceil", id="low-rank, ragged"),
]


def short(*shape: int) -> torch.Tensor:
    """Random numbers whose products tensor cores take exactly: rounding moves no result across ReLU's zero."""
    return torch.randn(shape, device=DEVICE).bfloat16().float()


@pytest.mark.parametrize(("size", "groups", "stride", "pool"), CASES)
def test_forward_and_gradients_against_float64(size, groups, stride, pool):
    x = short(*size).contiguous(memory_format=torch.channels_last)
    weights = [short(f, size[1], h, w).div(8) for h, w, f in groups]
    bias = short(sum(f for *_, f in groups))
    padding = [((h // 2, h // 2), (w // 2, w // 2)) for h, w, _ in groups]
    options = {"stride": stride, "padding": padding, "relu": True, "pool": pool}
    problem = describe(x, weights, **options)
    plan = KernelPlan("folded", Tile(pixels=32, filters=16, depth=16))

    exact = [tensor.double().requires_grad_() for tensor in (x, bias, *weights)]
    right = composite_reference(exact[0], exact[2:], exact[1], **options)
    grad = torch.randn_like(right)
    codes = empty_codes(problem, x)
    y = forward.run_plan(plan, problem, x, weights, bias, codes)
    seen = codes if codes is not None else y.permute(0, 2, 3, 1)
    dx, dw, db = gradients.compute_gradients(problem, grad.float(), x, weights, seen, need_input=True)
    assert dx is not None
    assert db is not None
    for ours, wanted in zip([y, dx, db, *dw], [right, *torch.autograd.grad(right, exact, grad)], strict=True):
        assert ours.shape == wanted.shape
        assert torch.linalg.vector_norm(ours - wanted) <= LIMIT * torch.linalg.vector_norm(wanted)


def test_a_stride_of_two_trains_fused():
    x, weight = torch.randn(1, 24, 6, 6, device=DEVICE), torch.randn(8, 24, 3, 3, device=DEVICE)
    with forced("on"):
        for stride, fused in (((2, 2), True), ((3, 3), False)):
            problem = describe(x, [weight], stride=stride, padding=[((1, 1), (1, 1))])
            assert choose(problem, DEVICE, training=False).fused
            assert ("folded" in {plan.kernel for plan in plans(problem)}) is fused
            choice = choose(problem, DEVICE, training=True)
            assert choice.fused is fused
            assert fused or "no gradient" in choice.why
