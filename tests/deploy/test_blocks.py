"""Blocks, and the ways to run them: each gives what the block as given does, in float64."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.deploy import blocks
from lowrank_cnn.deploy.blocks import (
    CANDIDATES,
    BandsBlock,
    Block,
    BlockAsGiven,
    Epilogue,
    ForCalls,
    FusedBlock,
    StripConv2d,
    as_network,
    groups_apart,
    in_blocks,
    in_layers,
)
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.strips import available
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


SCALES = {
    "reshaped": lambda y, scale: y.mul(scale.reshape(1, -1, 1, 1)),
    "indexed, on the left": lambda y, scale: scale[:, None, None] * y,
    "a number": lambda y, scale: 0.17 * y,
    "in place": lambda y, scale: y.mul_(scale.view(-1, 1, 1)),
}
"""How a forward may multiply each channel of a layer's result."""
OTHERS = {
    "by what was computed": lambda y, scale: y * scale.mean(),
    "along another axis": lambda y, scale: y * scale.reshape(1, 1, -1, 1),
}


@pytest.mark.parametrize("how", [*SCALES, *OTHERS])
@pytest.mark.parametrize("scheme", ["dense", "lr", "lr-join"])
def test_a_layer_scale_becomes_part_of_the_layer_before_it(how: str, scheme: str):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = build_conv(8, 8, 3, scheme, padding=1), nn.Parameter(torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (SCALES | OTHERS)[how](self.conv(x), self.scale)

    net = nn.Sequential(nn.Conv2d(3, 8, 1), Scaled()).double().eval()
    given, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8).double()
    network, found, _ = in_blocks(net, x)
    assert found["1.conv"].epilogue.adds == (how in SCALES)
    torch.testing.assert_close(network(x), given(x))
    torch.testing.assert_close(net.state_dict(), given.state_dict())


@pytest.mark.parametrize("scheme", ["dense", "bands", "lr"])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("added", [None, "of its size", "of one pixel"])
@pytest.mark.parametrize("last", [True, False])
def test_a_depthwise_layer_takes_what_follows_it(scheme: str, activation: str | None, added, last: bool):
    pytest.importorskip("triton")
    from lowrank_cnn.kernels.depthwise import ops

    layer = build_conv(16, 16, 3, scheme, padding=1, channel_groups=16).eval().requires_grad_(False)
    epilogue = Epilogue(activation, None, added is not None, last)
    x, residual = torch.randn(2, 16, 6, 5), torch.randn(2, 16, *((6, 5) if added == "of its size" else (1, 1)))
    given = (x,) if added is None else (x, residual)
    block = BandsBlock.of(layer, epilogue)
    assert block is not None
    with forced("on"), mock.patch.object(ops, "depthwise_conv2d", wraps=ops.depthwise_conv2d) as ran:
        found = block(*given)
    right = BlockAsGiven(copy.deepcopy(layer).double(), epilogue)(*(each.double() for each in given))
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    in_one = added is None or (added == "of its size" and (last or activation is None))
    *_, after, named, _ = ran.call_args.args
    assert (named, after is not None) == ((activation or "", added is not None) if in_one else ("", False))
    assert BandsBlock.of(build_conv(16, 16, 3, "lr", padding=1), epilogue) is None


class ConvNeXtBlock(nn.Module):
    """As timm (`after`), transformers (`before`) and ConvNeXt V2 (`between`) write it."""

    def __init__(self, scaled: str) -> None:
        super().__init__()
        self.scaled, self.scale = scaled, nn.Parameter(torch.rand(8))
        self.depthwise, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
        self.widen, self.gelu, self.narrow = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gelu(self.widen(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        if self.scaled == "between":
            y = y + y * y.norm(dim=(1, 2), keepdim=True)
        y = self.narrow(y)
        if self.scaled == "before":
            y = self.scale * y
        y = y.permute((0, 3, 1, 2))
        return x + (y * self.scale.reshape(1, -1, 1, 1) if self.scaled == "after" else y)


@pytest.mark.parametrize("scaled", ["no", "before", "after", "between"])
@pytest.mark.parametrize("hooked", [False, True])
def test_linear_layers_over_channels_last_maps_are_pointwise_convs(scaled: str, hooked: bool):
    pytest.importorskip("triton")
    net = nn.Sequential(nn.Conv2d(3, 8, 1), ConvNeXtBlock(scaled)).double().eval()
    if hooked:
        net[1].gelu.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 3, 9, 8).double()
    with forced("on"):
        network, found, _ = in_blocks(net, x)
    names = {name: str(block.epilogue) for name, block in found.items() if name.startswith("1.")}
    pointwise = (
        {} if hooked else {"1.widen": "gelu"} if scaled == "between" else {"1.widen": "gelu", "1.narrow": "add"}
    )
    assert names == {"1.depthwise": "", **({"1.widen": ""} if hooked else pointwise)}
    torch.testing.assert_close(network(x), net(x))
    assert isinstance(net[1].widen, nn.Linear)


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
    layer = build_conv(4, 8, 3, scheme, **options).double().eval()
    adds = added is not None
    block = Block("", layer, Epilogue(activation, pool, adds, adds and last))
    x = torch.randn(2, 4, 12, 11, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(blocks, "_on_cpu", lambda _: on_cpu)
        residual = torch.randn_like(layer(x))[: 1 if added == "of one pixel" else 2]
        inputs = (x, residual[..., :1, :1] if added == "of one pixel" else residual) if adds else (x,)
        made = {name: way.eval() for name, make in CANDIDATES.items() if (way := make(block)) is not None}
        assert options or ("fused" in made) is not on_cpu
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


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(32, 8, 3, padding=1, stride=2),
        nn.Conv2d(32, 8, 3),
        nn.Conv2d(32, 8, 3, padding=1),
        nn.Conv2d(32, 8, (1, 3), padding=(0, 2), dilation=2),
        nn.Conv2d(32, 8, (3, 1), padding=(1, 0), groups=2),
        nn.Conv2d(32, 8, (3, 1), padding=(1, 0), padding_mode="reflect"),
        nn.Conv2d(32, 8, 1),
        nn.Linear(3, 3),
    ],
    ids=str,
)
def test_other_layers_are_no_strips(layer: nn.Module):
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
            fast.load_state_dict({name: 2 * tensor for name, tensor in fast.state_dict().items()})
            torch.testing.assert_close(fast(x), fast.plain()(x), rtol=0, atol=3e-5)


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
    made = CANDIDATES["compiled strips"](in_blocks(net, x)[1]["0"])
    layers = in_layers(nn.Sequential(made))
    assert not any(isinstance(part, StripConv2d) for part in layers.modules())
    torch.testing.assert_close(layers(x), net(x))


@built
def test_without_the_package_or_in_another_type_the_layer_itself_runs(monkeypatch):
    layer = build_conv(16, 8, 3, "lr").eval()
    fast, x = StripConv2d(layer, Epilogue("relu")), torch.randn(1, 16, 6, 6)
    assert copy.deepcopy(fast).double()(x.double()).dtype == torch.float64
    monkeypatch.setattr(blocks, "available", lambda _: False)
    assert torch.equal(fast(x), layer(x).relu())
    assert not StripConv2d.takes(layer)
