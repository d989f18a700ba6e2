"""What the samplers of the user's DataLoaders choose is what is trained and tested on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.own import data_of
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.evaluate import evaluate

RECIPE = Recipe(name="own", batch_size=8, epochs=3, lr=0.1)
QUIET = {"progress": False, "device": "cpu"}


def items(count: int = 40, kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    """Dark (0) and bright (1) images in turns."""
    labels = torch.arange(count) % 2
    return kind(labels.float().view(-1, 1, 1, 1).repeat(1, 1, 8, 8), labels)


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class ForEver(Sampler):
    """Goes through the items again and again; the number of an epoch's items is told, or is not."""

    def __iter__(self) -> Iterator[int]:
        return cycle(range(6))


class SixAtATime(ForEver):
    def __len__(self) -> int:
        return 6


def test_a_subset_sampler_decides_what_is_tested_on() -> None:
    """The usual split of one data set by two samplers: nothing is trained and tested on."""
    seen: list[int] = []

    class Noted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            seen.append(index)
            return super().__getitem__(index)

    train, test = (
        DataLoader(items(kind=Noted), 8, sampler=SubsetRandomSampler(part)) for part in (range(32), range(32, 40))
    )
    record = fit(classifier(), (train, test), RECIPE, **QUIET)
    assert (record.result["n"], record.data["train"], record.data["test"]) == (8, 32, 8)
    assert evaluate(classifier(), test, **QUIET).n == 8
    seen.clear()
    fit(classifier(), train, dataclasses.replace(RECIPE, holdout=8), **QUIET)
    assert set(seen) == set(range(32))


@pytest.mark.parametrize(
    ("sampler", "tested"),
    [
        (WeightedRandomSampler([1.0, 0.0] * 20, 8), 20),
        (BatchSampler(range(12), 8, drop_last=False), 12),
        (RandomSampler(range(40), num_samples=6), 6),
        (RandomSampler(range(40)), 40),
    ],
)
def test_a_test_set_is_what_its_sampler_gives(sampler: Any, tested: int) -> None:
    given = (
        {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler, "batch_size": 8}
    )
    drawn = torch.random.get_rng_state()
    assert len(data_of(items(), DataLoader(items(), **given)).test) == tested
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_a_sampler_that_draws_some_images_draws_as_many_to_train_on() -> None:
    met = []

    def collate(items: list) -> Any:
        met.append(len(items))
        return default_collate(items)

    sampler = RandomSampler(items(), num_samples=16)
    loader = DataLoader(items(), 8, sampler=sampler, collate_fn=collate)
    fit(classifier(), (loader, items(8)), RECIPE, epochs=1, **QUIET)
    assert met == [8, 8]


def test_nothing_is_held_out_of_what_a_sampler_draws() -> None:
    loader = DataLoader(items(), 8, sampler=WeightedRandomSampler([1.0, 0.0] * 20, 16))
    with pytest.raises(LowRankError, match="cannot be held out where a DataLoader has a sampler of its own"):
        fit(classifier(), loader, dataclasses.replace(RECIPE, holdout=8), **QUIET)


def test_a_sampler_without_an_end_tells_how_long_an_epoch_is() -> None:
    assert len(data_of(items(), DataLoader(items(), 2, sampler=SixAtATime())).test) == 6
    for endless in ({"sampler": ForEver()}, {"batch_sampler": BatchSampler(ForEver(), 2, drop_last=False)}):
        with pytest.raises(LowRankError, match="does not say how long an epoch is"):
            data_of(items(), DataLoader(items(), **endless))
