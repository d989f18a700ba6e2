"""One layer weighs what it would lose against what shapes cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowrank_cnn.choose.shape_choice import LayerChoice
from lowrank_cnn.choose.shape_damage import Damage


def layer(*, removable: bool) -> LayerChoice:
    """A hundred filters that matter almost alike; the first shape loses half of a filter, the second nothing."""
    removal = torch.linspace(0.9, 1.1, 100, dtype=torch.float64)
    views = removal[:, None, None] * torch.tensor([[0.5, 0.0], [0.5, 0.5]])
    cost = torch.tensor([1.0, 3.0], dtype=torch.float64)
    return LayerChoice(Damage(removal[:, None] - views.sum(2), removal, views), cost, 0.0, 1, True, removable)


@pytest.mark.parametrize("removable", [True, False])
def test_filters_that_matter_alike_do_not_all_go_at_once(removable):
    one = layer(removable=removable)
    found = [one.pick(price * one.cost, 0.0) for price in torch.logspace(-4, 0, 80)]
    assert [pick.cost for pick in found] == sorted((pick.cost for pick in found), reverse=True)
    # By what each filter is worth by itself, all would change within a tenth of the price: three steps here.
    assert len([pick for pick in found if 105 < pick.cost < 295]) > 4


def test_filters_take_the_shapes_of_their_units():
    one = replace(layer(removable=False), unit=10)
    found = one.pick(0.004 * one.cost, 0.0)
    choice, stays = one.assigned(found)
    assert stays.all()
    assert torch.equal(choice.bincount(minlength=2), 10 * found.units.bincount(minlength=2))
    assert found.cost == pytest.approx(float(one.cost[choice].sum()))


def test_filters_that_cost_more_than_they_are_worth_go():
    found = layer(removable=True).pick(torch.tensor([0.05, 0.05], dtype=torch.float64), 0.0)
    choice, stays = layer(removable=True).assigned(found)
    assert 0 < int(stays.sum()) == round(100 * found.width) < 100
    assert stays[-10:].all()  # those that matter most stay
    assert (choice < 2).all()


def test_a_layer_that_keeps_nothing_with_any_shape_does_not_lose_all_filters():
    one, nothing = layer(removable=True), torch.zeros(100, 2, 2, dtype=torch.float64)
    dead = replace(one, damage=replace(one.damage, views=nothing), split=1.0)
    found = dead.pick(0.1 * dead.cost, 0.1)
    assert 0 < int(dead.assigned(found)[1].sum()) < 100
    assert found.cost > 0
