"""Images to train and test on: parquet shards, image folders, CIFAR-10's archive, and built-in digits."""

from __future__ import annotations

from typing import Any

from lowrank_cnn.data.augment import Augment
from lowrank_cnn.data.inspect import inspect_data
from lowrank_cnn.data.own import DatasetLoader, DatasetSplit
from lowrank_cnn.data.preprocess import Preprocess, Standardize, Whiten, fit_preprocess, preprocess_from_dict
from lowrank_cnn.data.resident import Loader, ResidentLoader, ResidentSplit
from lowrank_cnn.data.sources import open_data
from lowrank_cnn.data.streamed import StreamedLoader, StreamedSplit
from lowrank_cnn.data.types import Data, Problems, Split

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
    "fit_preprocess",
    "inspect_data",
    "make_loader",
    "open_data",
    "preprocess_from_dict",
]

_LOADERS = {ResidentSplit: ResidentLoader, StreamedSplit: StreamedLoader, DatasetSplit: DatasetLoader}


def make_loader(split: Split, **options: Any) -> Loader:
    """The loader of this kind of split.

    - `batch_size`: that of all processes together; this one is number `rank` of `world`.
    - `preprocess`, `augment`, `seed`: how images are prepared and varied. `train=False` only prepares them.
    - `device`, `dtype` and `channels_last`: where images go, in which precision and layout. Channels last is the
      faster one on the whole (`benchmarks/cpu_layout.py`).
    - `workers`: the processes that decode a streamed split. A resident split is on the device already.
    """
    return _LOADERS[type(split)](split, **options)
