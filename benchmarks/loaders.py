"""How fast a set of large photographs becomes batches, by each way to keep it, and how long a GPU waits for them.

    python -m benchmarks.loaders --data FOLDER [--network resnet18-lr] [--out benchmarks/results/loaders.json]

The photographs are 500x375 JPEGs made from the small images of FOLDER (`jpeg_ways`), in parquet shards. Training
sees crops of 160 pixels from a shorter side of 183. The ways are:

- full size: the JPEGs are read, decoded and scaled in every epoch;
- shrunk once: the same from JPEGs that `lowrank shrink` stored with a shorter side of 183;
- held as bytes: all images are decoded before the first epoch and stay on the device, one byte for each value;
- held as floats: the same, preprocessed once, which takes two or four times as much memory;
- decoded by the GPU: the full-size JPEGs again, where a GPU can decode them.

Rates are images per second of the wall clock, the median of several epochs. On a GPU, `--network` is trained with
each loader: the idle share is what is missing to its rate on a batch that is already there.

The record holds one entry for each machine; a run replaces that of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.input_pipeline import shards
from benchmarks.jpeg_ways import HEIGHT, WIDTH, gpu_decoder, photographs
from lowrank_cnn.data import Augment, Loader, Split, Standardize, make_loader, open_data, resident
from lowrank_cnn.data.shrinking import shrink
from lowrank_cnn.models import create_model
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.files import write_json
from lowrank_cnn.train.execution import EAGER, StepBuilder
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import TrainingStep

CROP, SIDE = 160, 183
MEAN, DEVIATION = torch.full((3,), 120.0), torch.full((3,), 60.0)

Step = Callable[[Tensor, Tensor], None]


def loader_of(split: Split, arguments: argparse.Namespace, *, resize: int | None = None, **options: Any) -> Loader:
    return make_loader(
        split,
        batch_size=arguments.batch,
        preprocess=Standardize(MEAN, DEVIATION),
        augment=Augment(resize=resize, crop=CROP),
        seed=0,
        device=arguments.device,
        train=True,
        dtype=torch.bfloat16 if arguments.device == "cuda" else torch.float32,
        **options,
    )


def ways(full: Path, shrunk: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Loader]]]:
    """Each way with the function that makes its loader; making it is what happens before the first epoch."""

    def streamed(folder: Path, **options: Any) -> Loader:
        split = open_data(folder, resident_bytes=0, progress=False).train
        return loader_of(split, arguments, resize=SIDE, workers=arguments.workers, **options)

    def shrunk_once() -> Loader:
        shrink(full, shrunk, side=SIDE, workers=arguments.workers)
        return streamed(shrunk)

    def held(most_prepared: float) -> Loader:
        with mock.patch.object(resident, "MOST_PREPARED_BYTES", most_prepared):
            return loader_of(open_data(full, image_size=SIDE, progress=False).train, arguments)

    yield "full size", lambda: streamed(full)
    yield "shrunk once", shrunk_once
    yield "held as bytes", lambda: held(0)
    yield "held as floats", lambda: held(float("inf"))
    if gpu_decoder():
        yield "decoded by the GPU", lambda: streamed(full, decode="gpu")


def epoch_rate(loader: Loader, epoch: int, step: Step | None = None) -> float:
    """Images per second of an epoch; its first quarter warms up, while the workers start."""
    batches, images = loader.epoch(epoch), 0
    for number, (inputs, labels) in enumerate(batches):
        if number == max(1, len(loader) // 4):
            wait()
            began, images = time.perf_counter(), 0
        if step:
            step(inputs, labels)
        images += len(labels)
    wait()
    return images / (time.perf_counter() - began)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def training_step(arguments: argparse.Namespace) -> tuple[Step, float]:
    """The step of a network, as a run takes it, and its images per second on a batch that is already there."""
    device = torch.device(arguments.device)
    network = create_model(arguments.network, num_classes=2, norm="batch").to(device)
    network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]

    def forward(images: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return network(images)

    step = TrainingStep(network, forward, lambda loss: loss.backward(), Recipe(lr=1e-4), device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    images = torch.randn(arguments.batch, 3, CROP, CROP, device=device, dtype=dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(arguments.batch, device=device) % 2
    step.prepare(1e-4, 0)
    builder = StepBuilder({EAGER: forward}, graphs=device.type == "cuda")  # type: ignore[dict-item]
    update, _ = builder.fastest(step, images, labels, steps_left=1)
    rates = []
    for _ in range(arguments.repeats + 1):
        wait()
        began = time.perf_counter()
        update(images, labels)
        wait()
        rates.append(len(images) / (time.perf_counter() - began))
    return update, median(rates[1:])


def measure(full: Path, shrunk: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    update, alone = training_step(arguments) if arguments.network else (None, None)
    rows = {}
    for name, make in ways(full, shrunk, arguments):
        began = time.perf_counter()
        loader = make()
        before = time.perf_counter() - began
        rates = [epoch_rate(loader, epoch) for epoch in range(arguments.repeats)]
        row = {"images_per_second": median(rates), "lowest": min(rates), "highest": max(rates)}
        rows[name] = {**row, "seconds_before": before}
        if update and alone:
            trained = median(epoch_rate(loader, epoch, update) for epoch in range(arguments.repeats))
            rows[name] |= {"trained_per_second": trained, "idle": max(0.0, 1 - trained / alone)}
        print(name, {key: round(value, 3) for key, value in rows[name].items()}, flush=True)
    return {"rows": rows, "step_images_per_second": alone}


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--photographs", type=int, default=48, help="different ones among the images")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--network", default="resnet18-lr" if cuda else None)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loaders.json"))
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        full, shrunk = Path(folder, "full"), Path(folder, "shrunk")
        full.mkdir()
        shards(photographs(arguments.data, arguments.photographs)["mosaic"], arguments.images, full)
        measured = measure(full, shrunk, arguments)
    setting = {"size": [WIDTH, HEIGHT], "side": SIDE, "crop": CROP, "network": arguments.network}
    setting |= {name: getattr(arguments, name) for name in ("images", "batch", "repeats", "workers", "device")}
    machine = {"setting": setting, **measured, "environment": environment()}
    before = json.loads(arguments.out.read_text())["machines"] if arguments.out.exists() else []
    others = [one for one in before if hardware(one) != hardware(machine)]
    record = {"kind": "loaders", "machines": [*others, machine], "environment": machine["environment"]}
    write_json(arguments.out, record)


def hardware(machine: dict[str, Any]) -> tuple[Any, Any]:
    return machine["environment"].get("cpu"), machine["environment"].get("gpu")


if __name__ == "__main__":
    main()
