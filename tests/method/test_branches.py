"""Branches beside strips: folded, they are the same map, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.method.branches import BranchedConv2d, branch, fold_branches
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note


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


def test_merge_folds_the_branches_and_the_norm_behind_them():
    torch.manual_seed(0)
    low_rank = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)], bias=False), nn.BatchNorm2d(8), nn.ReLU())
    network = unsettled(branch(low_rank))
    note(network, input_size=(3, 8, 8))
    merged = lr.merge(network)
    assert [type(m) for m in merged] == [CompositeConv2d, nn.Identity, nn.ReLU]
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(merged(x), network(x), rtol=0, atol=1e-10)
    assert isinstance(network[0], BranchedConv2d)


def test_count_sees_what_is_left_after_folding():
    plain = nn.Sequential(CompositeConv2d(8, [(3, 1, 4), (1, 3, 4)]))
    costs = [lr.count(net, (8, 6, 6)) for net in (plain, branch(plain))]
    assert costs[0].macs == costs[1].macs
    assert costs[0].params == costs[1].params


def test_branches_learn_and_the_given_network_stays():
    net = nn.Sequential(CompositeConv2d(4, [(3, 1, 2), (1, 3, 2)]), nn.ReLU())
    new = branch(net).train()
    new(torch.randn(4, 4, 6, 6)).square().sum().backward()
    assert all(p.grad is not None for name, p in new.named_parameters() if "strips.bias" not in name)
    assert all(p.grad is None for p in net.parameters())
    assert fold_branches(net) is net


def test_what_could_not_be_folded_is_refused():
    with pytest.raises(LowRankError, match="no centre"):
        BranchedConv2d(CompositeConv2d(4, [(2, 1, 2), (1, 2, 2)]))
    with pytest.raises(LowRankError, match="no composite"):
        branch(nn.Sequential(nn.Conv2d(3, 4, 3)))
