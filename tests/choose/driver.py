"""A tiny run that learns shapes: in this process, or as a program of several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lowrank_cnn.choose.learn_shapes import Learned, learn_shapes
from lowrank_cnn.train import Recipe
from tests.train.driver import tiny_data, tiny_net

SHORT = Recipe(name="short", batch_size=16, epochs=3, lr=0.05, mirror=False)


def learn(out: Path) -> Learned:
    """Learn shapes, or go on with a run in `out`."""
    how = {"progress": False, "device": "cpu", "shapes": ("kx1", "1xk", "kxk"), "multiple": 1}
    return learn_shapes(tiny_net(stateful=True), tiny_data(), SHORT, macs=0.6, out=out, resume=True, **how)


if __name__ == "__main__":
    torch.set_num_threads(1)
    learn(Path(sys.argv[1]))
