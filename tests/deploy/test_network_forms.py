"""Whole networks within a share of the MACs, in the forms that `design` measures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.candidates import LOW_RANK, MIXED, THINNER, build_form

SIZE = (3, 16, 16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


@pytest.mark.parametrize("share", [0.6, 0.3, 0.1])
@pytest.mark.parametrize("form", [LOW_RANK, THINNER, MIXED])
def test_every_form_is_within_its_share(form: str, share: float):
    network = build_form(net(), SIZE, form, share, ["2"])
    assert lr.count(network, SIZE).macs <= share * lr.count(net(), SIZE).macs
    assert network(torch.randn(1, *SIZE)).shape == (1, 4)
    if form == MIXED:  # strips in the layers named alone
        assert isinstance(network.get_submodule("0"), nn.Conv2d)
        assert isinstance(network.get_submodule("2"), lr.CompositeConv2d)


def test_a_share_that_no_form_reaches_is_refused():
    with pytest.raises(lr.LowRankError):
        build_form(net(), SIZE, THINNER, 1e-6)
