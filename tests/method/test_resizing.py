"""Layers of the same kind for other numbers of channels."""

import copy

import pytest
import torch
from torch import nn

from lowrank_cnn.method.thin import PendingLayer, resized

MAPS = torch.randn(2, 12, 9, 9)


def halved(channels: int) -> int:
    return channels // 2


@pytest.mark.parametrize(
    ("layer", "leaving"),
    [
        (nn.Conv2d(24, 16, 3, stride=2, padding=1, bias=False), 8),
        (nn.Conv2d(24, 16, (3, 1), dilation=2, padding_mode="circular", padding=2), 8),
        (nn.Conv2d(24, 16, 3, groups=8), 8),
        (nn.Conv2d(24, 48, 3, groups=24), 24),  # depthwise: two filters for each channel that arrives
        (nn.ConvTranspose2d(24, 16, 3, stride=2, output_padding=1), 8),
        (nn.BatchNorm2d(24, momentum=0.3), 12),
        (nn.GroupNorm(8, 24), 12),
        (nn.InstanceNorm2d(24, momentum=0.3, affine=True, track_running_stats=True), 12),
        (nn.PReLU(24), 12),
        (nn.PReLU(), 12),
    ],
)
def test_only_channels_and_groups_change(layer: nn.Module, leaving: int):
    new = resized(layer, MAPS, halved)
    before, after = layer(torch.randn(2, 24, 9, 9)), new(MAPS)
    assert after.shape == (before.shape[0], leaving, *before.shape[2:])
    assert {*dict(new.named_parameters())} == {*dict(layer.named_parameters())}
    options = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "output_padding", "momentum", "eps")
    assert all(getattr(new, name, None) == getattr(layer, name, None) for name in options)


def test_a_layer_that_waits_for_its_input_shows_what_the_layer_has():
    waiting = PendingLayer(nn.Conv2d(24, 16, 3, stride=2), halved)
    assert waiting.stride == (2, 2)
    assert copy.deepcopy(waiting).kernel_size == (3, 3)
    with pytest.raises(AttributeError, match="reads the weight of a Conv2d that has not run"):
        _ = waiting.weight
    with pytest.raises(AttributeError, match="'Conv2d' object has no attribute 'depth'"):
        _ = waiting.depth
    assert waiting(input=MAPS.to("meta")).shape == (2, 8, 4, 4)
    assert waiting.weight.shape == (8, 12, 3, 3)
