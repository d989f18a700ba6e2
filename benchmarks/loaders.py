"""How fast a folder of large photographs becomes batches, by each way to store it, and how long a GPU waits.

    python -m benchmarks.loaders [--network resnet18-lr] [--out benchmarks/results/loaders.json]

The script makes the photographs itself: 500x375 JPEGs of about 110 kB, the size of ILSVRC's, with the spectrum of
photographs (amplitude falls as 1/frequency). They lie in class folders, a few of them under many names. Training
sees crops of 160 pixels from a shorter side of 183. The ways are:

- full size: the JPEGs are read, decoded and scaled in every epoch;
- held as bytes: all images are decoded before the first epoch and stay on the device, one byte for each value;
- held as floats: the same, preprocessed once, which takes two or four times as much memory.

Rates are images per second of the wall clock, the median of several epochs. On a GPU, `--network` is trained with
each loader: the idle share is one minus its rate over the rate with data already on the GPU.

The record holds one entry for each machine; a run replaces the entry of its machine.
"""

from __future__ import annotations

import argparse
import io
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
from torch import Tensor, nn

from benchmarks.common import parser, rates, write_record
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Augment, Loader, Split, Standardize, StreamedLoader, make_loader, open_data, resident
from lowrank_cnn.models import create_model
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.step import TrainingStep, build_update, fused_to_train

WIDTH, HEIGHT, QUALITY = 500, 375, 90
CROP, SIDE = 160, 183
CONTRAST = 45.0
MEAN, DEVIATION = torch.full((3,), 128.0), torch.full((3,), CONTRAST)
CLASSES = 2

Step = Callable[[Tensor, Tensor], None]


def photograph(seed: int) -> bytes:
    """A JPEG of noise whose amplitude falls as 1/frequency, mostly grey, as photographs are."""
    from PIL import Image

    draw = torch.Generator().manual_seed(seed)
    down, across = torch.fft.fftfreq(HEIGHT)[:, None], torch.fft.rfftfreq(WIDTH)[None]
    falling = 1 / (down.square() + across.square()).sqrt().clamp_min(1 / WIDTH)
    planes = torch.fft.irfft2(
        torch.fft.rfft2(torch.randn(4, HEIGHT, WIDTH, generator=draw)) * falling, (HEIGHT, WIDTH)
    )
    planes = planes / planes.std(dim=(1, 2), keepdim=True)
    pixels = 128 + CONTRAST * (planes[:1] + 0.3 * planes[1:]).permute(1, 2, 0)
    out = io.BytesIO()
    Image.fromarray(pixels.clamp(0, 255).byte().numpy()).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def make_photographs(folder: Path, images: int, different: int) -> float:
    """Write class folders of this many files, links to a few different ones; return the mean number of bytes."""
    for split in ("train", "test"):
        for label in range(CLASSES):
            (folder / split / f"class{label}").mkdir(parents=True)
    originals = [folder / "test" / f"class{number % CLASSES}" / f"{number}.jpg" for number in range(different)]
    for number, path in enumerate(originals):
        path.write_bytes(photograph(number))
    for number in range(images):
        label = number // different % CLASSES
        os.link(originals[number % different], folder / "train" / f"class{label}" / f"{number}.jpg")
    return sum(path.stat().st_size for path in originals) / different


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


def ways(full: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Loader]]]:
    """Each way with the function that makes its loader; making it is what happens before the first epoch."""

    def streamed() -> Loader:
        split = open_data(full, resident_bytes=0, progress=False).train
        return loader_of(split, arguments, resize=SIDE, workers=arguments.workers)

    def held(most_prepared: float) -> Loader:
        with mock.patch.object(resident, "MOST_PREPARED_BYTES", most_prepared):
            split = open_data(full, image_size=SIDE, resident_bytes=2**40, progress=False).train
            return loader_of(split, arguments)

    yield "full size", streamed
    yield "held as bytes", lambda: held(0)
    yield "held as floats", lambda: held(float("inf"))


def epoch_rate(loader: Loader, epoch: int, seconds: float, step: Step | None = None) -> float:
    """Images per second of an epoch, or of its first `seconds`; while workers start, a quarter warms up."""
    warm = len(loader) // 4 if isinstance(loader, StreamedLoader) else 0
    wait()
    images, began = 0, time.perf_counter()
    for number, (inputs, labels) in enumerate(loader.epoch(epoch)):
        if warm and number == warm:
            wait()
            images, began = 0, time.perf_counter()
        if step:
            step(inputs, labels)
        images += len(labels)
        if number > warm and time.perf_counter() - began > seconds:
            break
    wait()
    return images / (time.perf_counter() - began)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def training_step(arguments: argparse.Namespace) -> tuple[Step, float]:
    """The step of a network, as a run takes it, and its images per second on a batch that is already there."""
    device = torch.device(arguments.device)
    network = create_model(arguments.network, num_classes=CLASSES, norm="batch").to(device)
    network = network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    on_gpu = device.type == "cuda"
    forward = AutocastForward(fused_to_train(network, (3, CROP, CROP)) if on_gpu else network)
    step = TrainingStep(network, forward, lambda loss: loss.backward(), Recipe(lr=1e-4), device)
    images = torch.randn(arguments.batch, 3, CROP, CROP, device=device)
    images = images.to(torch.bfloat16 if on_gpu else torch.float32, memory_format=torch.channels_last)
    labels = torch.arange(arguments.batch, device=device) % CLASSES
    step.prepare(1e-4, 0)
    update = build_update(step, images, labels, graphs=on_gpu)
    return update, alone_rate(update, images, labels, arguments.seconds)


class AutocastForward(nn.Module):
    """A network that computes in bfloat16 on a GPU."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            return self.network(images)


def alone_rate(update: Step, images: Tensor, labels: Tensor, seconds: float) -> float:
    """Images per second of steps that follow each other without a wait, the best of three rounds."""

    def steps_take(count: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            update(images, labels)
        wait()
        return time.perf_counter() - began

    steps_take(1)
    count = max(1, int(seconds / 4 / steps_take(1)))
    return count * len(images) / min(steps_take(count) for _ in range(3))


def measure(full: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The record after each way, so an interrupted run keeps its results."""
    update, alone = training_step(arguments) if arguments.network else (None, None)
    print(f"{arguments.network} alone: {alone} images/s", flush=True)
    rows, refused = {}, {}
    for name, make in ways(full, arguments):
        if arguments.ways and name not in arguments.ways:
            continue
        try:
            rows[name] = measure_way(make, update, alone, arguments)
        except LowRankError as error:
            refused[name] = str(error)
        print(name, rows.get(name) or refused[name], flush=True)
        yield {"rows": rows, "not_measured": refused, "step_images_per_second": alone}


def measure_way(
    make: Callable[[], Loader], update: Step | None, alone: float | None, arguments: argparse.Namespace
) -> dict[str, float]:
    began = time.perf_counter()
    loader = make()
    row = {"seconds_before": time.perf_counter() - began}

    def epochs(step: Step | None = None) -> list[float]:
        return [epoch_rate(loader, epoch, arguments.seconds, step) for epoch in range(arguments.repeats)]

    row |= rates(epochs())
    if update and alone:
        trained = median(epochs(update))
        row |= {"trained_per_second": trained, "idle": max(0.0, 1 - trained / alone)}
    return row


def parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    made = parser(__doc__, "loaders.json")
    made.add_argument("--ways", nargs="*", help="only these, by name: 'held as bytes'")
    made.add_argument("--images", type=int, default=16384)
    made.add_argument("--photographs", type=int, default=64, help="different ones among the images")
    made.add_argument("--batch", type=int, default=256)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--seconds", type=float, default=3.0, help="the most that is measured of an epoch")
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    made.add_argument("--network", default="resnet18-lr" if cuda else None)
    made.add_argument("--device", default="cuda" if cuda else "cpu")
    return made.parse_args()


def main() -> None:
    arguments = parse()
    before = json.loads(arguments.out.read_text())["machines"] if arguments.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder)
        mean = make_photographs(full, arguments.images, arguments.photographs)
        setting = {
            "size": [WIDTH, HEIGHT],
            "bytes": mean,
            "side": SIDE,
            "crop": CROP,
            "network": arguments.network,
        }
        setting |= {name: getattr(arguments, name) for name in ("images", "batch", "repeats", "workers", "device")}
        for measured in measure(full, arguments):
            machine: dict[str, Any] = {"setting": setting, **measured, "environment": environment()}
            others = [one for one in before if hardware(one) != hardware(machine)]
            write_record(arguments.out, "loaders", machines=[*others, machine], environment=machine["environment"])


def hardware(machine: dict[str, Any]) -> tuple[Any, Any]:
    return machine["environment"].get("cpu"), machine["environment"].get("gpu")


if __name__ == "__main__":
    main()
