from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import (
    Augment,
    Data,
    Problems,
    ResidentLoader,
    ResidentSplit,
    Standardize,
    StreamedLoader,
    make_loader,
    open_data,
    resident,
)
from lowrank_cnn.data.own import DatasetLoader, DatasetSplit
from lowrank_cnn.data.types import generator, stratified

PLAIN = Augment(mirror=False)


@pytest.fixture
def split() -> ResidentSplit:
    """22 images whose every pixel is the label, which is the number of the image."""
    numbers = torch.arange(22)
    return ResidentSplit.of(numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 6).clone(), numbers)


def loader(split: ResidentSplit, *, train: bool, **options: object) -> ResidentLoader:
    chosen: dict = {"batch_size": 4, "preprocess": None, "augment": PLAIN, "seed": 3, "device": "cpu"}
    return ResidentLoader(split, train=train, **{**chosen, **options})


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def test_arrays_will_do_and_a_split_reaches_another_process_whole(split: ResidentSplit) -> None:
    arrays = ResidentSplit.of(np.zeros((3, 1, 4, 4), np.uint8), np.arange(3, dtype=np.int32))
    assert (arrays.labels.tolist(), arrays.labels.dtype) == ([0, 1, 2], torch.int64)
    part = split.subset(torch.tensor([3, 5, 2]))
    copy = pickle.loads(pickle.dumps(part))
    assert torch.equal(copy.images, part.images)
    assert torch.equal(copy.labels, part.labels)
    assert copy.fingerprint == part.fingerprint


def random_split() -> ResidentSplit:
    images = torch.randint(0, 256, (50, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    return ResidentSplit.of(images.to(torch.uint8), torch.arange(50))


VARIED = Augment(crop=7, pad=2, mirror=True, cutout=3)


def test_chunks_do_not_change_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = joined(list(loader(random_split(), train=True, augment=VARIED).epoch(0)))
    monkeypatch.setattr(resident, "_CHUNK_BYTES", 1)
    pieces = joined(list(loader(random_split(), train=True, augment=VARIED).epoch(0)))
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_a_resize_is_applied_once_before_crops() -> None:
    split = random_split()
    augment = Augment(resize=16, crop=14)
    images, _ = joined(list(loader(split, train=False, augment=augment).epoch(0)))
    whole = torch.nn.functional.interpolate(split.images.float() / 255, (16, 16), mode="bilinear", antialias=True)
    assert torch.allclose(images, whole[:, :, 1:15, 1:15])
    assert next(loader(split, train=True, augment=augment).epoch(0))[0].shape == (4, 3, 14, 14)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (torch.zeros(2, 3, 8, 8), [0, 1], r"uint8 \[n, C, H, W\], not torch.float32"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.tensor([0, 1]), r"looks like \[n, H, W, C\].*permute"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0.9, 0.1]), "whole class numbers.*float32"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, -1]), "from 0 on, not -1"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([[0], [1]]), r"not torch.int64 \[2, 1\]"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [0, 1], "one tensor of class numbers"),
        ([torch.zeros(3, 8, 8, dtype=torch.uint8)], torch.tensor([0]), "not a list: use torch.stack"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0]), "2 images cannot have 1 label"),
    ],
)
def test_what_is_no_split_is_refused(images: object, labels: object, says: str) -> None:
    with pytest.raises(LowRankError, match=says):
        ResidentSplit.of(images, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("augment", [Augment(), Augment(crop=8, pad=3, cutout=4), Augment(crop=6, alternate=True)])
def test_a_set_held_as_bytes_gives_the_same_batches(
    monkeypatch: pytest.MonkeyPatch, augment: Augment, train: bool, dtype: torch.dtype
) -> None:
    images = torch.randint(0, 256, (40, 3, 9, 8), generator=torch.Generator().manual_seed(0)).byte()
    split = ResidentSplit.of(images, torch.arange(40) % 4)
    options = {"augment": augment, "seed": 1, "device": "cpu", "train": train, "dtype": dtype}

    def batches() -> list[tuple[Tensor, Tensor]]:
        loader = ResidentLoader(split, batch_size=16, preprocess=Standardize.fit(split), **options)
        return list(loader.epoch(3))

    prepared = batches()
    monkeypatch.setattr(resident, "MOST_PREPARED_BYTES", 0)
    assert ResidentLoader(split, batch_size=16, preprocess=None, **options)._images.dtype == torch.uint8
    for (ours, our_labels), (theirs, their_labels) in zip(batches(), prepared, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
        assert torch.equal(our_labels, their_labels)


def test_each_kind_of_split_has_its_loader(shards: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "preprocess": None, "augment": PLAIN, "seed": 0, "device": "cpu"}
    streamed = open_data(shards, resident_bytes=0).train
    own = DatasetSplit(TensorDataset(torch.zeros(8, 3, 4, 4), torch.arange(8) % 2))
    for kind, split in ((ResidentLoader, random_split()), (StreamedLoader, streamed), (DatasetLoader, own)):
        assert type(make_loader(split, train=True, **options)) is kind
    alternate = {**options, "augment": Augment(alternate=True)}
    for split, wrong, says in (
        (streamed, alternate, "alternate_mirror is for sets that are held in memory"),
        (own, {"world": 2}, "trained on by one process"),
        (
            random_split(),
            {"workers": -1},
            "workers must be a whole number of at least 0 and at most 1,024, not -1",
        ),
        (random_split(), {"batch_size": 5, "world": 2}, "batch of 5 does not divide over 2"),
        (random_split(), {"batch_size": 51}, "50 images cannot fill one batch of 51"),
        (random_split(), {"rank": 2, "world": 2}, "rank 2 of 2"),
    ):
        with pytest.raises(LowRankError, match=says):
            make_loader(split, train=True, **{**options, **wrong})


def test_problems_are_counted_once_and_the_first_named() -> None:
    problems = Problems()
    problems.refuse()  # nothing yet
    assert (bool(problems), str(problems)) == (False, "none")
    for _ in range(2):  # as in two epochs
        for number in range(8):
            problems.add("undecodable image", f"{number}.jpg")
    problems.add("wrong label", "x.parquet:3: -1")
    assert problems.total == 9
    assert problems.counts == {"undecodable image": 8, "wrong label": 1}
    assert problems.examples["undecodable image"] == [f"{number}.jpg" for number in range(5)]
    assert str(problems).startswith("8 undecodable images (0.jpg, 1.jpg")
    other = Problems()
    other.add_all(problems.found)  # as one process tells another
    assert other.found == problems.found
    with pytest.raises(LowRankError, match=r"x\.parquet:3: -1.*bad='skip'"):
        problems.refuse()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 5), st.data())
def test_stratified_takes_every_class_in_proportion(sizes: list[int], seed: int, data: st.DataObject) -> None:
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=generator(seed))]
    n = data.draw(st.integers(1, len(labels)))
    chosen = stratified(labels, n, seed=seed)
    assert len(chosen) == n == len(set(chosen.tolist()))
    counts = labels[chosen].bincount(minlength=len(sizes))
    for size, count in zip(sizes, counts.tolist(), strict=True):
        assert abs(count - size * n / len(labels)) <= 1


def test_holdout_parts_the_training_images() -> None:
    images = torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1)
    split = ResidentSplit.of(images, torch.arange(60) % 3)
    data = Data("set", ("a", "b", "c"), split, split)
    held = data.holdout(12, seed=4)
    assert held.test.labels.bincount().tolist() == [4, 4, 4]
    together = torch.cat([held.train.images, held.test.images]).flatten().tolist()
    assert sorted(together) == list(range(60))
    again, other = data.holdout(12, seed=4), data.holdout(12, seed=5)
    assert torch.equal(again.test.images, held.test.images)
    assert not torch.equal(other.test.images, held.test.images)
    assert torch.equal(held.test.images.flatten() % 3, held.test.labels)
    for n in (0, -1, 60, 61):
        with pytest.raises(LowRankError, match=f"cannot hold out {n} of the 60"):
            data.holdout(n, seed=0)
    with pytest.raises(LowRankError, match=r"class number 2, and 2 classes, numbered from 0 to 1"):
        dataclasses.replace(data, classes=("a", "b")).check_labels()
