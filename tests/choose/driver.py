"""A tiny run that learns shapes: in this process, or as a program of several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from lowrank_cnn.choose.learn_shapes import Learned, learn_shapes
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.train import Recipe

SHORT = Recipe(name="short", batch_size=16, epochs=3, lr=0.05, mirror=False)


def noise(n: int = 80) -> Data:
    """Images of four classes, which differ in nothing: how well they are told apart is not tested."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (n, 1, 8, 8), generator=draw).to(torch.uint8)
    split = ResidentSplit.of(images, torch.arange(n) % 4)
    return Data("noise", ("a", "b", "c", "d"), split, split)


def net() -> nn.Sequential:
    """A conv with batch norm and dropout, which both have a state."""
    torch.manual_seed(0)
    conv = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.ReLU()]
    return nn.Sequential(*conv, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))


def learn(out: Path) -> Learned:
    """Learn shapes, or go on with a run in `out`."""
    how = {"progress": False, "device": "cpu", "shapes": ("kx1", "1xk", "kxk"), "multiple": 1}
    return learn_shapes(net(), noise(), SHORT, macs=0.6, out=out, resume=True, **how)


if __name__ == "__main__":
    torch.set_num_threads(1)
    learn(Path(sys.argv[1]))
