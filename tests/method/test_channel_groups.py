"""Filters that see a part of the channels, through everything that a scheme passes through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.kernels.reference import ungrouped
from lowrank_cnn.method.init import init_
from lowrank_cnn.method.layers import CompositeConv2d

TEXTS = ("lr(channel_groups=2)", "lr-join(channel_groups=2)", "mixture(kx1, 1xk, kxk=2, join, channel_groups=4)")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_read_and_printed(text: str):
    scheme = lr.parse_scheme(text)
    assert str(scheme) == text
    assert lr.parse_scheme(str(scheme)) == scheme == lr.parse_scheme(scheme.to_dict())


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


def test_an_ungrouped_weight_computes_the_same():
    weight, x = torch.randn(6, 2, 3, 3).double(), torch.randn(1, 6, 5, 5).double()
    torch.testing.assert_close(
        F.conv2d(x, ungrouped(weight, 3)), F.conv2d(x, weight, groups=3), rtol=0, atol=1e-12
    )


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


def test_half_of_the_channels_cost_half():
    conv = nn.Conv2d(16, 32, 3)
    costs = [lr.parse_scheme(text).relative_cost(conv) for text in ("lr", "lr(channel_groups=2)")]
    assert costs == pytest.approx([1 / 3, 1 / 6])


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
    assert lr.convert(grouped, "lr(channel_groups=2)")[0].channel_groups == 2  # its own, and no others
