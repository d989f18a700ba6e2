"""Whole networks within a share of the MACs, in the forms that `design` measures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.design import LOW_RANK, MIXED, THINNER, LayerAdvice, form_builders

SIZE = (3, 16, 16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


def advice(*choices: str) -> list[LayerAdvice]:
    return [LayerAdvice(name, 1, 1, 1, None, None, choice, "") for name, choice in zip("02", choices, strict=True)]


@pytest.mark.parametrize("share", [0.6, 0.3, 0.1])
def test_every_form_is_within_its_share(share: float):
    dense = lr.count(net(), SIZE).macs
    forms = form_builders(net(), SIZE, advice(THINNER, LOW_RANK))
    assert list(forms) == [LOW_RANK, THINNER, MIXED]
    for build in forms.values():
        network = build(share)
        assert network is not None
        assert lr.count(network, SIZE).macs <= share * dense
        assert network(torch.randn(1, *SIZE)).shape == (1, 4)


def test_mixed_has_strips_in_the_layers_of_the_advice_alone():
    network = form_builders(net(), SIZE, advice(THINNER, LOW_RANK))[MIXED](0.3)
    assert network is not None
    assert isinstance(network.get_submodule("0"), nn.Conv2d)
    assert isinstance(network.get_submodule("2"), lr.CompositeConv2d)
    assert MIXED not in form_builders(net(), SIZE, advice(THINNER, THINNER))


def test_a_share_that_no_form_reaches_gives_none():
    assert form_builders(net(), SIZE, advice(THINNER, THINNER))[THINNER](1e-6) is None
