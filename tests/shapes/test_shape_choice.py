"""Shapes are chosen within the budget, where they cost least, and the same every time."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.shape_choice import ShapeChooser, check_reachable, check_removable, unit_of
from lowrank_cnn.choose.shape_costs import mac_costs, shape_network
from lowrank_cnn.method.channels import free_routes
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.method.shaped_layers import shaped_convs

SIZE = (3, 12, 12)


def chosen(scheme: str, net: nn.Module) -> tuple[nn.Module, ShapeChooser]:
    shaped = shape_network(net, parse_scheme(scheme), SIZE)
    return shaped, ShapeChooser(free_routes(shaped, SIZE), mac_costs(shaped, net, SIZE))


def two_convs() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
@pytest.mark.parametrize("scheme", ["learned", "learned(kx1, 1xk, kxk, none)", "learned(5x1, 1x1, kxk)"])
def test_the_budget_is_kept_and_nearly_spent(share, scheme):
    shaped, chooser = chosen(scheme, two_convs())
    twin = copy.deepcopy(shaped)
    cost = chooser.choose(shaped, share)
    assert share - 0.12 <= cost <= share
    chooser.choose(twin, share)
    for name, layer in shaped_convs(shaped).items():
        assert torch.equal(layer.choice, twin.get_submodule(name).choice)


def test_a_round_that_changes_nothing_is_the_last(monkeypatch):
    shaped, chooser = chosen("learned(kx1, 1xk, kxk, none)", two_convs())
    prices, price = [], ShapeChooser._price
    monkeypatch.setattr(ShapeChooser, "_price", lambda *given: prices.append(price(*given)) or prices[-1])
    chooser.choose(shaped, 0.9)
    assert len(prices) == 2


def test_filters_take_the_shape_that_holds_their_weights():
    net = two_convs()
    with torch.no_grad():
        net[3].weight[:8, :, :, 0] = net[3].weight[:8, :, :, 2] = 0  # upright: 3x1
        net[3].weight[8:16, :, 0] = net[3].weight[8:16, :, 2] = 0  # lying: 1x3
        net[3].weight[16:] *= torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]])  # in the centre alone
    shaped, chooser = chosen("learned(kx1, 1xk, 1x1)", net)
    chooser.choose(shaped, 0.25)
    layer = shaped.get_submodule("3")
    assert layer.choice.tolist() == [0] * 8 + [1] * 8 + [2] * 16


@pytest.mark.parametrize("share", [0.9, 0.6])
@pytest.mark.parametrize("free", [True, False])
def test_a_layer_has_fewer_shapes_where_each_costs_more(share, free):
    shaped, chooser = chosen("learned(multiple=1)", two_convs())
    split = 0.1 * chooser.costs.dense
    routes = chooser.routes if free else {}
    dear = ShapeChooser(routes, replace(chooser.costs, splits={"0": split, "3": split}))
    cost = dear.choose(shaped, share)
    groups = {name: len(layer.choice.unique()) for name, layer in shaped_convs(shaped).items()}
    alone = sum(
        float(torch.tensor(chooser.costs.filters[name])[layer.choice].sum())
        for name, layer in shaped_convs(shaped).items()
    )
    spent = chooser.costs.rest + alone + split * sum(number - 1 for number in groups.values())
    assert cost == pytest.approx(spent / chooser.costs.dense, rel=1e-5)
    assert share - 0.25 <= cost <= share  # by one price alone the cost would jump from 1 to 0.19
    ShapeChooser(routes, chooser.costs).choose(shaped, share)
    without = sum(len(layer.choice.unique()) for layer in shaped_convs(shaped).values())
    assert sum(groups.values()) <= min(3, without)


def test_useless_filters_are_removed_first():
    net = two_convs()
    with torch.no_grad():
        net[3].weight[:, 8:] *= 0.01  # nobody listens to these channels
    shaped, chooser = chosen("learned(kxk, none)", net)
    chooser.choose(shaped, 0.55)
    first, second = shaped.get_submodule("0"), shaped.get_submodule("3")
    assert not first.kept[8:].any()
    assert first.kept[:8].all()
    assert torch.equal(second.inputs, first.kept)


def test_an_unreachable_budget_is_refused():
    shaped, chooser = chosen("learned(kx1, 1xk, kxk)", two_convs())
    least = chooser.least(shaped)
    assert 0.33 < least < 0.4
    check_reachable(chooser, shaped, least)
    with pytest.raises(lr.LowRankError, match="what the cheapest shapes and all else cost"):
        check_reachable(chooser, shaped, least - 0.01)


@pytest.mark.parametrize(("name", "share"), [("nin", 0.4), ("vgg11-gmp", 0.3), ("resnet18-small", 0.4)])
def test_no_layer_collapses_where_filters_may_go(name, share):
    torch.manual_seed(0)
    size = (3, 32, 32)
    net = lr.create_model(name, width=0.25, image_size=32, num_classes=10)
    shaped = shape_network(net, parse_scheme("learned(kx1, 1xk, 1x1, kxk, none)"), size)
    chooser = ShapeChooser(free_routes(shaped, size), mac_costs(shaped, net, size))
    assert 0.9 * share < chooser.choose(shaped, share) <= share
    assert min(float(layer.kept.float().mean()) for layer in shaped_convs(shaped).values()) > 0.2


def test_removing_filters_is_refused_where_none_is_free():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 3, padding=1))
    shaped, chooser = chosen("learned(kx1, kxk, none)", net)
    with pytest.raises(lr.LowRankError, match="their channels meet others or reach the output"):
        check_removable(chooser, shaped, SIZE)
    shaped, chooser = chosen("learned(kx1, kxk, none)", two_convs())
    check_removable(chooser, shaped, SIZE)


def test_counts_come_in_units_of_what_the_layer_can_hold():
    shaped, chooser = chosen("learned(multiple=8)", two_convs())
    chooser.choose(shaped, 0.4)
    for name, unit in (("0", 4), ("3", 8)):
        layer = shaped.get_submodule(name)
        assert unit_of(layer) == unit
        assert (torch.bincount(layer.choice) % unit == 0).all()
