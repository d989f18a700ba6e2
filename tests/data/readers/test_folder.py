from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.data import ResidentSplit, StreamedSplit, open_data

Photo = Callable[..., bytes]
WriteFolder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> Path:
    train = {f"train/{name}/{n}.png": photo(n) for name in ("bee", "ant") for n in range(3)}
    train["train/ant/deeper/9.JPEG"] = photo(9, format="JPEG")
    train |= {"train/ant/notes.txt": b"no image", "train/ant/.hidden.png": b"", "train/README": b""}
    return write_folder(tmp_path / "own", train | {f"val/{name}/0.png": photo(0) for name in ("bee", "ant")})


def test_classes_are_folders_by_name(folder: Path) -> None:
    data = open_data(folder)
    assert data.name == "own"
    assert data.classes == ("ant", "bee")
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 1]
    assert isinstance(data.train, ResidentSplit)
    assert data.train.images.shape == (7, 3, 12, 10)
    assert not data.train.problems


def test_test_is_preferred_to_val_where_it_has_classes(
    folder: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    write_folder(folder, {"test/0001.png": photo(0)})  # as ILSVRC's test images: no classes
    with pytest.warns(LowRankWarning, match=r"^test of own has no class folders: val is tested on instead\.$"):
        assert len(open_data(folder).test) == 2
    write_folder(folder, {f"test/bee/{n}.png": photo(n) for n in range(5)} | {"test/ant/1.png": photo(1)})
    with pytest.warns(LowRankWarning, match="val is not used"):
        assert len(open_data(folder).test) == 6


def test_a_test_folder_without_classes_and_no_other_is_told(
    folder: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    shutil.rmtree(folder / "val")
    (folder / "eval").mkdir()  # empty: there is nothing to pass over
    write_folder(folder, {"test/0001.png": photo(0), "valid/0002.png": photo(1)})
    told = r"^test and valid of own have no class folders: other images are tested on instead\.$"
    with pytest.warns(LowRankWarning, match=told):
        assert len(open_data(folder, val_split=0.5).test) == 4


def test_empty_and_unknown_class_folders_are_named(folder: Path, photo: Photo, write_folder: WriteFolder) -> None:
    (folder / "train" / "cow").mkdir()
    write_folder(folder, {"val/dog/0.png": photo(0)})
    data = open_data(folder)
    assert data.classes == ("ant", "bee", "cow")
    assert data.train.problems.examples == {"empty class folder": ["train/cow"]}
    assert data.test.problems.examples == {
        "empty class folder": ["val/cow"],
        "unknown class folder": ["val/dog: not in train"],
    }
    with pytest.raises(LowRankError, match=r"1 empty class folder \(train/cow\)"):
        open_data(folder, bad="refuse")


def test_a_corrupt_file_is_named_and_left_out(folder: Path) -> None:
    (folder / "train" / "bee" / "1.png").write_bytes(b"junk")
    train = open_data(folder).train
    assert len(train) == 6
    assert train.problems.examples == {"undecodable image": ["train/bee/1.png: not a known image format"]}


def test_a_file_that_vanished_is_a_bad_image(folder: Path) -> None:
    data = open_data(folder)
    (folder / "train" / "bee" / "1.png").unlink()
    assert len(data.train) == 6
    assert "No such file" in data.train.problems.examples["undecodable image"][0]


def test_images_of_many_sizes_stream(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> None:
    images = {f"{split}/a/{n}.png": photo(n, size=(9 + n, 9)) for split in ("train", "val") for n in range(3)}
    data = open_data(write_folder(tmp_path, images))
    assert isinstance(data.train, StreamedSplit)
    held = data.holdout(1, seed=0)
    assert (len(held.train), len(held.test)) == (2, 1)
    assert isinstance(held.train, StreamedSplit)
    assert isinstance(held.test, StreamedSplit)
    assert sorted(torch.cat([held.train.rows, held.test.rows]).tolist()) == [0, 1, 2]


def test_pipes_and_devices_are_no_images(folder: Path) -> None:
    os.mkfifo(folder / "train" / "bee" / "pipe.png")
    (folder / "train" / "bee" / "zero.jpg").symlink_to("/dev/zero")
    data = open_data(folder)
    assert len(data.train) == 7
    assert data.train.problems.counts == {"special file": 2}


def test_a_class_that_is_called_as_a_split_is_told(
    tmp_path: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    names = ("car", "plane", "train")
    write_folder(tmp_path / "own", {f"{name}/{n}.png": photo(n) for name in names for n in range(5)})
    data = open_data(tmp_path / "own")
    assert data.classes == ("car", "plane")
    assert "own/train: if it is a class, put all class folders into train/" in str(data.train.problems)
    write_folder(tmp_path / "other/train", {f"{name}/{n}.png": photo(n) for name in names for n in range(5)})
    assert open_data(tmp_path / "other").classes == names
    write_folder(
        tmp_path / "kaggle", {f"{name}/{n}.png": photo(n) for name in ("train", "test") for n in range(5)}
    )
    with pytest.raises(LowRankError, match="each class needs a folder"):
        open_data(tmp_path / "kaggle")


def test_links_are_followed_once_and_hidden_folders_are_not_read(
    tmp_path: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    own = write_folder(tmp_path / "own", {f"{name}/{n}.png": photo(n) for name in "ab" for n in range(5)})
    write_folder(own, {"a/.thumbs/0.png": photo(0)})
    write_folder(tmp_path / "elsewhere", {f"{n}.png": photo(n) for n in range(3)})
    (own / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (own / "b" / "back").symlink_to(own / "b")
    data = open_data(own)
    assert len(data.train) + len(data.test) == 13
    assert not data.train.problems
