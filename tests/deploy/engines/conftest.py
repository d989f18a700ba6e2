"""A tiny network for every engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.method.schemes import build_conv


@pytest.fixture
def tiny() -> nn.Module:
    """A low-rank layer, a pool, a dense layer and a classifier, for images of 3x12x12."""
    torch.manual_seed(0)
    layers = [build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
