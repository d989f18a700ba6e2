from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, ResidentSplit, StreamedSplit, open_data
from lowrank_cnn.data.folders import FolderStore, open_folder
from lowrank_cnn.data.sources import LARGE_SIDE, ReadOptions, divided, make_split, with_default_size, with_limit
from lowrank_cnn.data.types import Problems

Photo = Callable[..., bytes]


@pytest.fixture
def store(tmp_path: Path, photo: Photo, write_folder: Callable[..., Path]) -> FolderStore:
    """Six images of each of two classes, of 12x10."""
    files = {f"{name}/{number}.png": photo(number) for name in ("cat", "dog") for number in range(6)}
    return open_folder(write_folder(tmp_path, files), ("cat", "dog"), Problems())


ROWS = torch.arange(12)


def test_few_images_of_one_size_are_held_in_memory(store: FolderStore) -> None:
    assert isinstance(make_split(store, ROWS, Problems(), ReadOptions()), ResidentSplit)
    streamed = make_split(store, ROWS, Problems(), ReadOptions(resident_bytes=12 * 12 * 10 * 3 - 1))
    assert isinstance(streamed, StreamedSplit)
    assert streamed.size == (3, 12, 10)


def test_a_limit_takes_classes_in_proportion(store: FolderStore) -> None:
    split = make_split(store, ROWS, Problems(), ReadOptions(limit=4))
    assert sorted(split.labels.tolist()) == [0, 0, 1, 1]


def test_images_of_many_sizes_have_no_common_one(store: FolderStore, photo: Photo) -> None:
    Path(store.paths[0]).write_bytes(photo(0, size=(9, 9)))
    split = make_split(store, ROWS, Problems(), ReadOptions())
    assert (split.size, split.channels) == (None, 3)
    assert make_split(store, ROWS, Problems(), ReadOptions(image_size=(8, 6))).size == (3, 8, 6)
    assert with_default_size(store, ROWS, ReadOptions(default_size=(8, 8))).image_size == (8, 8)


def test_the_default_size_is_for_large_images_alone(store: FolderStore, photo: Photo) -> None:
    options = ReadOptions(default_size=(8, 8))
    assert with_default_size(store, ROWS, options) is options
    Path(store.paths[0]).write_bytes(photo(0, size=(LARGE_SIDE + 1, LARGE_SIDE + 1)))
    assert with_default_size(store, torch.tensor([0]), options).image_size == (8, 8)
    chosen = ReadOptions(default_size=(8, 8), image_size=(4, 4))
    assert with_default_size(store, torch.tensor([0]), chosen) is chosen


def test_a_share_of_each_class_is_divided_off(store: FolderStore) -> None:
    train, test = divided(store, ROWS, 1 / 3, seed=0, name="photos")
    assert sorted([*train.tolist(), *test.tolist()]) == ROWS.tolist()
    assert store.labels[test].tolist() == [0, 0, 1, 1]
    assert not torch.equal(test, divided(store, ROWS, 1 / 3, seed=1, name="photos")[1])
    with pytest.raises(LowRankError, match="leaves none to train or test on"):
        divided(store, ROWS, 0.01, seed=0, name="photos")


def test_a_set_in_memory_takes_a_limit_and_channels_and_nothing_else() -> None:
    split = ResidentSplit.of(torch.zeros(8, 1, 4, 4, dtype=torch.uint8), torch.arange(8) % 2)
    data = Data("squares", ("a", "b"), split, split)
    assert len(with_limit(data, ReadOptions(limit=4)).train) == 4
    with pytest.raises(LowRankError, match="1x4x4, which image_size does not change"):
        with_limit(data, ReadOptions(image_size=(8, 8)))
    with pytest.raises(LowRankError, match="test images and class names of its own"):
        with_limit(data, ReadOptions(val_split=0.5))


def test_a_set_in_memory_is_read_in_grey_and_in_colour() -> None:
    draw = torch.Generator().manual_seed(0)
    colour = torch.randint(0, 256, (40, 3, 8, 8), generator=draw).to(torch.uint8)
    labels = torch.arange(40) % 2
    split = ResidentSplit.of(colour, labels)
    grey = with_limit(Data("squares", ("a", "b"), split, split), ReadOptions(channels=1))
    photos = [Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L") for image in colour]
    assert torch.equal(grey.test.images[:, 0], torch.stack([torch.tensor(np.array(photo)) for photo in photos]))
    again = with_limit(grey, ReadOptions(channels=3, limit=10)).train
    assert (again.size, len(again)) == ((3, 8, 8), 10)
    assert torch.equal(again.images[:, 0], again.images[:, 2])


@pytest.mark.parametrize("number", [1, 6])
def test_unreadable_images_are_blamed_and_not_the_share_to_test_on(
    tmp_path: Path, photo: Photo, number: int
) -> None:
    for name, content in (("cat", b"junk"), ("dog", photo(0)[:60])):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for place in range(number):
            (tmp_path / "photos" / name / f"{place}.png").write_bytes(content)
    says = f"none of the {2 * number} images of photos can be read; the first is .*0.png: not a known image format"
    for options in ({}, {"val_split": 0.5}, {"only_test": True}):
        with pytest.raises(LowRankError, match=says):
            open_data(tmp_path / "photos", **options)


def test_a_sample_without_a_readable_image_is_not_the_whole_set(store: FolderStore, monkeypatch) -> None:
    monkeypatch.setattr("lowrank_cnn.data.sources.read_headers", lambda *_: [])
    assert make_split(store, ROWS, Problems(), ReadOptions()).size == (3, 12, 10)
