"""The arithmetic of a full run: how many hours on how many GPUs, and which part bounds it.

A step takes as long as the slowest of three things that run at the same time: the device computes its share of
the batch, the cores beside it decode the next one, and gradients are exchanged (a ring: twice the weights
through every link) while the backward pass makes them. What a small share of the batch costs in efficiency is
not in it: the rate of a device should be one measured at about that share.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from lowrank_cnn.models import create_model
from lowrank_cnn.paper.experiments import EXPERIMENTS
from lowrank_cnn.system.errors import LowRankError, nearest
from lowrank_cnn.train import get_recipe

IMAGES = {"ilsvrc": 1_281_167, "places": 2_448_873}
"""Training images."""
CLASSES = {"ilsvrc": 1000, "places": 205}
GPUS = (1, 8, 64)
CORES = 16
"""That decode for each device."""
NODE = 8
"""Devices of one machine."""
WITHIN, BETWEEN = 300e9, 40e9
"""Bytes per second that an exchange moves per device: within a machine of such GPUs, and between several."""
BYTES_PER_GRADIENT = 4


@dataclass(frozen=True)
class Demand:
    """What is trained: images of an epoch, epochs, the batch of all devices, and the weights to exchange."""

    images: int
    epochs: int
    batch: int
    params: int


@dataclass(frozen=True)
class Supply:
    """What a device has: the images per second it trains on, and the cores that decode for it, each at a rate."""

    train_rate: float
    decode_rate: float
    cores: int


@dataclass(frozen=True)
class FullRun:
    """Hours, and those that each part would take alone; idle is the share of time in which devices wait."""

    gpus: int
    share: float
    hours: float
    compute: float
    decode: float
    exchange: float
    bound: str
    idle: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def demand_of(experiment: str, network: str) -> Demand:
    """What the paper's recipe asks for, at most: its epochs on the images that are not held out."""
    if experiment not in IMAGES:
        raise LowRankError(f"{experiment!r} is not a full run; {nearest(experiment, IMAGES)}")
    part = EXPERIMENTS[experiment]["paper"]
    recipe = get_recipe(str(part.own.get(network, {}).get("recipe", part.recipe)))
    with torch.device("meta"):
        net = create_model(network, num_classes=CLASSES[experiment])
    params = sum(parameter.numel() for parameter in net.parameters())
    return Demand(round(IMAGES[experiment] * (1 - recipe.holdout)), recipe.epochs, recipe.batch_size, params)


def full_run(demand: Demand, supply: Supply, gpus: int) -> FullRun:
    """The run on this many devices."""
    if gpus < 1 or demand.batch % gpus:
        raise LowRankError(f"a batch of {demand.batch} does not divide over {gpus} GPUs.")
    share = demand.batch / gpus
    parts = {
        "compute": share / supply.train_rate,
        "decode": share / (supply.decode_rate * supply.cores),
        "exchange": exchange_seconds(demand.params, gpus),
    }
    bound = max(parts, key=lambda part: parts[part])
    steps = demand.epochs * (demand.images // demand.batch)
    hours = {part: steps * seconds / 3600 for part, seconds in parts.items()}
    return FullRun(gpus, share, hours[bound], **hours, bound=bound, idle=1 - parts["compute"] / parts[bound])


def exchange_seconds(params: int, gpus: int) -> float:
    """A ring of devices adds up gradients: each passes on all but its own part, twice."""
    link = WITHIN if gpus <= NODE else BETWEEN
    return 2 * (gpus - 1) / gpus * params * BYTES_PER_GRADIENT / link


def idle_share(*, supply: float, demand: float) -> float:
    """The share of time that a device waits, fed at one rate and able to train at another."""
    if min(supply, demand) <= 0:
        raise LowRankError(f"rates are above zero, not {supply:g} and {demand:g}.")
    return max(0.0, 1 - supply / demand)
