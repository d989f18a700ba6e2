import torch
from torch import nn

from lowrank_cnn.deploy.graph import successors
from lowrank_cnn.models import create_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.relu(self.norm(y)) + self.last(y)


def test_a_layer_that_feeds_two_others_has_no_successor():
    assert successors(Block()) == {"norm": "relu"}


def test_a_layer_that_is_called_twice_has_no_successor():
    norm = nn.BatchNorm2d(4)
    net = nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1), norm)
    assert successors(net) == {}


def test_order_of_definition_is_not_order_of_execution():
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.other = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.other(self.conv(x)))

    assert successors(Swapped()) == {"conv": "other", "other": "norm"}


def test_where_the_whole_cannot_be_traced_its_parts_are():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.part(x)) if x.sum() > 0 else x

    assert successors(Looks()) == {"part.0": "part.1"}


def test_our_own_layers_are_kept_whole():
    found = successors(create_model("nin-c3-lr", width=0.05, norm="batch").eval())
    assert found["features.conv2_2"] == "features.conv2_2_norm"
    assert found["features.conv2_2_norm"] == "features.conv2_2_relu"
