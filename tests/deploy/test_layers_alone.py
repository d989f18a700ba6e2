"""The layers of a network with inputs of the sizes that they get."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.deploy.optimize import layer_calls, time_layers
from lowrank_cnn.method.schemes import build_conv


def network() -> nn.Sequential:
    conv = nn.Conv2d(8, 8, 3, padding=1)
    parts = [build_conv(3, 8, 3, "lr-join"), nn.ReLU(), conv, nn.MaxPool2d(2), conv, nn.BatchNorm2d(8)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


def test_every_call_of_a_layer_is_listed_with_an_input_of_its_size():
    net = network()
    x = torch.randn(2, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    calls = layer_calls(net, x)
    assert [layer for layer, _ in calls] == [net[0], net[2], net[2], net[8]], "a chain is one layer"
    assert [tuple(given.shape) for _, given in calls] == [(2, 3, 12, 12), (2, 8, 12, 12), (2, 8, 6, 6), (2, 8)]
    assert calls[0][1].is_contiguous(memory_format=torch.channels_last)
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_calls_of_one_size_share_their_input():
    conv = nn.Conv2d(4, 4, 1)
    first, second = layer_calls(nn.Sequential(conv, nn.ReLU(), conv).eval(), torch.randn(1, 4, 5, 5))
    assert first[1] is second[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_take_less_than_the_network():
    net = network().cuda()
    assert time_layers(net, torch.randn(2, 3, 12, 12, device="cuda")) > 0
