"""Images to train and test on: parquet shards, image folders, CIFAR-10's archive, and built-in digits."""

from __future__ import annotations

import torch

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.augment import Augment
from lowrank_cnn.data.own import DatasetLoader, DatasetSplit
from lowrank_cnn.data.preprocess import Preprocess, Standardize, Whiten, fit_preprocess, preprocess_from_dict
from lowrank_cnn.data.resident import ResidentLoader, ResidentSplit
from lowrank_cnn.data.sources import open_data
from lowrank_cnn.data.streamed import StreamedLoader, StreamedSplit, decode_rate
from lowrank_cnn.data.types import Data, Decode, Loader, Problems, Split

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

_LOADERS = {ResidentSplit: ResidentLoader, StreamedSplit: StreamedLoader, DatasetSplit: DatasetLoader}


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
    loader = next((loader for kind, loader in _LOADERS.items() if isinstance(split, kind)), None)
    if loader is None:
        raise LowRankError(f"no loader is known for a {type(split).__name__}.")
    if augment.alternate and train and not isinstance(split, ResidentSplit):
        raise LowRankError(
            "images are mirrored in alternation (alternate_mirror) where the set is held in memory: this one is "
            "not, set alternate_mirror=false."
        )
    return loader(
        split,
        batch_size=batch_size,
        preprocess=preprocess,
        augment=augment,
        seed=seed,
        device=device,
        rank=rank,
        world=world,
        train=train,
        dtype=dtype,
        channels_last=channels_last,
        workers=workers,
        decode=decode,
    )
