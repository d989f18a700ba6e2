"""A tiny run that learns shapes: in this process, or as a program of several processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lowrank_cnn.choose import learn_shapes as learning
from lowrank_cnn.choose.learn_shapes import Learned, learn_shapes
from lowrank_cnn.core.clock import Key, Sample, measure
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.train import Recipe

SHORT = Recipe(name="short", batch_size=16, epochs=3, lr=0.05, mirror=False)


def counted_times(
    runs: Mapping[Key, Callable[[], object]], *, cuda: bool = False, **how: Any
) -> dict[Key, Sample]:
    """As `measure`, with a time that is the number of products; CUDA graphs, which show none, are timed."""
    if cuda:
        return measure(runs, cuda=True, **how)
    times = {}
    for name, run in runs.items():
        with FlopCounterMode(display=False) as products:
            run()
        ms = products.get_total_flops() / 1000
        times[name] = Sample(ms, ms, ms, 3)
    return times


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


def learn(out: Path, budget: str) -> Learned:
    """Learn shapes within a budget such as "macs=0.6", or go on with a run in `out`."""
    kind, _, share = budget.partition("=")
    how = {"progress": False, "device": "cpu", "shapes": ("kx1", "1xk", "kxk", "none"), "multiple": 1}
    return learn_shapes(net(), noise(), SHORT, out=out, resume=True, **{kind: float(share)}, **how)


if __name__ == "__main__":
    torch.set_num_threads(1)
    learning.measure = counted_times
    learn(Path(sys.argv[1]), sys.argv[2])
