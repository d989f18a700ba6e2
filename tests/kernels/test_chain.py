"""A basis and its join in one launch: the same result, the same gradients, chosen by its time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels import fused_convs as chain
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.fused_convs import (
    FusedChain,
    FusedComposite,
    conv_options,
    enclosing,
    merged_bias,
    merged_weight,
)
from lowrank_cnn.method.schemes import build_conv

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def fused(layer: nn.Module, **what_follows) -> FusedChain:
    basis, join = (conv_options(part) for part in layer.children())
    assert basis is not None
    assert join is not None
    return FusedChain(FusedComposite(**basis), FusedComposite(**join, **what_follows))


@pytest.mark.parametrize(
    ("kernel", "scheme"), [(3, "lr-join"), (5, "lr-join"), (3, "mixture(kx1=3, 1xk=3, kxk=2, join)")]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_product_is_the_layer(kernel, scheme, bias, stride):
    torch.manual_seed(0)
    layer = build_conv(6, 8, kernel, scheme, stride=stride, bias=bias).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    basis, join = (conv_options(part) for part in layer.children())
    _, sides = enclosing([w.shape for w in basis["weights"]], basis["padding"])
    weight = merged_weight(basis["weights"], basis["padding"], join["weights"][0])
    dense = nn.functional.conv2d(
        nn.functional.pad(x := torch.randn(2, 6, 9, 8, dtype=torch.float64), (*sides[1], *sides[0])),
        weight,
        merged_bias(basis["bias"], join["weights"][0], join["bias"]),
        stride,
    )
    assert torch.allclose(dense, layer(x))


@pytest.mark.parametrize("pool", [None, "floor"])
@pytest.mark.parametrize("one_launch", [True, False])
def test_results_and_gradients_are_those_of_the_chain(monkeypatch, one_launch, pool):
    torch.manual_seed(0)
    layer = build_conv(8, 8, 3, "lr-join").to(DEVICE)
    twin = fused(layer, relu=True, pool=pool)
    monkeypatch.setattr(twin, "merges", lambda _: one_launch)
    x = (torch.randn(2, 8, 6, 7, device=DEVICE) * 64).round().div(64).requires_grad_()
    leaves = [x, *layer.parameters()]
    with forced("on"):
        y = twin(x)
    right = layer(x).relu()
    right = nn.functional.max_pool2d(right, 2) if pool else right
    grad = torch.randn_like(right)
    found, exact = (torch.autograd.grad(out, leaves, grad) for out in (y, right))
    for a, b in zip((y, *found), (right, *exact), strict=True):
        assert torch.linalg.vector_norm(a - b) <= (2e-2 if GPU else 1e-5) * torch.linalg.vector_norm(b)


def test_counts_decide_where_nothing_was_measured():
    """A first layer of large maps and few channels is merged, a deep one of many channels is not."""
    first = fused(build_conv(3, 64, 3, "lr-join"))
    deep = fused(build_conv(512, 512, 3, "mixture(kx1=3, 1xk=3, kxk=2, join)"))
    for layer, size, better in ((first, (256, 3, 224, 224), True), (deep, (256, 512, 14, 14), False)):
        apart, whole = layer._problems(size, torch.bfloat16)
        assert (chain._counted_ms([whole]) < chain._counted_ms(apart)) is better


def test_measured_times_decide_where_there_are_any(monkeypatch):
    layer = fused(build_conv(8, 8, 3, "lr-join").to(DEVICE))
    x = torch.randn(1, 8, 6, 6, device=DEVICE)
    with forced("on"):
        for whole, better in ((0.5, True), (3.0, False)):
            dense = layer._problems((1, 8, 6, 6), torch.float32)[1]
            monkeypatch.setattr(
                choice,
                "fastest",
                lambda problem, *_, dense=dense, whole=whole, **__: whole if problem == dense else 1.0,
            )
            assert layer.merges(x) is better
            with torch.no_grad():
                assert not layer.merges(x)


def test_what_was_measured_is_not_held_against_what_was_counted(monkeypatch):
    layer = fused(build_conv(512, 512, 3, "mixture(kx1=3, 1xk=3, kxk=2, join)").to(DEVICE))
    x = torch.empty(1, 512, 14, 14, device=DEVICE)
    dense = layer._problems((1, 512, 14, 14), torch.float32)[1]
    monkeypatch.setattr(choice, "fastest", lambda problem, *_, **__: 0.0 if problem == dense else None)
    with forced("on"):
        assert not layer.merges(x)


def test_switched_off_it_is_two_layers():
    layer = build_conv(8, 8, 3, "lr-join").to(DEVICE)
    x = torch.randn(1, 8, 6, 6, device=DEVICE)
    with forced("off"):
        assert not fused(layer).merges(x)
        assert torch.allclose(fused(layer)(x), layer(x), atol=1e-6)
