"""CP forms of trained filters: what they compute, what they cost, and where `decompose` takes them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.core.notes import notes
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.rewrite import replacement
from lowrank_cnn.method.schemes import FactoredConv2d, build_conv, parse_scheme


def low_rank(filters: int, channels: int, kernel: int, rank: int) -> torch.Tensor:
    """A weight of a few components, with a little noise."""
    numbers = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, rank, generator=numbers).double() for size in (filters, channels, kernel, kernel)]
    weight = torch.einsum("dm,cm,hm,wm->dchw", *parts)
    noise = torch.randn(weight.shape, generator=numbers, dtype=torch.float64)
    return weight / weight.std() + 0.01 * noise


def trained(rank: int = 3, kernel: int = 3, **options) -> nn.Conv2d:
    conv = nn.Conv2d(12, 16, kernel, **options).double()
    with torch.no_grad():
        conv.weight.copy_(low_rank(16, 12, kernel, rank))
    return conv


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize(
    "options", [{}, {"padding": 1}, {"stride": 2, "padding": (2, 1)}, {"dilation": (2, 1), "stride": (1, 3)}]
)
def test_a_form_is_the_dense_conv_of_its_weight(options, padding_mode):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (3, 5), padding_mode=padding_mode, **options).double()
    layer = replacement(conv, parse_scheme("cp(m=7)"))
    assert [name for name, _ in layer.named_children()] == ["reduce", "upright", "lying", "join"]
    conv.weight.data.copy_(layer.weight)
    conv.bias.data.copy_(layer[-1].bias)
    x = torch.randn(2, 4, 11, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), conv(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, (1, 2)])
def test_its_cost_is_what_counting_finds(stride):
    conv, scheme = nn.Conv2d(12, 16, 3, stride=stride, padding=1), parse_scheme("cp(m=5)")
    layer = replacement(conv, scheme)
    pixels = count(conv, (12, 8, 8)).macs // conv.weight.numel()
    assert count(layer, (12, 8, 8)).macs == pixels * scheme.macs(conv)
    weights = sum(stage.weight.numel() for stage in layer)
    assert sum(scheme.stage_weights(conv)) == weights


def test_the_factors_find_the_components():
    pytest.importorskip("tensorly")
    from lowrank_cnn.method.factorize import cp_factors

    weight = low_rank(16, 12, 3, rank=3)
    found = cp_factors(weight, 3)
    assert found is not None
    assert found.energy > 0.999
    dense = torch.einsum("dm,mchw->dchw", found.join[:, :, 0, 0], found.reduce * found.upright * found.lying)
    lost = float((dense - weight).square().sum() / weight.square().sum())
    assert lost == pytest.approx(1 - found.energy, abs=1e-9)
    sizes = [part.flatten(1).norm(dim=1) for part in found[:3]]
    assert all(torch.allclose(size, sizes[0]) for size in sizes)  # shared evenly


def test_decompose_merge_export_and_load(tmp_path):
    pytest.importorskip("tensorly")
    net = nn.Sequential(trained(padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1).double()).eval()
    new = decompose(net, "cp(m=4)").eval()
    (row,) = notes(new).decomposition
    assert row.energy > 0.99
    assert isinstance(new[0], FactoredConv2d)
    x = torch.randn(2, 12, 9, 9, dtype=torch.float64)
    right = F.conv2d(x, new[0].weight, net[0].bias, padding=1)
    torch.testing.assert_close(new[0](x), right, rtol=1e-10, atol=1e-10)
    merged = lr.merge(new, chains=True, example_input=x)
    assert type(merged[0]) is nn.Conv2d
    torch.testing.assert_close(merged(x), new(x), rtol=1e-10, atol=1e-10)
    assert count(new, (12, 9, 9)).macs < count(net, (12, 9, 9)).macs
    lr.export(new, tmp_path / "net.safetensors")
    again = lr.load(tmp_path / "net.safetensors", into=net)
    torch.testing.assert_close(again(x), new(x))
    lr.export(new.float(), tmp_path / "net.onnx", example_input=x.float())


def test_under_a_budget_the_better_fit_is_taken():
    pytest.importorskip("tensorly")
    net = nn.Sequential(trained(rank=10, padding=1), nn.ReLU(), nn.Conv2d(16, 12, 3, padding=1).double())
    new = decompose(net, "cp", macs=0.3, input_size=(12, 8, 8))
    assert count(new, (12, 8, 8)).macs <= 0.3 * count(net, (12, 8, 8)).macs
    plain = decompose(net, "separable", macs=0.3, input_size=(12, 8, 8))
    ours, theirs = ({row.name: row.energy for row in notes(m).decomposition} for m in (new, plain))
    assert new[0].scheme.name == "cp"
    assert all(ours[name] >= theirs[name] for name in theirs)
    assert ours["0"] > theirs["0"]
    loose = decompose(net, "cp", macs=0.8, input_size=(12, 8, 8))
    assert {part.scheme.name for part in loose.modules() if isinstance(part, FactoredConv2d)} == {"separable"}


def test_images_refit_the_last_layer():
    pytest.importorskip("tensorly")
    net = nn.Sequential(trained(rank=6, padding=1), nn.ReLU()).eval()
    images = torch.randn(8, 12, 8, 8, dtype=torch.float64)
    blind, seeing = decompose(net, "cp(m=4)"), decompose(net, "cp(m=4)", images=images)
    right = net(images)
    errors = [float((made(images) - right).square().sum().detach()) for made in (blind, seeing)]
    assert errors[1] < errors[0]


def test_channel_groups_are_left_alone_or_refused():
    with pytest.raises(LowRankError, match="without channel groups"):
        build_conv(8, 8, 3, "cp", channel_groups=2)
    with pytest.raises(LowRankError, match="channel groups: the scheme separable takes it"):
        lr.convert(nn.Sequential(nn.Conv2d(8, 8, 3, groups=2)), "cp", where="0")


def test_without_tensorly_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorly", None)
    with pytest.raises(MissingExtra, match=r"\.\[cp\]"):
        decompose(nn.Sequential(nn.Conv2d(8, 8, 3)), "cp(m=2)")
