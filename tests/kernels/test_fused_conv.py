"""Fused convs compute what the convs compute; frozen ones pack their weights once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.graph.fuse import freeze
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.fused_convs import FusedChain, FusedComposite, conv_options, fused_layer, pool_name
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def network(scheme):
    return nn.Sequential(build_conv(3, 8, 3, scheme), nn.ReLU(inplace=True), nn.MaxPool2d(2, ceil_mode=True))


@pytest.mark.parametrize("scheme", ["dense", "lr", "lr-join", "separable"])
def test_a_layer_takes_activation_and_pool(scheme):
    layer, x = build_conv(3, 8, 3, scheme).double(), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    fused = fused_layer(layer, activation="silu", pool="ceil")
    assert isinstance(fused, FusedChain) is (scheme in ("lr-join", "separable"))
    assert torch.allclose(fused(x), F.max_pool2d(F.silu(layer(x)), 2, ceil_mode=True))
    assert {id(p) for p in fused.parameters()} == {id(p) for p in layer.parameters()}


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Linear(4, 4),
    ],
)
def test_what_the_kernels_cannot_run_is_refused(conv):
    assert conv_options(conv) is None
    assert fused_layer(conv) is None


@pytest.mark.parametrize(
    ("pool", "name"),
    [
        (nn.MaxPool2d(2), "floor"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil"),
        (nn.MaxPool2d(3, 2, 1), "3x3/2"),
        (nn.MaxPool2d(3, 2), None),
        (nn.MaxPool2d(2, return_indices=True), None),
        (nn.AvgPool2d(2), None),
    ],
)
def test_pools_by_name(pool, name):
    assert pool_name(pool) == name


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


def frozen_layer(groups=((3, 1, 8), (1, 3, 8)), channels=8, **options):
    layer = CompositeConv2d(channels, list(groups), **options).to(DEVICE)
    return layer, freeze(nn.Sequential(layer, nn.SiLU()))


@pytest.mark.parametrize("channels", [16, 3])
def test_frozen_weights_are_packed_once(monkeypatch, channels):
    """In the layout that the chosen kernel reads: rows for many channels, the union of taps for few."""
    from lowrank_cnn.kernels.conv import forward

    layer, net = frozen_layer(channels=channels)
    x = torch.randn(2, channels, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    made, pack = [], forward.pack_weights
    monkeypatch.setattr(forward, "pack_weights", lambda layout, *rest: made.append(layout) or pack(layout, *rest))
    with torch.no_grad(), forced("on"):
        found = [net(x) for _ in range(3)]
        right = F.silu(layer(x))
    assert made[0] == ("rows" if channels == 16 else "union")
    assert len(made) == 2  # the frozen layer's once, and the plain layer's
    assert all(torch.allclose(y, right, atol=1e-2 if GPU else 1e-5) for y in found)
    assert list(net.state_dict()) == ["0.bias", "0.weights.0", "0.weights.1"]


def test_a_frozen_layer_under_autocast_packs_in_the_type_it_computes_in():
    layer, net = frozen_layer(channels=16)
    x = torch.randn(2, 16, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), forced("on"):
        net(x)
        with torch.autocast(DEVICE, dtype=torch.float16):
            y = net(x)
        right = F.silu(layer(x))
    assert y.dtype == torch.float16
    assert torch.linalg.vector_norm(y - right) <= 1e-2 * torch.linalg.vector_norm(right)


def test_weights_loaded_into_a_frozen_layer_are_packed_again():
    (_, net), (layer, other) = frozen_layer(), frozen_layer()
    x = torch.randn(2, 8, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), forced("on"):
        net(x)
        net.load_state_dict(other.state_dict())
        assert torch.allclose(net(x), F.silu(layer(x)), atol=1e-2 if GPU else 1e-5)


@pytest.mark.parametrize("warm", [False, True])
def test_torch_compile_takes_a_frozen_layer_whole(warm):
    torch._dynamo.reset()
    layer, net = frozen_layer()
    x = torch.randn(2, 8, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    graphs = []

    def noting(graph, inputs):
        graphs.append(graph)
        return graph

    with torch.no_grad(), forced("on"):
        if warm:
            net(x)
        y = torch.compile(net, backend=noting, fullgraph=True)(x)
        assert torch.allclose(y, F.silu(layer(x)), atol=1e-2 if GPU else 1e-5)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("packed_conv2d" in name for name in called)
    assert any("pack_weights" in name for name in called) is not warm
