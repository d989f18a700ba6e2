"""Blocks, and the ways to run them: each gives what the block as given does, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.deploy import block_forms
from lowrank_cnn.deploy.block_forms import (
    CANDIDATES,
    FusedBlock,
    StripConv2d,
    WinogradConv2d,
    groups_apart,
    in_layers,
)
from lowrank_cnn.deploy.blocks import Block, Epilogue, ForCalls, as_network, in_blocks
from lowrank_cnn.kernels.strips import available
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models import create_model

built = pytest.mark.skipif(not available(torch.float32), reason="lowrank-strips is not built: `make strips`")


def test_a_network_captured_for_one_size_leaves_other_sizes_to_the_original():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            y = self.conv(x) * scale
            return torch.relu(y) if y.shape[2] > 4 else y * 2

    net = Looks().eval()
    large, small = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 6, 6)
    network, _, captured = in_blocks(net, large)
    whole = as_network(network, captured, net)
    assert isinstance(whole, ForCalls)
    for x in (large, small):
        torch.testing.assert_close(whole(x), net(x))
        torch.testing.assert_close(whole(x, scale=3.0), net(x, scale=3.0))


@settings(max_examples=60)
@given(
    st.sampled_from(["dense", "lr", "lr-join", "separable", "mixture(kx1=3, 1xk=3, kxk=2, join)"]),
    st.sampled_from([{}, {}, {"stride": 2}, {"padding": 0}, {"channel_groups": 2}, {"padding_mode": "circular"}]),
    st.sampled_from([None, "relu", "leaky_relu:0.1", "silu", "gelu", "hardswish"]),
    st.sampled_from([None, nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True)]),
    st.sampled_from([None, "of its size", "of one pixel"]),
    st.booleans(),
    st.booleans(),
)
def test_every_way_gives_what_the_block_gives(scheme: str, options: dict, activation, pool, added, last, on_cpu):
    channels = 4 if options else 32  # as many as minimal filtering takes
    layer = build_conv(channels, 8, 3, scheme, **options).double().eval()
    adds = added is not None
    block = Block("", layer, Epilogue(activation, pool, adds, adds and last))
    x = torch.randn(2, channels, 12, 11, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(block_forms, "_on_cpu", lambda _: on_cpu)
        residual = torch.randn_like(layer(x))[: 1 if added == "of one pixel" else 2]
        inputs = (x, residual[..., :1, :1] if added == "of one pixel" else residual) if adds else (x,)
        made = {name: way.eval() for name, make in CANDIDATES.items() if (way := make(block)) is not None}
        assert options or {"as given", "minimal filtering" if on_cpu else "fused"} <= set(made)
        for way in made.values():
            torch.testing.assert_close(way(*inputs), made["as given"](*inputs), rtol=0, atol=1e-9)


def test_what_the_kernels_do_not_know_is_no_fused_block():
    for conv in (nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2)):
        assert FusedBlock.of(conv, Epilogue("relu")) is None
    block = FusedBlock.of(nn.Conv2d(4, 8, 3), Epilogue(adds=True))
    with pytest.raises(RuntimeError):  # a residual of another size
        block(torch.randn(1, 4, 8, 8), torch.randn(1, 8, 5, 5))


def test_groups_are_rectified_and_pooled_before_they_are_concatenated(residual: nn.Module):
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    net = create_model("vgg11-gmp-lr", width=0.05).double().eval()
    apart = groups_apart(net)
    assert not hasattr(apart.features, "pool1")
    torch.testing.assert_close(apart(image), net(image), rtol=0, atol=1e-12)
    dense = create_model("vgg11-gmp", width=0.05).eval()
    assert str(groups_apart(dense)) == str(dense)
    both, x = nn.Sequential(residual, build_conv(8, 6, 3, "lr")).eval(), torch.randn(2, 8, 6, 6)
    apart = groups_apart(both)
    torch.testing.assert_close(apart(x), both(x))
    called = [str(node.target) for node in torch.export.export(apart, (x,)).graph.nodes]
    assert called.count("aten.conv2d.default") == 4
    assert not any("split" in name for name in called)  # engines want the bias of a conv as a constant


KERNELS = st.sampled_from([(3, 1), (1, 3), (3, 3), (1, 1)])


@settings(max_examples=40)
@given(
    st.lists(st.tuples(KERNELS, st.integers(1, 4)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
    st.tuples(st.integers(1, 11), st.integers(1, 11)),
)
def test_any_composite_of_three_taps_is_what_it_was(groups, bias: bool, images: int, size):
    groups = [(*kernel, filters) for kernel, filters in groups]
    layer = CompositeConv2d(32, groups, bias=bias, dtype=torch.float64).eval()
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    if not WinogradConv2d.takes(layer):
        assert all(kernel[:2] == (1, 1) for kernel in groups)
        return
    x = torch.randn(images, 32, *size, dtype=torch.float64)
    torch.testing.assert_close(WinogradConv2d(layer)(x), layer(x), rtol=0, atol=1e-10)


def test_minimal_filtering_stays_close_in_float32_and_follows_its_weights():
    conv = nn.Conv2d(256, 64, (1, 3), padding=(0, 1))
    x = torch.randn(1, 256, 14, 14).contiguous(memory_format=torch.channels_last)
    exact = conv.double()(x.double()).detach()
    fast = WinogradConv2d(conv.float())
    assert torch.linalg.vector_norm(fast(x) - exact) < 5e-6 * torch.linalg.vector_norm(exact)
    torch.testing.assert_close(fast(x[0]), fast(x)[0])
    assert torch.equal(fast.plain()(x), conv(x))
    fast.load_state_dict({name: 2 * tensor for name, tensor in fast.state_dict().items()})
    assert torch.linalg.vector_norm(fast(x) - 2 * exact) < 1e-5 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(32, 8, 3, padding=1, stride=2),
        nn.Conv2d(32, 8, 3),
        nn.Conv2d(32, 8, 5, padding=2),
        nn.Conv2d(32, 8, (1, 3), padding=(0, 2), dilation=2),
        nn.Conv2d(32, 8, (3, 1), padding=(1, 0), groups=2),
        nn.Conv2d(32, 8, (3, 1), padding=(1, 0), padding_mode="reflect"),
        nn.Conv2d(32, 8, 1),
        nn.Linear(3, 3),
    ],
    ids=str,
)
def test_other_layers_are_not_filtered(layer: nn.Module):
    assert not WinogradConv2d.takes(layer)
    assert not StripConv2d.takes(layer)


@built
@pytest.mark.parametrize("size", [(8, 10), (7, 9)], ids=str)
@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(),
        Epilogue("relu"),
        Epilogue("relu", nn.MaxPool2d(2)),
        Epilogue("silu", nn.MaxPool2d(2, ceil_mode=True)),
        Epilogue("relu", adds=True),
        Epilogue("relu", nn.MaxPool2d(3, 2), adds=True),
    ],
    ids=str,
)
def test_compiled_strips_with_what_follows_them(epilogue: Epilogue, size):
    torch.manual_seed(0)
    layer = build_conv(20, 12, 3, "lr").eval()
    x = torch.randn(2, 20, *size).contiguous(memory_format=torch.channels_last)
    residual = torch.randn(2, 12, *size) if epilogue.adds else None
    exact = copy.deepcopy(layer).double()
    right = epilogue.in_order(exact(x.double()), None if residual is None else residual.double())
    fast = StripConv2d(layer, epilogue)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, residual).double(), right, rtol=0, atol=1e-5)
        torch.testing.assert_close(fast.plain()(x, residual).double(), right, rtol=0, atol=1e-5)
        if residual is None:
            torch.testing.assert_close(fast(x[0]), fast(x)[0])


@built
@pytest.mark.parametrize("scheme", ["lr", "lr-join", "separable"])
def test_a_plan_may_choose_strips_and_an_export_holds_layers(scheme: str):
    torch.manual_seed(0)
    net = nn.Sequential(build_conv(16, 16, 3, scheme), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 16, 8, 8)
    only = {name: CANDIDATES[name] for name in ("as given", "compiled strips")}
    planned = lr.plan(net, x, cache=False, candidates=only, repeats=3)
    (decision,) = lr.notes(planned).plan.decisions
    assert set(decision.times) == set(only)
    made = CANDIDATES["compiled strips"](in_blocks(net, x)[1][0])
    layers = in_layers(nn.Sequential(made))
    assert not any(isinstance(part, StripConv2d) for part in layers.modules())
    torch.testing.assert_close(layers(x), net(x))


@built
def test_without_the_package_or_in_another_type_the_layer_itself_runs(monkeypatch):
    layer = build_conv(16, 8, 3, "lr").eval()
    fast, x = StripConv2d(layer, Epilogue("relu")), torch.randn(1, 16, 6, 6)
    assert copy.deepcopy(fast).double()(x.double()).dtype == torch.float64
    monkeypatch.setattr(block_forms, "available", lambda _: False)
    assert torch.equal(fast(x), layer(x).relu())
    assert not StripConv2d.takes(layer)
