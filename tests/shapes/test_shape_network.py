"""A network that learns shapes starts as the dense one, and knows what each shape costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.shape_costs import mac_costs, shape_network
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.method.shaped_layers import GatedLinear, ShapedConv2d

SIZE = (3, 8, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2),
        nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip


def test_only_spatial_convs_learn_unless_filters_may_go():
    kinds = {n: type(m) for n, m in shape_network(net(), parse_scheme("learned"), SIZE).named_children()}
    assert [n for n, kind in kinds.items() if kind is ShapedConv2d] == ["0", "6"]
    removable = shape_network(net(), parse_scheme("learned(kxk, none)"), SIZE)
    kinds = {n: type(m) for n, m in removable.named_children()}
    assert [n for n, kind in kinds.items() if kind is ShapedConv2d] == ["0", "2", "6"]
    assert kinds["8"] is GatedLinear
    assert kinds["4"] is nn.Conv2d
    x = torch.randn(2, *SIZE)
    torch.testing.assert_close(removable(x), net()(x))


def test_macs_by_shape_add_up_to_the_dense_network():
    dense = net()
    shaped = shape_network(dense, parse_scheme("learned(kx1, 1x1, kxk)"), SIZE)
    costs = mac_costs(shaped, dense, SIZE)
    strip, point, square = costs.filters["0"]
    assert (strip, point, square) == (3 * 3 * 64, 3 * 64, 9 * 3 * 64)
    whole = costs.rest + sum(8 * c[-1] if n == "0" else 4 * c[-1] for n, c in costs.filters.items())
    assert whole == costs.dense == lr.count(dense, SIZE).macs


def test_a_network_of_grouped_convs_is_refused():
    with pytest.raises(lr.LowRankError, match="without channel groups"):
        shape_network(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), parse_scheme("learned"), (4, 8, 8))
