"""Channels are free until they meet others; everything unknown fixes their order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.graph.channels import Reader, Route, free_routes
from lowrank_cnn.models import create_model


class Functions(nn.Module):
    """Calls everything as functions, and looks at sizes."""

    def __init__(self, between) -> None:
        super().__init__()
        self.conv, self.between = nn.Conv2d(1, 4, 3, padding=1), between
        self.linear = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.conv(x))
        x = F.adaptive_avg_pool2d(F.relu(x), 2)
        return self.linear(x.view(x.size(0), -1))


def test_functions_are_tried_not_looked_up():
    free = {"conv": Route((), (Reader("linear", 4),))}
    for between in (torch.sigmoid, F.silu, lambda x: F.max_pool2d(x, 2), lambda x: x * 2 + 1, lambda x: x):
        assert free_routes(Functions(between), (1, 8, 8)) == free
    mixing = (
        lambda x: x.softmax(1),
        lambda x: x.flip(1),
        lambda x: x + x.mean(1, keepdim=True),
        lambda x: x + torch.arange(4.0).view(1, 4, 1, 1),
        lambda x: F.pixel_shuffle(x, 2).repeat(1, 4, 1, 1),
    )
    for between in mixing:
        assert free_routes(Functions(between), (1, 8, 8)) == {}


def test_what_meets_in_a_sum_is_fixed():
    routes = free_routes(create_model("resnet18-small", num_classes=4, width=0.25, image_size=16), (3, 16, 16))
    assert len(routes) == 8
    assert all(name.endswith("conv1") for name in routes)
    assert routes["stages.stage1.0.conv1"] == Route(("stages.stage1.0.norm1",), (Reader("stages.stage1.0.conv2"),))


def test_flattened_channels_are_blocks_of_features():
    net = create_model("vgg11", num_classes=4, width=0.125, image_size=64)
    assert free_routes(net, (3, 64, 64))["features.conv5_2"] == Route((), (Reader("head.fc6", 4),))


class Looks(nn.Module):
    """Cannot be captured: its way depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x if x.mean() > 0 else -x)


def test_a_network_that_cannot_be_captured_has_no_free_channels():
    assert free_routes(Looks(), (1, 8, 8)) == {}


def test_a_conv_that_is_called_twice_is_fixed():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    assert free_routes(nn.Sequential(nn.Conv2d(3, 4, 1), conv, conv, nn.Conv2d(4, 2, 1)), (3, 8, 8)) == {}


class SideHead(nn.Module):
    """Has a head that runs in training alone, behind the first of three convs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 4, 3, padding=1) for n in (1, 4, 4))
        self.drop, self.head = nn.Dropout(), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.c(self.drop(self.b(x)))
        return y + self.head(x) if self.training else y


def test_a_head_that_runs_in_training_alone_fixes_what_it_reads():
    assert free_routes(SideHead(), (1, 8, 8)) == {"b": Route((), (Reader("c"),))}
