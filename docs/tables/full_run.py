"""The arithmetic of a full run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tables.form import NOT_MEASURED, JsonRecord, from_record, markdown, record, source

FULL = ("vgg11-gmp", "vgg11-gmp-lr")
RATED = {"ilsvrc": "", "places": "/2"}
"""How `gpu_speed.json` names the networks of an experiment: those of Places have a stride of 2."""
BATCH = 256


@from_record("input_pipeline.json")
def full_run(found: JsonRecord) -> str:
    """Hours of a full run on 1, 8 and 64 GPUs, part by part."""
    from lowrank_cnn.paper.experiments import BETWEEN, CORES, IMAGES, NODE, WITHIN

    machine = _beside_a_gpu(found["machines"])
    speed = record("gpu_speed.json")
    decode = {kind: machine["rows"][kind]["worker"]["images_per_second"] for kind in ("mosaic", "shrunk")}
    rows: list[list[object]] = []
    for experiment in IMAGES:
        for network in FULL:
            rows += _hours(experiment, network, train_rate(speed, experiment, network), decode)
    columns = ["run", "<network", "GPUs", "compute", "decode", "decode, shrunk", "exchange"]
    columns += ["hours", "<bound by", "hours, shrunk", "<bound by"]
    speeds = f"{decode['mosaic']:,.0f} images/s each, {decode['shrunk']:,.0f} of shrunk ones"
    links = f"{WITHIN / 1e9:.0f} GB/s within {NODE} GPUs, {BETWEEN / 1e9:.0f} GB/s beyond"
    fed = [f"{CORES * rate:,.0f}" for rate in decode.values()]
    note = (
        "\nHours of each part alone, and of the run, whose parts go on side by side; all epochs of the recipe.\n"
        f"{CORES} cores decode for each GPU: {machine['environment']['cpu']}, {speeds}.\n"
        f"They bound a GPU that trains on more than {fed[0]} images/s, or on more than {fed[1]} shrunk ones.\n"
        f"Gradients are exchanged at {links}: stated, not measured.\n{_stated(speed)}\n"
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


def _hours(experiment: str, network: str, rate: float | None, decode: dict[str, float]) -> Iterator[list[object]]:
    from lowrank_cnn.paper.experiments import CORES, GPUS, Supply, demand_of
    from lowrank_cnn.paper.experiments import full_run as run_on

    demand = demand_of(experiment, network)
    for gpus in GPUS:
        runs = [
            run_on(demand, Supply(rate or math.inf, decode[kind], CORES), gpus) for kind in ("mosaic", "shrunk")
        ]
        parts = runs[0].compute if rate else None, runs[0].decode, runs[1].decode, runs[0].exchange
        cells = [NOT_MEASURED if part is None else _long(part) for part in parts]
        ends = [cell for run in runs for cell in (f"**{_long(run.hours)}**", run.bound)]
        yield [experiment, f"`{network}`", gpus, *cells, *(ends if rate else [NOT_MEASURED, "", NOT_MEASURED, ""])]


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
        f"(`benchmarks/results/gpu_speed.json`): {known}. Shares of a batch over many GPUs run less efficiently."
    )
