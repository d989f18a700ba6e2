"""Layers of every kind as factors over channels, and layers with channel groups."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.chains import FactoredLayer
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose, output_error, outputs
from lowrank_cnn.method.init import init_
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models.build import dense_cost
from lowrank_cnn.models.network_file import Stored, read_weights, write_weights

LAYERS = {
    "linear": (nn.Linear(20, 24), (3, 5, 20)),
    "1-D": (nn.Conv1d(8, 12, 5, stride=2, padding=2), (2, 8, 17)),
    "1-D in groups": (nn.Conv1d(8, 12, 5, groups=2, padding=1, padding_mode="reflect"), (2, 8, 17)),
    "3-D": (nn.Conv3d(4, 8, 3, padding=1, bias=False), (2, 4, 6, 6, 6)),
    "transposed": (nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, output_padding=1), (2, 8, 7, 7)),
    "transposed in groups": (nn.ConvTranspose2d(8, 6, 3, groups=2), (2, 8, 7, 7)),
    "1-D transposed": (nn.ConvTranspose1d(8, 6, 4, dilation=2, bias=False), (2, 8, 9)),
    "3-D transposed": (nn.ConvTranspose3d(4, 6, 3), (1, 4, 5, 5, 5)),
    "1x1": (nn.Conv2d(16, 24, 1), (2, 16, 5, 5)),
    "1xk in groups": (nn.Conv2d(8, 12, (1, 5), groups=2), (2, 8, 5, 9)),
    "3x3": (nn.Conv2d(6, 8, 3, stride=2, padding=1), (2, 6, 9, 9)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_factors_of_full_rank_are_the_layer_and_have_its_attributes(kind: str):
    layer, shape = LAYERS[kind]
    net, x = nn.Sequential(copy.deepcopy(layer)).double(), torch.randn(shape, dtype=torch.float64)
    new = decompose(net, "channel", allow_costlier=True)
    assert isinstance(new[0], FactoredConv2d if isinstance(layer, nn.Conv2d) else FactoredLayer)
    torch.testing.assert_close(new(x), net(x), rtol=1e-9, atol=1e-9)
    assert notes(new).decomposition[0].energy == pytest.approx(1)
    # Forwards read the attributes of the layer: Whisper's multiplies the strides of its convs.
    new = new[0]
    torch.testing.assert_close(new.weight, net[0].weight, rtol=1e-9, atol=1e-9)
    assert (new.bias is None) == (layer.bias is None)
    names = ["in_features", "out_features"] if kind == "linear" else ["in_channels", "out_channels", "groups"]
    names += [] if kind == "linear" else ["kernel_size", "stride", "dilation"]
    assert [getattr(new, name) for name in names] == [getattr(layer, name) for name in names]
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = new.other


@pytest.mark.parametrize("kind", LAYERS)
def test_fewer_filters_keep_less_and_images_make_good_for_some_of_it(kind: str):
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]
    net, x = nn.Sequential(copy.deepcopy(layer)).double(), torch.randn(shape, dtype=torch.float64)
    blind = decompose(net, "channel(m=2)", allow_costlier=True)
    seeing = decompose(net, "channel(m=2)", images=x, allow_costlier=True)
    errors = [output_error(outputs(new, [x]), outputs(net, [x])) for new in (blind, seeing)]
    assert 0 < errors[1] <= errors[0] < 1
    assert 0 < notes(blind).decomposition[0].energy < 1


class Speech(nn.Module):
    """1-D convs, a transposed one and a linear layer, behind one reshape of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(16, 32, 9, padding=4), nn.ReLU(), nn.ConvTranspose1d(32, 32, 4, stride=2)
        )
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(2)).mean(2))


@pytest.mark.parametrize("budget", ["macs", "params"])
def test_a_budget_is_kept_over_layers_of_every_kind(budget: str, tmp_path):
    torch.manual_seed(0)
    net, size = Speech(), (16, 1, 40)
    before = count(net, size)
    for rewrite in (convert, decompose):
        new = rewrite(net, "channel", **{budget: 0.5}, input_size=size)
        after = count(new, size)
        assert 0.35 < getattr(after, budget) / getattr(before, budget) <= 0.5
        assert dense_cost(new, size) == (before.macs, before.params)
    write_weights(tmp_path / "net.safetensors", Stored(new))
    again = read_weights(tmp_path / "net.safetensors", into=Speech()).network
    x = torch.randn(2, *size)
    torch.testing.assert_close(again(x), new(x))


def test_attention_stays():
    net = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2), "plain": nn.Linear(64, 64)})
    report = notes(convert(net, "channel(m=4)")).conversion
    assert [row.name for row in report.changed] == ["plain"]
    assert not report.kept


@pytest.mark.parametrize("kernel", [7, (3, 11)])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"bias": False, "dilation": 2}])
def test_a_large_depthwise_kernel_becomes_strips(kernel: object, options: dict):
    conv = nn.Conv2d(6, 6, kernel, padding=3, groups=6, **options).double()
    x = torch.randn(2, 6, 20, 20, dtype=torch.float64)
    exact = decompose(nn.Sequential(conv), "separable(m=66)", allow_costlier=True)  # 11 for each channel
    torch.testing.assert_close(exact(x), conv(x), rtol=1e-9, atol=1e-9)
    strips = convert(nn.Sequential(conv), "separable")
    assert sum(p.numel() for p in strips.parameters()) < sum(p.numel() for p in conv.parameters())
    assert [stage.groups for stage in strips[0]] == [6, 6]


def test_a_small_depthwise_kernel_is_rewritten_where_it_is_named():
    net = nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 8, 3))
    assert "small kernel: name it" in notes(convert(net, "separable(m=2)")).conversion.kept[0].reason
    assert [row.name for row in notes(convert(net, "separable", where="0")).conversion.changed] == ["0"]


class Scaled(nn.Conv1d):
    """Computes by a method that the forward of torch's conv calls."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, 2 * weight, bias)


class Called(nn.Linear):
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(input)


@pytest.mark.parametrize("own", [Scaled(9, 9, 3, padding=1), Called(9, 9)], ids=["conv", "linear"])
def test_a_layer_that_computes_something_of_its_own_stays(own: nn.Module):
    net, x = nn.Sequential(own, nn.Linear(9, 9)).double(), torch.randn(2, 9, 9, dtype=torch.float64)
    new = decompose(net, "channel", energy=1.0, allow_costlier=True)
    assert [row.name for row in notes(new).conversion.changed] == ["1"]
    torch.testing.assert_close(new(x), net(x), rtol=1e-9, atol=1e-9)


class Upsampler(nn.Module):
    """Tells a transposed conv how large its output is, as decoders do whose encoders halve odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x), output_size=x.shape[-2:])


@pytest.mark.parametrize("size", [8, 9])
def test_factors_of_a_transposed_conv_are_told_the_size_of_their_output(size: int):
    net, x = Upsampler().double(), torch.randn(4, 3, size, size, dtype=torch.float64)
    new = decompose(net, "channel", energy=1.0, allow_costlier=True)
    assert isinstance(new.up, FactoredLayer)
    torch.testing.assert_close(new(x), net(x), rtol=1e-9, atol=1e-9)
    script = torch.jit.script(new.up)
    torch.testing.assert_close(script(new.down(x), [size, size]), net(x), rtol=1e-9, atol=1e-9)
    seen = decompose(net, "channel(m=4)", where="up", images=x, allow_costlier=True)
    (row,) = notes(seen).decomposition
    assert output_error(outputs(seen, [x]), outputs(net, [x])) == pytest.approx(row.error, rel=1e-6)


TEXTS = ("lr(channel_groups=2)", "lr-join(channel_groups=2)", "mixture(kx1, 1xk, kxk=2, join, channel_groups=4)")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_layer_stands_for_a_dense_conv(text: str):
    layer = lr.build_conv(16, 32, 3, text, padding=1, stride=2).double()
    x = torch.randn(2, 16, 9, 9, dtype=torch.float64)
    last = layer[-1] if isinstance(layer, nn.Sequential) else layer  # a join; a basis begins without a bias
    nn.init.normal_(last.bias)
    expected = F.conv2d(x, layer.weight, last.bias, stride=2, padding=1, groups=layer.groups)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    if isinstance(layer, CompositeConv2d):
        torch.testing.assert_close(layer.dense_view()(x), expected, rtol=0, atol=1e-12)


def test_a_shuffle_lets_every_output_see_every_input_two_layers_on():
    one, two = (lr.build_conv(8, 8, 3, "lr(channel_groups=2)", padding=1, bias=False) for _ in range(2))
    seen = torch.einsum("om,mi->oi", *(layer.weight.abs().sum((2, 3)) for layer in (two, one)))
    assert bool((seen > 0).all())
    assert one.weight.abs().sum((2, 3)).gt(0).double().mean() == 0.5


@pytest.mark.parametrize("text", TEXTS)
def test_a_network_is_converted_counted_and_trained(text: str):
    dense = network()
    new = lr.convert(dense, text)
    x = torch.randn(4, 3, 12, 12)
    new(x).sum().backward()
    assert all(p.grad is not None for p in new.parameters())
    groups = lr.parse_scheme(text).channel_groups
    found = [m.channel_groups for m in new.modules() if isinstance(m, CompositeConv2d)]
    assert found[-2:] == [groups, groups]
    assert found[:-2] in ([], [1])  # the first conv sees three colours, and may stay dense
    costs = {row.name: row.macs_after / row.macs_before for row in lr.conversion_costs(dense, new, (3, 12, 12))}
    for name in ("3", "6"):
        assert costs[name] == pytest.approx(lr.parse_scheme(text).relative_cost(dense.get_submodule(name)))


@pytest.mark.parametrize("text", TEXTS)
def test_merge_and_plan_keep_what_it_computes(text: str):
    torch.manual_seed(1)
    new = init_(lr.convert(network(), text)).double()
    x = torch.randn(3, 3, 12, 12, dtype=torch.float64)
    new.train()(x)
    new.eval()
    torch.testing.assert_close(merge(new, example_input=x)(x), new(x), rtol=0, atol=1e-10)
    new, x = new.float(), x.float()
    planned = lr.plan(new, x, cache=False, repeats=3)
    torch.testing.assert_close(planned(x), new(x), rtol=1e-4, atol=1e-5)
    layer = next(m for m in new.modules() if isinstance(m, CompositeConv2d) and m.channel_groups > 1)
    assert "channel groups" in layer.explain(torch.randn(1, layer.in_channels, 6, 6))


def test_it_is_scripted_exported_and_saved(tmp_path: Path):
    new = lr.convert(network(), "lr(channel_groups=2)").eval()
    x = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(torch.jit.script(new)(x), new(x))
    exported = torch.export.export(new, (x,)).module()
    torch.testing.assert_close(exported(x), new(x))
    named = lr.create_model("nin", width=0.1, scheme="lr-join(channel_groups=2)").eval()
    named.save_pretrained(tmp_path / "saved")
    images = torch.randn(1, *named.input_size)
    torch.testing.assert_close(lr.from_pretrained(tmp_path / "saved").eval()(images), named(images))


def test_what_cannot_be_is_said():
    with pytest.raises(LowRankError, match="leave channel_groups out"):
        lr.decompose(network(), "lr-join(channel_groups=2)")
    grouped = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2))
    assert lr.convert(grouped, "lr(channel_groups=2)", where="0")[0].channel_groups == 2  # its own, and no others
