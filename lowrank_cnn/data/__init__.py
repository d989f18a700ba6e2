"""Images to train and test on: parquet shards, image folders, CIFAR-10's archive, and built-in digits."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch

from lowrank_cnn.data.augment import Augment
from lowrank_cnn.data.preprocess import (
    Preprocess,
    Standardize,
    Whiten,
    fit_preprocess,
    preprocess_from_dict,
)
from lowrank_cnn.data.readers.parquet import Missing
from lowrank_cnn.data.readers.sources import open_source
from lowrank_cnn.data.readers.splits import RESIDENT_BYTES, Options
from lowrank_cnn.data.resident import ResidentLoader, ResidentSplit
from lowrank_cnn.data.stream.streamed import StreamedLoader, StreamedSplit, decode_rate
from lowrank_cnn.data.types import Bad, Data, Decode, Loader, Problems, Split
from lowrank_cnn.system.errors import LowRankError

__all__ = [
    "Augment",
    "Data",
    "Loader",
    "Preprocess",
    "Problems",
    "ResidentLoader",
    "ResidentSplit",
    "Split",
    "Standardize",
    "StreamedLoader",
    "StreamedSplit",
    "Whiten",
    "decode_rate",
    "fit_preprocess",
    "make_loader",
    "open_data",
    "preprocess_from_dict",
]


def open_data(
    source: str | Path,
    *,
    bad: Bad = "skip",
    limit: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    missing: Missing = "refuse",
    resident_bytes: int = RESIDENT_BYTES,
) -> Data:
    """Open images to train and test on.

    - `source`: `digits`; a folder of parquet shards; a folder with `train/CLASS/*` and `val` or `test`; CIFAR-10's
      binary archive or the folder from it; a Hub repository as `owner/name`.
    - `bad`: whether images that cannot be decoded and wrong labels are left out and counted, or refused.
    - `limit`: at most so many images of each split, class by class in proportion.
    - `image_size`: bring every image to this square, its shorter side first, then its centre.
    - `channels`: 1 or 3 to read all images as grey or in colour; else grey only where the set is.
    - `missing`: whether an absent shard is refused, or counted and done without.
    - `resident_bytes`: splits that take no more than this as uint8, all of one size, are held in memory.
    """
    return open_source(source, Options(bad, limit, image_size, channels, missing, resident_bytes))


def make_loader(
    split: Split,
    *,
    batch_size: int,
    preprocess: Preprocess | None,
    augment: Augment,
    seed: int,
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    train: bool,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    workers: int = 0,
    decode: Decode = "cpu",
) -> Loader:
    """The loader of this kind of split. `batch_size` is that of all processes together.

    `workers` are the processes that decode a streamed split; with `decode="gpu"` they only read, and the device
    decodes. A resident split is on the device already, decoded.
    `channels_last` is the layout of the images, the faster one on the whole (`benchmarks/cpu_layout.py`).
    """
    if workers < 0:
        raise LowRankError(f"workers are 0 or more processes, not {workers}.")
    if decode not in get_args(Decode):
        raise LowRankError(f"images are decoded by cpu or gpu, not {decode}.")
    device = torch.device(device)
    options = {
        "batch_size": batch_size,
        "preprocess": preprocess,
        "augment": augment,
        "seed": seed,
        "device": device,
        "rank": rank,
        "world": world,
        "train": train,
        "dtype": dtype,
        "channels_last": channels_last,
    }
    if isinstance(split, ResidentSplit):
        if decode == "gpu":
            raise LowRankError(
                "decode='gpu' (--decode gpu) is for streamed sets: this one is held in memory, decoded."
            )
        return ResidentLoader(split, **options)
    if isinstance(split, StreamedSplit):
        return StreamedLoader(split, **options, workers=workers, decode=decode)
    raise LowRankError(f"no loader is known for a {type(split).__name__}.")
