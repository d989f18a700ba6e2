"""One layer weighs what it would lose against what shapes cost."""

from __future__ import annotations

import pytest
import torch

from lowrank_cnn.method.layer_choice import LayerChoice
from lowrank_cnn.method.shape_damage import Damage


def layer(*, removable: bool) -> LayerChoice:
    """A hundred filters that matter almost alike; the first shape loses half of a filter, the second nothing."""
    removal = torch.linspace(0.9, 1.1, 100, dtype=torch.float64)
    cost = torch.tensor([1.0, 3.0], dtype=torch.float64)
    return LayerChoice(Damage(removal[:, None] * torch.tensor([0.5, 0.0]), removal), cost, 0.0, 1, True, removable)


@pytest.mark.parametrize("removable", [True, False])
def test_filters_that_matter_alike_do_not_all_go_at_once(removable):
    one = layer(removable=removable)
    shares = [one.pick(price * one.cost, 0.0, rounded=False).share for price in torch.logspace(-4, 0, 80)]
    large = [share for share in shares if share > 0.1]
    assert large == sorted(large, reverse=True)
    # By the slope at an earlier share, all filters would change within a tenth of the price: three steps here.
    assert len([share for share in shares if 0.55 < share < 0.95]) > 4


def test_the_weight_of_a_loss_is_the_slope_of_the_logarithm():
    one = layer(removable=True)
    for price in (0.005, 0.01, 0.02):
        found = one.pick(price * one.cost, 0.0, rounded=False)
        assert found.share * one.weight_at(price * one.cost) == pytest.approx(1, rel=0.05)


def test_layers_choose_again_where_their_cost_jumps():
    assert layer(removable=False).that_jump() == []
    assert len(layer(removable=True).that_jump()) == 1
