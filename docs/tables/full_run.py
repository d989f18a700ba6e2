"""The arithmetic of a full run: how many hours on how many GPUs, and which part bounds it.

Three things run at the same time, and the slowest determines the time of a step. The device computes its share of
the batch; its CPU cores decode the next batch; and gradients are exchanged during the backward pass (in a ring,
which sends twice the weights through each link). The lower efficiency of small batches is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from tables.form import NOT_MEASURED, JsonRecord, from_record, markdown, record, source

from lowrank_cnn.models import create_model
from lowrank_cnn.paper.reproduce import EXPERIMENTS
from lowrank_cnn.train import get_recipe

FULL = ("vgg11-gmp", "vgg11-gmp-lr")
RATED = {"ilsvrc": "", "places": "/2"}
"""How `gpu_speed.json` names the networks of an experiment: those of Places have a stride of 2."""
BATCH = 256
IMAGES = {"ilsvrc": 1_281_167, "places": 2_448_873}
"""Training images."""
CLASSES = {"ilsvrc": 1000, "places": 205}
GPUS = (1, 8)
CORES = 16
"""Cores that decode for each device."""
LINK = 300e9
"""Bytes per second that an exchange moves per device within a machine of such GPUs."""
BYTES_PER_GRADIENT = 4


@from_record("input_pipeline.json")
def full_run(found: JsonRecord) -> str:
    """Hours of a full run on 1 and 8 GPUs, part by part."""
    machine = _beside_a_gpu(found["machines"])
    speed = record("gpu_speed.json")
    decode = {kind: machine["rows"][kind]["worker"]["images_per_second"] for kind in ("mosaic", "shrunk")}
    alike: dict[tuple[object, ...], list[str]] = {}
    for experiment, network in product(IMAGES, FULL):
        for row in _hours(experiment, network, train_rate(speed, experiment, network), decode):
            alike.setdefault((experiment, *row), []).append(f"`{network}`")
    rows = [[experiment, ", ".join(networks), *row] for (experiment, *row), networks in alike.items()]
    columns = ["run", "<network", "GPUs", "hours", "<bound by", "hours, shrunk", "<bound by"]
    speeds = f"{decode['mosaic']:,.0f} images/s each, {decode['shrunk']:,.0f} of shrunk ones"
    note = (
        "\nAll epochs of the recipe; *shrunk*: from images stored small.\n"
        f"{CORES} cores decode for each GPU: {machine['environment']['cpu']}, {speeds}.\n"
        f"Gradients are exchanged at {LINK / 1e9:.0f} GB/s: stated, not measured.\n{_stated(speed)}\n"
    )
    return markdown(columns, rows) + note + source("input_pipeline.json", machine["environment"])


def _beside_a_gpu(machines: list[dict[str, Any]]) -> dict[str, Any]:
    return next((machine for machine in machines if machine["environment"]["gpu"]), machines[0])


def train_rate(speed: dict[str, Any], experiment: str, network: str) -> float | None:
    """Images per second of the fastest way of the newest run that trains it on 224x224 at the paper's batch."""
    name = network + RATED[experiment]
    ms = [min(times) for run in speed["runs"] if (times := _step_times(run, name))]
    return 1e3 * BATCH / ms[-1] if ms else None


def _step_times(run: dict[str, Any], network: str) -> list[float]:
    start = f"{network}|training|{BATCH}|"
    return [way["ms"] for name, way in run["ways"].items() if name.startswith(start) and "ms" in way]


def _hours(
    experiment: str, network: str, rate: float | None, decode: dict[str, float]
) -> Iterator[tuple[object, ...]]:
    """At most: all epochs of the paper's recipe, on the images that are not held out."""
    part = EXPERIMENTS[experiment]["paper"]
    recipe = get_recipe(str(part.own.get(network, {}).get("recipe", part.recipe)))
    with torch.device("meta"):
        net = create_model(network, num_classes=CLASSES[experiment])
    gradients = BYTES_PER_GRADIENT * sum(parameter.numel() for parameter in net.parameters())
    steps = recipe.epochs * (round(IMAGES[experiment] * (1 - recipe.holdout)) // recipe.batch_size)
    for gpus in GPUS:
        share = recipe.batch_size / gpus
        # In a ring of devices each passes on all but its own part of the gradients, twice.
        times = {"compute": share / (rate or math.inf), "exchange": 2 * (gpus - 1) / gpus * gradients / LINK}
        times |= {kind: share / (decode[kind] * CORES) for kind in ("mosaic", "shrunk")}
        hours = {name: steps * seconds / 3600 for name, seconds in times.items()}
        ends: list[str] = []
        for kind in ("mosaic", "shrunk"):
            bound = max(("compute", kind, "exchange"), key=lambda name: hours[name])
            ends += [f"**{_long(hours[bound])}**", "decode" if bound == kind else bound]
        if not rate:
            ends = [NOT_MEASURED, "", NOT_MEASURED, ""]
        yield gpus, *ends


def _long(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 10 else f"{hours:.2f}"


def _stated(speed: dict[str, Any]) -> str:
    rates = [(train_rate(speed, run, network), network, run) for run in RATED for network in FULL]
    known = ", ".join(f"`{network}` on {run} {rate:,.0f}" for rate, network, run in rates if rate)
    if not known:
        return f"Compute: no training rate at 224x224 is recorded, so it is {NOT_MEASURED}."
    gpus = dict.fromkeys(run["environment"]["gpu"] for run in speed["runs"])
    return (
        f"Compute: images/s at a batch of {BATCH} of one {', '.join(gpus)} "
        f"(`benchmarks/results/gpu_speed.json`): {known}."
    )
