"""How NiN's class maps start."""

import pytest
import torch

from lowrank_cnn.models import create_model


@pytest.mark.parametrize("init", ["composite", "torch"])
@pytest.mark.parametrize("name", ["nin", "nin-c3", "nin-c3-lr"])
def test_no_class_starts_dark(name, init):
    torch.manual_seed(0)
    network = create_model(name, init=init).eval()
    maps = network.features(torch.randn(4, 3, 30, 30))
    assert ((maps > 0).float().mean(dim=(0, 2, 3)) > 0.2).all()
    assert network(torch.randn(4, 3, 30, 30)).std() < 1


def test_plain_logits_need_no_lift():
    network = create_model("nin-c3-lr", norm="batch")
    assert network.features.classes.bias.detach().abs().max() == 0
    assert network.features.classes.weight.detach().std() == pytest.approx(192**-0.5, rel=0.1)
