"""A frontier of two designs with made-up answers, and small images to train on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lowrank_cnn.choose.candidates import Design
from lowrank_cnn.choose.frontier import DesignRow, DesignTime, Frontier, RateTry, pack
from lowrank_cnn.data import Data
from tests import support

IMAGES = 1003


@pytest.fixture
def squares() -> Data:
    """Two kinds of grey squares of 12 pixels."""
    return support.squares(64, 20, 12)


def made_frontier(folder: Path, rows: dict[str, tuple[float, float, int]], family: str = "airbench") -> Frontier:
    """A record of designs by name, each with a share of right answers, a time and a number of runs."""
    about = {"family": family, "network": {"base": 1.0}, "recipe": {}, "data": {"name": "cifar10"}}
    about |= {"precision": "fp32", "device": "cpu", "teacher": None}
    found = Frontier(folder / "frontier", about, IMAGES)
    found.folder.mkdir()
    draw = torch.Generator().manual_seed(0)
    hard = torch.rand(IMAGES, generator=draw)
    for name, (share, ratio, runs) in rows.items():
        scheme = "dense" if name.startswith("dense") else "lr"
        scheme += "(branches)" if "branches" in name else ""
        row = DesignRow(Design(name, scheme), int(1e6 * ratio), int(1e5 * ratio))
        row.timing = DesignTime(ratio, ratio, ratio, 1.0, 256, "folded")
        row.tries = [RateTry(1.0, [share])]
        found.rows.append(row)
        for seed in range(1, runs + 1):
            right = hard + 0.05 * torch.randn(IMAGES, generator=draw) < share
            speed = {"seconds": 3.0, "wall": 4.0, "images_per_second": 1e4}
            found.add_run(row, seed, pack(right), train_accuracy=0.9, **speed)
    found.save()
    return found


@pytest.fixture
def make_frontier(tmp_path: Path) -> Callable[..., Frontier]:
    return partial(made_frontier, tmp_path)
