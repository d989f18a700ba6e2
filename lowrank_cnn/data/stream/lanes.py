"""The order in which a streamed set is read: a pure function of the seed and the epoch.

An epoch's rows, in a random order that keeps shards together, are cut into lanes. Every global batch takes
the same number of images from each lane. A process owns neighbouring lanes, and so reads shards of its own;
its workers share these lanes out. As long as all processes together have no more workers than lanes, the
global batches depend neither on the number of processes nor on that of workers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowrank_cnn.data.readers.image_store import ImageStore
from lowrank_cnn.data.types import generator

_LANES = 16
WINDOW = 256


def lane_count(batch_size: int, world: int, workers: int) -> int:
    """A divisor of the batch and a multiple of the processes, larger for many workers."""
    wanted = _LANES
    while wanted < world * workers:
        wanted *= 2
    return math.lcm(math.gcd(batch_size, wanted), world)


def epoch_lanes(store: ImageStore, rows: Tensor, *, lanes: int, used: int, seed: int, epoch: int) -> Tensor:
    """Rows of an epoch as [lanes, used / lanes], mixed further within windows of each lane."""
    draw = generator("shards", seed, epoch)
    order = store.shuffled(draw)
    if len(rows) < len(order):
        wanted = torch.zeros(len(order), dtype=torch.bool)
        wanted[rows] = True
        order = order[wanted[order]]
    cut = order[:used].view(lanes, -1)
    window = torch.arange(cut.shape[1]) // WINDOW
    keys = window + torch.rand(cut.shape, generator=draw, dtype=torch.float64)
    return cut.gather(1, keys.argsort(1))


def rank_range(n: int, rank: int, world: int) -> tuple[int, int]:
    """The stretch of n images that a process evaluates: together they are all, each once."""
    return n * rank // world, n * (rank + 1) // world
