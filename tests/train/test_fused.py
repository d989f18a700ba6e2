"""The network that trains on a GPU is the user's own, fused or as it is."""

import pytest
import torch
from torch import nn

from lowrank_cnn.models import create_model
from lowrank_cnn.train.fused import fused_to_train


@pytest.mark.parametrize("name", ["nin-c3-lr", "vgg11-gmp-lr-join", "googlenet-lr"])
def test_a_network_is_fused_and_shares_all_it_learns(name):
    network = create_model(name, num_classes=5, width=0.1, norm="batch").train()
    modes = [module.training for module in network.modules()]
    said: list[str] = []
    twin = fused_to_train(network, (3, 64, 64), said.append)
    assert not said
    assert twin is not network
    assert {id(p) for p in twin.parameters()} == {id(p) for p in network.parameters()}
    assert [module.training for module in network.modules()] == modes


class ReadsItsConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.conv(x) * self.conv.weight.norm()).mean(dim=(2, 3)))


class TurnsAround(nn.Sequential):
    """A Sequential by its class, but not by its order."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 5, 1), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(5, 5, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block[0](-self.block[1](self[0](x))).mean(dim=(2, 3))


@pytest.mark.parametrize("make", [ReadsItsConv, TurnsAround])
def test_a_network_that_fusing_would_change_stays_as_it_is(make):
    network, said = make(), []
    assert fused_to_train(network, (3, 8, 8), said.append) is network
    assert len(said) == 1
    assert "not fused" in said[0]
