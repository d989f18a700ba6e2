"""Shapes are chosen within the budget, where they lose and cost least, and the same every time."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lowrank_cnn as lr
from lowrank_cnn.choose.learn_shapes import (
    ShapeChooser,
    measure_views,
    pick_units,
    shape_network,
    views_by_weights,
    worth,
)
from lowrank_cnn.graph.channels import free_routes
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.method.shaped_layers import shaped_convs

SIZE = (3, 12, 12)


def two_convs() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def shaped_net(scheme: str = "learned(kx1, 1xk, kxk)", net: nn.Module | None = None) -> nn.Module:
    return shape_network(net or two_convs(), parse_scheme(scheme), SIZE)


def chooser_of(shaped: nn.Module, dense: nn.Module | None = None, size=SIZE) -> ShapeChooser:
    return ShapeChooser(shaped, free_routes(shaped, size), lr.count(dense or two_convs(), size))


def views_of(shaped: nn.Module, loss=F.cross_entropy) -> dict[str, torch.Tensor]:
    images = torch.randn(16, *SIZE, generator=torch.Generator().manual_seed(0))
    return measure_views(shaped, free_routes(shaped, SIZE), [(images, torch.arange(16) % 2)] * 2, loss)


@settings(max_examples=15)
@given(st.integers(0, 999), st.floats(0, 0.3))
def test_no_change_of_one_unit_would_be_better(seed, price):
    draw = torch.Generator().manual_seed(seed)
    kept = torch.rand(5, 3, 5, generator=draw).double() * (torch.rand(3, 5, generator=draw) > 0.4) + 1e-3
    whole, prices = kept.amax(1).sum(0), price * torch.arange(3.0).double()

    def value(choice: list[int]) -> float:
        return float(worth(kept[torch.arange(5), choice].sum(0), whole).log() - prices[choice].sum())

    chosen = pick_units(kept, whole, prices)
    found = value(chosen.tolist())
    for unit, shape in product(range(5), range(3)):
        assert value([*chosen[:unit].tolist(), shape, *chosen[unit + 1 :].tolist()]) <= found + 1e-8


@pytest.mark.parametrize(
    ("share", "scheme"),
    [(0.9, "learned"), (0.4, "learned(kx1, 1xk, kxk)"), (0.5, "learned(5x1, 1x1, kxk)")],
)
def test_the_budget_is_kept_and_nearly_spent(share, scheme):
    shaped = shaped_net(scheme)
    twin = copy.deepcopy(shaped)
    assert share - 0.12 <= chooser_of(shaped).choose(share) <= share
    chooser_of(twin).choose(share)
    for name, layer in shaped_convs(shaped).items():
        assert torch.equal(layer.choice, twin.get_submodule(name).choice)


def test_filters_take_the_shape_that_holds_their_weights_in_units():
    net = two_convs()
    with torch.no_grad():
        net[3].weight[:8, :, :, 0] = net[3].weight[:8, :, :, 2] = 0  # vertical: 3x1
        net[3].weight[8:16, :, 0] = net[3].weight[8:16, :, 2] = 0  # horizontal: 1x3
        net[3].weight[16:] *= torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]])  # in the centre alone
        net[3].weight[16:] *= 3  # so that all filters have about the same energy
    shaped = shaped_net("learned(kx1, 1xk, 1x1)", net)
    chooser_of(shaped, net).choose(0.25)
    assert shaped.get_submodule("3").choice.tolist() == [0] * 8 + [1] * 8 + [2] * 16
    assert (torch.bincount(shaped.get_submodule("0").choice) % 4 == 0).all()  # 8 would leave too few units


def test_the_loss_tells_which_taps_matter_and_the_network_is_left_as_it_was():
    shaped = shaped_net().train()
    shaped.get_submodule("3").weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in shaped.state_dict().items()}
    state = torch.get_rng_state()
    for views in views_of(shaped).values():
        assert (views >= 0).all()
        kept = views.sum(2)
        assert (kept[:, :2] < kept[:, 2:]).all()  # kxk keeps most
    assert shaped.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not shaped.get_submodule("3").weight.requires_grad
    assert all(torch.equal(before[name], tensor) for name, tensor in shaped.state_dict().items())
    assert all(p.grad is None for p in shaped.parameters())


def test_a_layer_without_gradients_is_judged_by_its_weights():
    shaped = shaped_net()
    with torch.no_grad():
        shaped.get_submodule("0").weight.zero_()[:, :, :, 1] = 1  # vertical filters
    found = views_of(shaped, lambda *given: 1e-20 * F.cross_entropy(*given))["0"]  # too small to compare
    assert torch.equal(found, views_by_weights(shaped.get_submodule("0")))  # type: ignore[arg-type]
    # Vertical shapes keep all rows and the middle column, horizontal ones the middle row and all columns.
    vertical, horizontal, whole = found.sum(2).T
    torch.testing.assert_close(vertical, whole)
    torch.testing.assert_close(horizontal, whole * (1 / 6 + 1 / 2))


def net_with_groups() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2),
        nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(256, 2),
    )  # fmt: skip


def test_only_spatial_convs_without_groups_learn():
    shaped, x = shaped_net("learned", net_with_groups()), torch.randn(2, *SIZE)
    assert list(shaped_convs(shaped)) == ["0", "6"]
    torch.testing.assert_close(shaped(x), net_with_groups()(x))


def test_a_network_is_refused_that_has_grouped_convs_alone():
    with pytest.raises(lr.LowRankError, match="it has channel groups"):
        shape_network(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), parse_scheme("learned"), (4, 8, 8))
