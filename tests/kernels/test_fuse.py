"""A fused copy computes what the model computes, forward and backward, on the same parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.fuse import FusedComposite, freeze, fuse
from lowrank_cnn.kernels.pack import pack_rows
from lowrank_cnn.layers import build_conv


def network(scheme):
    return nn.Sequential(
        build_conv(3, 8, 3, scheme), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True),
        nn.Sequential(build_conv(8, 16, 3, scheme), nn.ReLU(), nn.MaxPool2d(3, 2)),
        nn.Conv2d(16, 8, 3, groups=2), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["dense", "lr", "lr-join", "separable"])
def test_the_copy_computes_the_same(scheme):
    model, x = network(scheme).double(), torch.randn(2, 3, 15, 14, dtype=torch.float64)
    exact = model(x)
    twin = fuse(model)
    assert torch.allclose(twin(x), exact)
    grads = torch.autograd.grad(exact.square().sum(), list(model.parameters()))
    twin(x).square().sum().backward()
    assert all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_relu_and_pool_are_taken_in():
    twin = fuse(network("lr"))
    first, second = (layer for layer in twin.modules() if isinstance(layer, FusedComposite))
    assert (first.relu, first.pool) == (True, "ceil")
    assert (second.relu, second.pool) == (True, None)
    assert not any(isinstance(layer, nn.ReLU) for layer in twin.modules())


def test_the_model_is_left_alone_and_shares_its_parameters():
    model = network("lr-join")
    before = list(model.state_dict())
    twin = fuse(model)
    assert list(model.state_dict()) == before
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}


def test_fused_kernels_in_a_network():
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = network("lr").to(device), torch.randn(1, 3, 14, 14, device=device)
    exact = model.double()(x.double())
    model.float()
    with forced("on"):
        y = fuse(model)(x)
    assert torch.linalg.vector_norm(y - exact) <= 5e-3 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("scheme", ["lr", "lr-join"])
def test_frozen_weights_are_packed_once_for_all(scheme):
    model, x = network(scheme).double(), torch.randn(1, 3, 14, 14, dtype=torch.float64)
    exact = model(x)
    twin = freeze(model)
    for layer in twin.modules():
        if isinstance(layer, FusedComposite):
            packed = pack_rows(list(layer.weights), torch.float64)
            assert packed.data_ptr() == layer.weights[0].data_ptr()
            assert not any(weight.requires_grad for weight in layer.weights)
    assert torch.allclose(twin(x), exact)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert torch.allclose(twin(x), exact)
