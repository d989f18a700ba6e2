"""The user's own Datasets and DataLoaders as a `Data`, with what their samplers choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lowrank_cnn.data.dataset import DatasetSplit
from lowrank_cnn.data.types import Data
from lowrank_cnn.system.errors import LowRankError


def named_classes(dataset: Dataset) -> Sequence[Any]:
    """The names that a data set, or the one that it is a part of, has for its classes; empty if it has none."""
    own: Any = getattr(dataset, "classes", None)
    if own is None and isinstance(dataset, Subset):
        return named_classes(dataset.dataset)
    names = getattr(own, "tolist", lambda: own)()
    return names if isinstance(names, tuple | list) else ()  # some hold the number of classes


def data_of(train: Any, test: Any) -> Data:
    """A `Data` of the user's Datasets or DataLoaders; where there is none to test on, the training one is used.

    Class names are those that the data set has (`classes`), if any.
    """
    to_train, to_test = _split(train), _tested(train if test is None else test)
    names = named_classes(to_train.dataset)
    name = type(to_train.dataset).__name__
    details = {"prepared_by": "user", **({"tested_on": "training images"} if test is None else {})}
    return Data(name, tuple(map(str, names)), to_train, to_test, details)


def for_classes(data: Data) -> Data:
    """The user's own data for a task of classes."""
    train, test = (
        split.for_classes(len(data.classes)) if isinstance(split, DatasetSplit) else split
        for split in (data.train, data.test)
    )
    return replace(data, train=train, test=test)


def is_dataset(value: object) -> bool:
    """Whether this is a torch Dataset or DataLoader."""
    return isinstance(value, Dataset | DataLoader)


def loader_batch(value: object) -> int | None:
    """The batch size of a user's DataLoader; None for a Dataset, or where a batch sampler has none."""
    return getattr(value.batch_sampler, "batch_size", None) if isinstance(value, DataLoader) else None


def _split(part: Any) -> DatasetSplit:
    dataset = part.dataset if isinstance(part, DataLoader) else part
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise LowRankError(
            "fit takes a Dataset with a length, whose items are read by number, or a DataLoader of it, not "
            f"{type(part).__name__}: one that can only be iterated needs a training loop of your own."
        )
    if not isinstance(part, DataLoader):
        return DatasetSplit(dataset)
    if part.batch_sampler is None:
        raise LowRankError("the DataLoader makes no batches (batch_size=None): give it a batch_size.")
    try:
        len(part)
    except (TypeError, NotImplementedError) as error:
        raise LowRankError("the sampler of the DataLoader does not say how long an epoch is (__len__).") from error
    collate = None if part.collate_fn is default_collate else part.collate_fn
    if isinstance(part.sampler, SubsetRandomSampler) and part.batch_size is not None:
        dataset = Subset(dataset, sorted(part.sampler.indices))
        return DatasetSplit(dataset, collate, part.num_workers)
    return DatasetSplit(dataset, collate, part.num_workers, None if _takes_all(part) else part)


def _takes_all(loader: DataLoader) -> bool:
    """Whether the batches of an epoch have each item once, in any order."""
    sampler = loader.sampler
    drawn = isinstance(sampler, RandomSampler) and not sampler.replacement
    whole = drawn and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return loader.batch_size is not None and (whole or isinstance(sampler, SequentialSampler))


def _tested(part: Any) -> DatasetSplit:
    """The split to test on: each item that a sampler of the user's own gives, once, in the order of the data set.

    How often an item is drawn by weights says nothing of what there is to test on.
    """
    split = _split(part)
    if (loader := split.own_loader) is None:
        return split
    if isinstance(loader.sampler, WeightedRandomSampler):
        chosen = loader.sampler.weights.nonzero()[:, 0].tolist()
    else:
        with torch.random.fork_rng(devices=[]):
            chosen = sorted({int(index) for batch in _one_epoch(loader) for index in batch})
    return replace(split, dataset=Subset(split.dataset, chosen), own_loader=None)


def _one_epoch(loader: DataLoader) -> Iterator[Any]:
    """The item numbers of one epoch, in batches; a sampler may go on for ever, and say how long an epoch is."""
    if loader.batch_size is None:
        return islice(iter(loader.batch_sampler or ()), len(loader))
    return iter([islice(loader.sampler, len(loader.sampler))])  # type: ignore[arg-type]
