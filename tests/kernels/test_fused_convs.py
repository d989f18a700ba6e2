"""Fused convs compute what the convs compute; frozen ones pack weights once; a basis merges with its join."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowrank_cnn.graph.fuse import freeze
from lowrank_cnn.kernels import forced, fused_convs
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.conv.pack import pack_rows
from lowrank_cnn.kernels.fused_convs import (
    FusedChain,
    FusedComposite,
    conv_options,
    fused_layer,
    merged_bias,
    merged_weight,
    pool_name,
)
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv
from tests.kernels.helpers import DEVICE, GPU, assert_close


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


@pytest.mark.parametrize(("channels", "kernel", "layout"), [(40, "tiled", "rows"), (3, "toeplitz", "toeplitz")])
def test_frozen_weights_are_packed_once(monkeypatch, channels, kernel, layout):
    """In the layout that the chosen kernel reads: rows for many channels, a Toeplitz matrix for few."""
    from lowrank_cnn.kernels import ops

    layer, net = frozen_layer(channels=channels)
    x = torch.randn(2, channels, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    made, pack = [], ops.pack_weights
    monkeypatch.setattr(ops, "pack_weights", lambda *given: made.append(given[-1]) or pack(*given))
    with torch.no_grad(), forced("on"):
        found = [net(x) for _ in range(3)]
        right = F.silu(layer(x))
    assert made == [kernel]
    assert f"packed_{layout}_float32" in dict(net.named_modules())["0"]._buffers
    assert all(torch.allclose(y, right, atol=1e-2 if GPU else 1e-5) for y in found)
    assert list(net.state_dict()) == ["0.bias", "0.weights.0", "0.weights.1"]


def test_a_frozen_layer_under_autocast_packs_in_the_type_it_computes_in():
    layer, net = frozen_layer(channels=16)
    x = torch.randn(2, 16, 6, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), forced("on"):
        net(x)
        with torch.autocast(DEVICE.type, dtype=torch.float16):
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
    assert any("composite_conv2d" in name for name in called)
    assert any("pack_weights" in name for name in called) is not warm


def joined(layer: nn.Module, **what_follows) -> FusedChain:
    basis, join = (conv_options(part) for part in layer.children())
    return FusedChain(FusedComposite(**basis), FusedComposite(**join, **what_follows))


@pytest.mark.parametrize(
    ("kernel", "scheme"), [(3, "lr-join"), (5, "lr-join"), (3, "mixture(kx1=3, 1xk=3, kxk=2, join)")]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_basis_times_its_join_is_the_layer(kernel, scheme, bias, stride):
    layer = build_conv(6, 8, kernel, scheme, stride=stride, bias=bias).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    basis, join = (conv_options(part) for part in layer.children())
    weight, (rows, columns) = merged_weight(basis["weights"], basis["padding"], join["weights"][0])
    x, added = (
        torch.randn(2, 6, 9, 8, dtype=torch.float64),
        merged_bias(basis["bias"], join["weights"][0], join["bias"]),
    )
    assert torch.allclose(F.conv2d(F.pad(x, (*columns, *rows)), weight, added, stride), layer(x))


@pytest.mark.parametrize("pool", [None, "floor"])
@pytest.mark.parametrize("one_launch", [True, False])
def test_a_basis_and_its_join_train_in_one_launch_or_two(monkeypatch, one_launch, pool):
    pytest.importorskip("triton")
    layer = build_conv(8, 8, 3, "lr-join").to(DEVICE)
    twin = joined(layer, activation="relu", pool=pool)
    monkeypatch.setattr(twin, "merges", lambda _: one_launch)
    x = (torch.randn(2, 8, 6, 7, device=DEVICE) * 64).round().div(64).requires_grad_()
    leaves = [x, *layer.parameters()]
    with forced("on"):
        y = twin(x)
    right = F.max_pool2d(layer(x).relu(), 2) if pool else layer(x).relu()
    grad = torch.randn_like(right)
    found, exact = (torch.autograd.grad(out, leaves, grad) for out in (y, right))
    for a, b in zip((y, *found), (right, *exact), strict=True):
        assert_close(a, b, 2e-2 if GPU else 1e-5)


def test_times_decide_whether_they_merge_and_counts_where_none_were_measured(monkeypatch):
    first, deep = joined(build_conv(3, 64, 3, "lr-join")), joined(build_conv(512, 512, 3, "lr-join"))
    for layer, size, better in ((first, (256, 3, 224, 224), True), (deep, (256, 512, 14, 14), False)):
        apart, whole = layer._problems(size, torch.bfloat16)
        assert (fused_convs._counted_ms([whole]) < fused_convs._counted_ms(apart)) is better
    layer, x = joined(build_conv(8, 8, 3, "lr-join").to(DEVICE)), torch.randn(1, 8, 6, 6, device=DEVICE)
    dense = layer._problems((1, 8, 6, 6), torch.float32)[1]
    for whole, parts, better in ((0.5, 1.0, True), (3.0, 1.0, False), (0.0, None, False)):

        def fastest(problem, *_, whole=whole, parts=parts, **__):
            return whole if problem == dense else parts

        monkeypatch.setattr(choice, "fastest", fastest)
        with forced("on"):
            assert layer.merges(x) is better  # the last by counts: one time alone says nothing
            with torch.no_grad():
                assert not layer.merges(x)
        with forced("off"):
            assert not layer.merges(x)
