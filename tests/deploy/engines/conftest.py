"""A tiny network for every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.method.schemes import build_conv


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


@pytest.fixture
def tiny() -> nn.Module:
    """A low-rank layer, a pool, a dense layer and a classifier, for images of 3x12x12."""
    torch.manual_seed(0)
    layers = [build_conv(3, 8, 3, "lr"), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
