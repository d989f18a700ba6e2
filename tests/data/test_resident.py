from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import (
    Augment,
    Data,
    ResidentLoader,
    ResidentSplit,
    Standardize,
    Whiten,
    make_loader,
    resident,
)

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


def test_a_split_reaches_another_process_whole(split: ResidentSplit) -> None:
    part = split.subset(torch.tensor([3, 5, 2]))
    copy = pickle.loads(pickle.dumps(part))
    assert torch.equal(copy.images, part.images)
    assert torch.equal(copy.labels, part.labels)
    assert copy.fingerprint == part.fingerprint


def test_training_shows_whole_batches_without_repeats(split: ResidentSplit) -> None:
    batches = list(loader(split, train=True).epoch(0))
    assert [len(labels) for _, labels in batches] == [4] * 5
    images, labels = joined(batches)
    assert len(set(labels.tolist())) == 20
    assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)


def test_evaluation_shows_every_image_once_in_order(split: ResidentSplit) -> None:
    batches = list(loader(split, train=False).epoch(0))
    assert [len(labels) for _, labels in batches] == [4, 4, 4, 4, 4, 2]
    assert joined(batches)[1].tolist() == list(range(22))


def test_order_is_a_function_of_seed_and_epoch(split: ResidentSplit) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return joined(list(loader(split, train=True, seed=seed).epoch(epoch)))[1].tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def random_split() -> ResidentSplit:
    images = torch.randint(0, 256, (50, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    return ResidentSplit.of(images.to(torch.uint8), torch.arange(50))


VARIED = Augment(crop=7, pad=2, mirror=True, cutout=3)


@pytest.mark.parametrize("start", [0, 1, 3, 5])
def test_resuming_within_an_epoch_goes_on_where_it_was(start: int) -> None:
    made = loader(random_split(), train=True, augment=VARIED, batch_size=8)
    whole = list(made.epoch(4))
    rest = list(loader(random_split(), train=True, augment=VARIED, batch_size=8).epoch(4, start))
    assert len(whole) == len(made) == 6
    assert len(rest) == 6 - start
    for (images, labels), (images2, labels2) in zip(whole[start:], rest, strict=True):
        assert torch.equal(images, images2)
        assert torch.equal(labels, labels2)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_see_the_batches_of_one(train: bool, world: int) -> None:
    options = {"augment": VARIED, "batch_size": 8}
    alone = list(loader(random_split(), train=train, **options).epoch(1))
    parts = [
        list(loader(random_split(), train=train, rank=rank, world=world, **options).epoch(1))
        for rank in range(world)
    ]
    for number, (images, labels) in enumerate(alone):
        together = joined([part[number] for part in parts if number < len(part)])
        assert torch.equal(together[0], images)
        assert torch.equal(together[1], labels)
    if train:
        assert {len(part) for part in parts} == {len(alone)}


def test_a_rank_without_images_yields_no_empty_batch() -> None:
    split = random_split().subset(torch.arange(9))
    parts = [list(loader(split, train=False, batch_size=8, rank=rank, world=2).epoch(0)) for rank in range(2)]
    assert sorted(len(part) for part in parts) == [1, 2]
    assert sum(len(labels) for part in parts for _, labels in part) == 9


def test_chunks_do_not_change_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = joined(list(loader(random_split(), train=True, augment=VARIED).epoch(0)))
    monkeypatch.setattr(resident, "_CHUNK_BYTES", 1)
    pieces = joined(list(loader(random_split(), train=True, augment=VARIED).epoch(0)))
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_crops_are_parts_of_the_padded_image() -> None:
    split = random_split()
    standardize = Standardize.fit(split)
    padded = torch.nn.functional.pad(standardize(split.images), (2, 2, 2, 2))
    made = loader(split, train=True, augment=Augment(crop=8, pad=2), preprocess=standardize)
    images, labels = joined(list(made.epoch(0)))
    moved = 0
    for image, label in zip(images, labels.tolist(), strict=True):
        windows = padded[label].unfold(1, 8, 1).unfold(2, 8, 1)  # C, top, left, y, x
        places = [(top, left, turn) for top in range(5) for left in range(5) for turn in (False, True)]
        fitting = [
            place
            for place in places
            if torch.equal(windows[:, place[0], place[1]].flip(2) if place[2] else windows[:, *place[:2]], image)
        ]
        assert len(fitting) == 1
        moved += fitting[0] != (2, 2, False)
    assert moved > len(images) // 2


def test_sub_crops_train_anywhere_and_test_in_the_centre() -> None:
    split = random_split()
    images, _ = joined(list(loader(split, train=False, augment=Augment(crop=6)).epoch(0)))
    assert torch.equal(images, split.images[:, :, 1:7, 1:7].float() / 255)
    trained, _ = joined(list(loader(split, train=True, augment=Augment(crop=6)).epoch(0)))
    assert trained.shape == (48, 3, 6, 6)


def test_a_resize_is_applied_once_before_crops() -> None:
    split = random_split()
    augment = Augment(resize=16, crop=14)
    images, _ = joined(list(loader(split, train=False, augment=augment).epoch(0)))
    whole = torch.nn.functional.interpolate(split.images.float() / 255, (16, 16), mode="bilinear", antialias=True)
    assert torch.allclose(images, whole[:, :, 1:15, 1:15])
    assert next(loader(split, train=True, augment=augment).epoch(0))[0].shape == (4, 3, 14, 14)


def test_type_and_layout_of_batches() -> None:
    images, labels = next(loader(random_split(), train=True, dtype=torch.bfloat16).epoch(0))
    assert images.dtype == torch.bfloat16
    assert labels.dtype == torch.int64
    assert images.is_contiguous(memory_format=torch.channels_last)
    images, _ = next(loader(random_split(), train=True, channels_last=False).epoch(0))
    assert images.is_contiguous()


def test_a_split_is_decoded_when_first_looked_at() -> None:
    calls: list[int] = []

    def decode() -> resident.Decoded:
        calls.append(1)
        return resident.Decoded(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))

    split = ResidentSplit(decode, (1, 4, 4))
    assert (split.size, split.channels) == ((1, 4, 4), 1)
    assert calls == []
    assert (len(split), len(split.images)) == (2, 2)
    assert calls == [1]


def test_make_loader_knows_its_splits() -> None:
    options: dict = {"batch_size": 4, "preprocess": None, "augment": PLAIN, "seed": 0, "device": "cpu"}
    assert isinstance(make_loader(random_split(), train=True, **options), ResidentLoader)
    with pytest.raises(LowRankError, match="list"):
        make_loader([], train=True, **options)  # pyright: ignore[reportArgumentType]


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


def test_arrays_will_do() -> None:
    split = ResidentSplit.of(np.zeros((3, 1, 4, 4), np.uint8), np.arange(3, dtype=np.int32))
    assert split.labels.tolist() == [0, 1, 2]
    assert split.labels.dtype == torch.int64


def test_labels_beyond_the_classes_are_named() -> None:
    split = ResidentSplit.of(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.arange(3))
    with pytest.raises(LowRankError, match=r"class number 2, and 2 classes, numbered from 0 to 1"):
        Data("set", ("a", "b"), split, split).check_labels()


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
    for (ours, our_labels), (theirs, their_labels) in zip(batches(), prepared, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
        assert torch.equal(our_labels, their_labels)


def test_a_large_set_takes_one_byte_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    split = ResidentSplit.of(torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.arange(8))
    options = {"batch_size": 4, "seed": 0, "device": "cpu", "train": True}
    monkeypatch.setattr(resident, "MOST_PREPARED_BYTES", 8 * 48 * 4 - 1)
    for preprocess, augment, dtype in (
        (None, Augment(), torch.uint8),
        (Standardize.fit(split), Augment(), torch.uint8),
        (None, Augment(resize=8), torch.float32),  # a resized image is no longer made of bytes
        (Whiten.fit(split), Augment(), torch.float32),
    ):
        assert ResidentLoader(split, preprocess=preprocess, augment=augment, **options)._images.dtype == dtype
