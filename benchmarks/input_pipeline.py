"""How fast photographs of ILSVRC's size become batches: decoders, ways to scale and crop, and the whole loader.

    python -m benchmarks.input_pipeline --data FOLDER [--train-rate vgg11-gmp=9000] \
        [--out benchmarks/results/input_pipeline.json]

We cannot distribute ILSVRC, so photographs of its size are made from the small ones of FOLDER, such as
Tiny-ImageNet. They are 500x375 JPEGs of quality 90: one small image upscaled (smooth, about 28 kB), or a mosaic of
48 (texture to the last pixel, about 90 kB; ILSVRC's mean is about 110 kB). `shrunk` is the mosaic stored with a
shorter side of 256, as in Caffe's image databases. Rates of decoders, ways and one worker are per second of one
core's time, so other work on the machine does not count; the loader's are per second.

The record holds one entry per processor; a run replaces the entry of its processor.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import parser, rates, write_record
from benchmarks.jpeg_ways import (
    HEIGHT,
    QUALITY,
    WIDTH,
    Decoder,
    decoders,
    photographs,
    versions,
    ways,
)
from lowrank_cnn.core.environment import environment
from lowrank_cnn.data import Augment, Standardize, StreamedLoader, StreamedSplit, open_data


def per_core(work: Decoder, images: list[bytes], repeats: int) -> dict[str, float]:
    """Images per second of this process's time on a core, over rounds of all images."""
    return rates_of(lambda _: len([work(data) for data in images]), repeats + 1)


def rates_of(work: Callable[[int], int], rounds: int) -> dict[str, float]:
    """The median round, the worst and the best; the first warms up."""
    found = []
    for number in range(rounds):
        began = time.process_time()
        found.append(work(number) / (time.process_time() - began))
    return rates(found[1:])


def shards(images: list[bytes], n: int, folder: Path) -> StreamedSplit:
    """n images, the given ones over and over, as shards of a streamed set."""
    pa, pq = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"image": kind, "label": pa.int64()})
    for number in range(4):
        rows = [{"image": {"bytes": images[i % len(images)], "path": None}, "label": i % 2} for i in range(n // 4)]
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, folder / f"train-{number:05d}-of-00004.parquet", row_group_size=100)
    pq.write_table(table.slice(0, 2), folder / "test-00000-of-00001.parquet")
    split = open_data(folder, resident_bytes=0).train
    assert isinstance(split, StreamedSplit)
    return split


def loader_of(split: StreamedSplit, workers: int, batch: int) -> StreamedLoader:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return StreamedLoader(
        split,
        batch_size=batch,
        preprocess=Standardize(torch.full((3,), 120.0), torch.full((3,), 60.0)),
        augment=Augment(resize=256, crop=224),
        seed=0,
        device=device,
        train=True,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        workers=workers,
    )


def worker_rate(split: StreamedSplit, batch: int) -> dict[str, float]:
    """Images per second of one core's time, as a worker prepares them: read, decoded, scaled and cropped."""
    parts = loader_of(split, 0, batch)._parts(0)
    return rates_of(lambda number: len(parts[number, 0].rows), parts.batches)


def loader_rate(split: StreamedSplit, workers: int, batch: int) -> float:
    """Images per second of an epoch as training sees it: read, decoded, framed, on the device, standardised."""
    loader = loader_of(split, workers, batch)
    batches = loader.epoch(0)
    for _ in range(max(1, len(loader) // 4)):  # warm-up: workers start, and prefetched batches are used up
        next(batches)
    began = time.perf_counter()
    images = sum(len(labels) for _, labels in batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return images / (time.perf_counter() - began)


def streamed(images: list[bytes], arguments: argparse.Namespace) -> dict[str, Any]:
    """The rate of one worker, and of the loader with this many of them."""
    with tempfile.TemporaryDirectory() as folder:
        split = shards(images, arguments.images, Path(folder))
        found: dict[str, Any] = {"worker": shown("streamed", "a worker", worker_rate(split, arguments.batch))}
        found["loader"] = {str(n): loader_rate(split, n, arguments.batch) for n in arguments.workers}
        told = {n: f"{rate:,.0f} images/s" for n, rate in found["loader"].items()}
        print("loader, by workers:", told, flush=True)
    return found


def idle_shares(fed_at: dict[str, float], demands: dict[str, float]) -> dict[str, float]:
    """The share of time that a GPU waits for the fastest of these loaders, by network."""
    fed = max(fed_at.values(), default=0.0)
    return {name: max(0.0, 1 - fed / demand) for name, demand in demands.items()}


def shown(title: str, name: str, row: dict[str, float]) -> dict[str, float]:
    print(f"{title}, {name}: {row['images_per_second']:,.0f} images/s", flush=True)
    return row


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    made = parser(__doc__, "input_pipeline.json")
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--photographs", type=int, default=48)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--images", type=int, default=4096, help="of an epoch of the loader")
    made.add_argument("--batch", type=int, default=256)
    made.add_argument("--workers", type=int, nargs="*", default=sorted({0, 1, cores // 4, cores // 2, cores}))
    made.add_argument("--train-rate", action="append", default=[], help="network=images per second of a GPU")
    return made.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for kind, images in photographs(arguments.data, arguments.photographs).items():
        rows[kind] = {
            "bytes": sum(map(len, images)) / len(images),
            "decode": {n: shown(kind, n, per_core(d, images, arguments.repeats)) for n, d in decoders()},
            "frame": {n: shown(kind, n, per_core(w, images, arguments.repeats)) for n, w in ways()},
            **streamed(images, arguments),
        }
    return rows


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    rows = measure(arguments)
    demands = {name: float(rate) for name, _, rate in (text.partition("=") for text in arguments.train_rate)}
    setting = {"size": [WIDTH, HEIGHT], "quality": QUALITY, "photographs": arguments.photographs}
    setting |= {"batch": arguments.batch, "repeats": arguments.repeats, "libraries": versions()}
    measured: dict[str, Any] = {"setting": setting, "rows": rows, "environment": environment()}
    measured["idle"] = idle = idle_shares(rows["mosaic"]["loader"], demands)
    print("loader", {name: f"{share:.0%} idle" for name, share in idle.items()})
    measured["train_rates"] = demands
    before = json.loads(arguments.out.read_text())["machines"] if arguments.out.exists() else []
    others = [one for one in before if one["environment"]["cpu"] != measured["environment"]["cpu"]]
    write_record(
        arguments.out, "input-pipeline", machines=[*others, measured], environment=measured["environment"]
    )


if __name__ == "__main__":
    main()
