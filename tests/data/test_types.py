from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, Problems, ResidentSplit
from lowrank_cnn.data.types import check_batches, generator, stratified


def test_problems_are_counted_once_and_the_first_named() -> None:
    problems = Problems()
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
    assert other == problems
    with pytest.raises(LowRankError, match=r"x\.parquet:3: -1.*--bad skip"):
        problems.refuse()


def test_no_problems_refuse_nothing() -> None:
    Problems().refuse()
    assert not Problems()
    assert str(Problems()) == "none"


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
    assert isinstance(held.train, ResidentSplit)
    assert isinstance(held.test, ResidentSplit)
    assert held.test.labels.bincount().tolist() == [4, 4, 4]
    together = torch.cat([held.train.images, held.test.images]).flatten().tolist()
    assert sorted(together) == list(range(60))
    again, other = data.holdout(12, seed=4), data.holdout(12, seed=5)
    assert isinstance(again.test, ResidentSplit)
    assert isinstance(other.test, ResidentSplit)
    assert torch.equal(again.test.images, held.test.images)
    assert not torch.equal(other.test.images, held.test.images)
    assert torch.equal(held.test.images.flatten() % 3, held.test.labels)


@pytest.mark.parametrize("n", [0, -1, 60, 61])
def test_holdout_must_leave_something(n: int) -> None:
    split = ResidentSplit.of(torch.zeros(60, 1, 1, 1, dtype=torch.uint8), torch.zeros(60).long())
    with pytest.raises(LowRankError, match=f"cannot hold out {n} of the 60"):
        Data("set", ("a",), split, split).holdout(n, seed=0)


def test_batches_are_counted_or_refused() -> None:
    assert check_batches(10, batch_size=4, rank=0, world=2, train=True) == 2
    assert check_batches(10, batch_size=4, rank=1, world=2, train=False) == 3
    with pytest.raises(LowRankError, match="batch of 5 does not divide over 2"):
        check_batches(10, batch_size=5, rank=0, world=2, train=True)
    with pytest.raises(LowRankError, match="3 images cannot fill one batch of 4"):
        check_batches(3, batch_size=4, rank=0, world=1, train=True)
    with pytest.raises(LowRankError, match="rank 2 of 2"):
        check_batches(10, batch_size=4, rank=2, world=2, train=True)


def test_generators_of_neighbouring_keys_differ() -> None:
    draws = {tuple(torch.rand(4, generator=generator("e", s, e)).tolist()) for s in range(5) for e in range(5)}
    assert len(draws) == 25
