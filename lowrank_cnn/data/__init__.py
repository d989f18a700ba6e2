"""Images to train and test on: parquet shards, image folders, CIFAR-10's archive, and built-in digits."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.augment import Augment
from lowrank_cnn.data.own import DatasetLoader, DatasetSplit
from lowrank_cnn.data.parquet import Missing
from lowrank_cnn.data.preprocess import Preprocess, Standardize, Whiten, fit_preprocess, preprocess_from_dict
from lowrank_cnn.data.resident import ResidentLoader, ResidentSplit
from lowrank_cnn.data.sources import RESIDENT_BYTES, ReadOptions, open_source, parse_image_size
from lowrank_cnn.data.streamed import StreamedLoader, StreamedSplit, decode_rate
from lowrank_cnn.data.types import Bad, Data, Decode, Loader, Problems, Split, check_workers

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
    image_size: int | str | tuple[int, int] | None = None,
    default_size: int | str | tuple[int, int] | None = None,
    channels: int | None = None,
    missing: Missing = "refuse",
    resident_bytes: int = RESIDENT_BYTES,
    test: str | Path | None = None,
    val_split: float | None = None,
    val_seed: int = 0,
    class_names: str | Path | None = None,
    only_test: bool = False,
    progress: bool = True,
) -> Data:
    """Open images to train and test on.

    >>> data = open_data("digits", limit=100)
    >>> len(data.train), data.train.size
    (100, (1, 28, 28))

    - `source`: a folder with `CLASS/*`, or with `train/CLASS/*` and `val` or `test`; a .csv with columns path and
      label; a folder of parquet shards; a Hub repository as `owner/name`; CIFAR-10's binary archive or the folder
      from it; `digits`. Of a set with both, `test` is tested on, and a warning says that `val` is not used.
    - `test`: another source whose images to test on; its classes are matched by name.
    - `val_split`: the share of each class to test on, where the set has no test images; 0.2 if not given.
      `val_seed` chooses which.
    - `class_names`: a file with the names to show for classes, a class folder and its name in each line.
    - `image_size`: bring every image to this square, or height and width ("48x64"): scaled to cover it, then its
      centre. `default_size` does so only where images are large or differ in size.
    - `channels`: 1 or 3 to read all images as grey or in colour; else grey only where the set is.
    - `bad`: whether images that cannot be decoded and wrong labels are left out and counted, or refused.
    - `limit`: at most this many images of each split, class by class in proportion.
    - `missing`: whether an absent shard is refused, or counted and done without.
    - `resident_bytes`: splits that take no more than this as uint8, all of one size, are held in memory.
    - `only_test`: for evaluation alone. A set without test images is one to test on, and needs none to train on.
    - `progress`: count the decoded images on standard error.
    """
    options = ReadOptions(
        bad=bad,
        limit=limit,
        image_size=parse_image_size(image_size),
        default_size=parse_image_size(default_size),
        channels=channels,
        missing=missing,
        resident_bytes=resident_bytes,
        test=test,
        val_split=val_split,
        val_seed=val_seed,
        class_names=class_names,
        only_test=only_test,
        progress=progress,
    )
    return open_source(source, options)


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
    check_workers(workers)
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
    if augment.alternate and train:
        raise LowRankError(
            "images are mirrored in alternation (alternate_mirror) where the set is held in memory: this one is "
            "not, set alternate_mirror=false."
        )
    if isinstance(split, DatasetSplit):
        places = {key: options[key] for key in ("batch_size", "seed", "device", "rank", "world", "train")}
        return DatasetLoader(split, **places, workers=workers)
    if isinstance(split, StreamedSplit):
        return StreamedLoader(split, **options, workers=workers, decode=decode)
    raise LowRankError(f"no loader is known for a {type(split).__name__}.")
