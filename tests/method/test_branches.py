"""Branches beside strips: folded, they are the same map, exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import note
from lowrank_cnn.method.branches import BranchedConv2d, fold_branches
from lowrank_cnn.method.layers import CompositeConv2d


def unsettled(layer: nn.Module) -> nn.Module:
    """With statistics, scales and shifts that are not the first ones."""
    draw = torch.Generator().manual_seed(0)
    for module in layer.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, least in ((module.running_mean, -1.0), (module.running_var, 0.5), (module.bias, -1.0)):
                tensor.data.copy_(torch.rand(tensor.shape, generator=draw, dtype=torch.float64) + least)
            module.weight.data.copy_(torch.rand(module.weight.shape, generator=draw, dtype=torch.float64) + 0.5)
    return layer.double().eval()


@pytest.mark.parametrize(
    ("channels", "groups", "stride"),
    [(6, [(3, 1, 3), (1, 3, 3)], 1), (4, [(5, 1, 2), (1, 5, 3), (1, 1, 3)], 1), (6, [(3, 1, 3), (3, 3, 3)], 2)],
)
def test_folded_branches_are_the_sum_of_the_branches(channels: int, groups: list, stride: int):
    layer = unsettled(BranchedConv2d(CompositeConv2d(channels, groups, stride=stride, bias=False)))
    x = torch.randn(2, channels, 9, 8, dtype=torch.float64)
    by_branch = layer.strips_norm(layer.strips(x)) + layer.point_norm(layer.point(x))
    if channels == 6 and stride == 1:
        by_branch = by_branch + layer.identity_norm(x)
    else:
        assert layer.identity_norm is None
    torch.testing.assert_close(layer(x), by_branch, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.folded()(x), by_branch, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", ["lr(branches)", "dense(branches)", "lr-join(branches)"])
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 4, "stride": 2},
        {"padding": 2, "dilation": 2},
        {"padding_mode": "reflect"},
        {"groups": 2, "padding": (1, 2), "dilation": (1, 2), "padding_mode": "circular"},
    ],
    ids=str,
)
def test_layers_with_channel_groups_dilation_or_other_padding_have_branches_too(scheme: str, options: dict):
    """As the convs of ResNeXt: shown by float64, branch by branch."""
    dense = nn.Sequential(nn.Conv2d(8, 8, 3, **{"padding": 1, **options}))
    network = unsettled(lr.convert(dense, scheme, where="*"))
    layer = next(module for module in network.modules() if isinstance(module, BranchedConv2d))
    x = torch.randn(2, 8, 9, 8, dtype=torch.float64)
    by_branch = layer.strips_norm(layer.strips(x)) + layer.point_norm(layer.point(x))
    if "stride" in options:
        assert layer.identity_norm is None
    else:
        by_branch = by_branch + layer.identity_norm(x)
    assert layer.point.groups == options.get("groups", 1)
    torch.testing.assert_close(layer(x), by_branch, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.folded()(x), by_branch, rtol=0, atol=1e-12)
    assert isinstance(layer.folded(), nn.Conv2d) is (scheme == "dense(branches)")
    note(network, input_size=(8, 9, 8))
    torch.testing.assert_close(lr.merge(network)(x), network(x), rtol=0, atol=1e-12)
    form = {name: getattr(layer, name) for name in ("stride", "dilation", "groups")}
    if layer.padding_mode == "zeros":
        sides = tuple(before for before, _ in layer.padding)
        y = nn.functional.conv2d(x, layer.weight, layer.bias, padding=sides, **form)
        torch.testing.assert_close(y, by_branch, rtol=0, atol=1e-12)


def test_branches_of_half_precision_are_folded_in_float32():
    layer = unsettled(BranchedConv2d(CompositeConv2d(6, [(3, 1, 3), (1, 3, 3)]))).bfloat16()
    weights, bias = layer.folded_weights()
    exact, exact_bias = copy.deepcopy(layer).double().folded_weights()
    for found, right in zip((*weights, bias), (*exact, exact_bias), strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-6)  # rounded once


STRIPS = "lr(branches)"


def test_merge_folds_the_branches_and_the_norm_behind_them():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    network = unsettled(lr.convert(dense, STRIPS))
    note(network, input_size=(3, 8, 8))
    merged = lr.merge(network)
    assert [type(m) for m in merged] == [CompositeConv2d, nn.Identity, nn.ReLU]
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(merged(x), network(x), rtol=0, atol=1e-10)
    assert isinstance(network[0], BranchedConv2d)


class Deciding(nn.Module):
    """A network whose path depends on values, which no trace follows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if bool(x.sum() > 0) else -x


def test_branches_are_folded_where_no_trace_can_be_made():
    network = unsettled(Deciding(lr.build_conv(4, 4, 3, STRIPS)))
    x = torch.rand(2, 4, 6, 6, dtype=torch.float64)
    merged = lr.merge(network, example_input=x)
    assert isinstance(merged.layer, CompositeConv2d)
    torch.testing.assert_close(merged(x), network(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("join", ["", "-join"])
def test_count_and_notes_see_what_is_left_after_folding(join: str):
    dense = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
    plain, branched = (lr.convert(dense, f"lr{join}{options}") for options in ("", "(branches)"))
    assert lr.count(plain, (8, 6, 6)).macs == lr.count(branched, (8, 6, 6)).macs
    (change,) = lr.notes(branched).conversion.changed
    assert change.after.startswith("3x1,4 + 1x3,4 with branches")
    assert change.params_after == lr.count(branched, (8, 6, 6)).params


def test_branches_learn():
    net = lr.convert(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), STRIPS).train()
    net(torch.randn(4, 4, 6, 6)).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    plain = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert fold_branches(plain) is plain


def test_a_layer_that_could_not_be_folded_exactly_trains_without_branches():
    dense = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 2, padding="same"))
    net = lr.convert(dense, STRIPS)
    assert [type(layer) for layer in net] == [BranchedConv2d, CompositeConv2d, CompositeConv2d]
    assert isinstance(lr.build_conv(4, 4, 3, "dense(branches)", padding=0), nn.Conv2d)
    with pytest.raises(LowRankError, match="no centre"):
        BranchedConv2d(CompositeConv2d(4, [(2, 1, 2), (1, 2, 2)]))
    with pytest.raises(LowRankError, match="shuffles"):
        BranchedConv2d(CompositeConv2d(4, [(3, 1, 2), (1, 3, 2)], channel_groups=2, shuffle=True))


def test_a_join_and_branches_look_like_one_dense_conv_to_tools():
    layer = unsettled(lr.build_conv(6, 6, 3, "lr-join(branches)", padding=1, bias="last"))
    x = torch.randn(1, 6, 7, 7, dtype=torch.float64)
    constant = layer(torch.zeros_like(x))[:, :, 3:4, 3:4]
    y = nn.functional.conv2d(x, layer.weight, padding=1) + constant
    torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)
    assert layer.padding == ((1, 1), (1, 1))


def test_branches_start_afresh():
    dense = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(LowRankError, match="fresh weights"):
        lr.decompose(dense, "lr-join(branches)")


def test_airbench_leaves_the_scales_of_branches_to_training():
    net = lr.create_model("airbench", scheme=STRIPS, width=0.25)
    scales = {name: p.requires_grad for name, p in net.named_parameters() if name.endswith("norm.weight")}
    assert {scales[name] for name in scales if "point_norm" in name} == {True}
    assert False in scales.values()
