"""Sources by their looks: flat folders, other names of train and test, tables, and test images elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.data import open_data

Photo = Callable[..., bytes]
WriteFolder = Callable[..., Path]


@pytest.fixture
def flat(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> Path:
    """Ten photographs of ants and five of bees, one folder each, and a folder without images."""
    images = {f"{name}/{n}.png": photo(n) for name, number in (("ant", 10), ("bee", 5)) for n in range(number)}
    return write_folder(tmp_path / "photos", images | {"notes/read.me": b""})


def test_a_flat_folder_is_divided_class_by_class(flat: Path) -> None:
    data = open_data(flat)
    assert data.classes == ("ant", "bee")
    assert data.train.labels.bincount().tolist() == [8, 4]
    assert data.test.labels.bincount().tolist() == [2, 1]
    assert data.details == {"val_split": {"share": 0.2, "seed": 0}}
    again, other = open_data(flat, val_split=0.2), open_data(flat, val_seed=1)
    assert again.digest == data.digest != other.digest
    half = open_data(flat, val_split=0.4)
    assert (len(half.train), len(half.test)) == (9, 6)


def test_no_image_is_in_both_splits(flat: Path) -> None:
    data = open_data(flat, resident_bytes=0)
    rows = data.train.rows.tolist() + data.test.rows.tolist()
    assert sorted(rows) == list(range(15))


@pytest.mark.parametrize(("train", "test"), [("Train", "VAL"), ("training", "Testing"), ("TRAIN", "Validation")])
def test_other_spellings_of_train_and_test(
    tmp_path: Path, photo: Photo, write_folder: WriteFolder, train: str, test: str
) -> None:
    write_folder(tmp_path, {f"{train}/ant/0.png": photo(0), f"{test}/ant/1.png": photo(1)})
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test), data.details) == (1, 1, {})
    with pytest.raises(LowRankError, match="has test images: leave val_split out"):
        open_data(tmp_path, val_split=0.3)


def test_a_training_folder_alone_is_divided(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> None:
    write_folder(tmp_path, {f"train/{name}/{n}.png": photo(n) for name in ("ant", "bee") for n in range(5)})
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test)) == (8, 2)


def test_too_few_images_to_divide(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> None:
    write_folder(tmp_path, {"ant/0.png": photo(0)})
    with pytest.raises(LowRankError, match=r"0\.2 of its 1 image leaves none"):
        open_data(tmp_path)


def test_a_class_whose_images_are_all_held_out_is_told(
    tmp_path: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    write_folder(tmp_path, {"ant/0.png": photo(0), "bee/0.png": photo(1)})
    data = open_data(tmp_path, val_split=0.5)
    assert str(data.train.problems) == f"1 untrained class ({data.classes[int(data.test.labels[0])]})"


def test_test_images_elsewhere_are_matched_by_name(
    flat: Path, tmp_path: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    write_folder(tmp_path / "other", {"bee/0.png": photo(1), "cow/0.png": photo(2), "bee/1.png": photo(3)})
    data = open_data(flat, test=tmp_path / "other")
    assert (len(data.train), data.test.labels.tolist()) == (15, [1, 1])
    assert str(data.test.problems) == "1 unknown class (cow: 1 image)"
    with pytest.raises(LowRankError, match="give one of them"):
        open_data(flat, test=tmp_path / "other", val_split=0.2)
    with pytest.raises(LowRankError, match="cannot be the test set of another"):
        open_data(flat, test="digits")


def test_for_evaluation_no_training_images_are_needed(
    flat: Path, tmp_path: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    data = open_data(flat, only_test=True)
    assert (len(data.train), len(data.test)) == (0, 15)
    write_folder(tmp_path / "tests", {"test/bee/0.png": photo(0)})
    assert open_data(tmp_path / "tests", only_test=True).classes == ("bee",)
    with pytest.raises(LowRankError, match="none to train on"):
        open_data(tmp_path / "tests")


def test_images_without_classes(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> None:
    write_folder(tmp_path, {"0.png": photo(0)})
    with pytest.raises(LowRankError, match="put those of each class into a folder"):
        open_data(tmp_path)


def test_a_table_of_paths_and_labels(flat: Path) -> None:
    (flat / "labels.csv").write_text(
        "Path,Label,Split\nant/0.png,insect,train\nbee/0.png,insect,\nant/1.png,other,training\n"
        "bee/1.png,other,test\ngone.png,other,test\n"
    )
    data = open_data(flat / "labels.csv")
    assert (data.name, data.classes) == ("photos/labels.csv", ("insect", "other"))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1], [1])
    assert data.test.problems.examples == {"missing file": ["gone.png"]}


def test_class_names_to_show(flat: Path, tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> None:
    (tmp_path / "names.txt").write_text("ant\tthe ant\nbee, the bee\n")
    assert open_data(flat, class_names=tmp_path / "names.txt").classes == ("the ant", "the bee")
    write_folder(tmp_path / "other", {"bee/0.png": photo(1)})
    data = open_data(flat, class_names=tmp_path / "names.txt", test=tmp_path / "other")
    assert (data.classes, data.test.labels.tolist()) == (("the ant", "the bee"), [1])


def test_camera_photos_come_to_the_default_size(tmp_path: Path, photo: Photo, write_folder: WriteFolder) -> None:
    write_folder(tmp_path / "one", {f"ant/{n}.jpg": photo(n, size=(300, 400), format="JPEG") for n in range(5)})
    write_folder(tmp_path / "many", {f"ant/{n}.png": photo(n, size=(20 + n, 20)) for n in range(5)})
    write_folder(tmp_path / "small", {f"ant/{n}.png": photo(n, size=(20, 20)) for n in range(5)})
    sizes = {name: open_data(tmp_path / name, default_size=16) for name in ("one", "many", "small")}
    assert {name: data.train.size for name, data in sizes.items()} == {
        "one": (3, 16, 16),
        "many": (3, 16, 16),
        "small": (3, 20, 20),
    }
    assert sizes["one"].details["sized_by"] == "network"
    assert "sized_by" not in sizes["small"].details
    assert open_data(tmp_path / "one", image_size="8x12", default_size=16).test.size == (3, 8, 12)


@pytest.mark.parametrize("source", ["nothing/at/all", "./missing", "digit", "/no/such/folder"])
def test_unknown_sources_are_told_what_would_be_right(source: str) -> None:
    with pytest.raises(LowRankError, match=r"is no data: give digits, a folder of images"):
        open_data(source)


def test_what_is_neither_a_name_nor_a_path_is_refused() -> None:
    with pytest.raises(LowRankError, match="by its name or path, not by None"):
        open_data(None)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(LowRankError, match="neither parquet shards"):
        open_data(tmp_path)


def test_one_image_is_no_data_set(photo, tmp_path):
    (tmp_path / "cat.JPG").write_bytes(photo(0))
    with pytest.raises(LowRankError, match=r"cat\.JPG is one image: give the folder"):
        open_data(tmp_path / "cat.JPG")


def test_test_images_of_other_classes_are_refused_with_both_names(photo, tmp_path):
    for place in ("ours/cat", "ours/dog", "theirs/tree", "theirs/bush"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(4):
            (tmp_path / place / f"{number}.jpg").write_bytes(photo(number))
    with pytest.raises(LowRankError, match=r"theirs has none of the classes of ours \(cat, dog\), but bush, tree"):
        open_data(tmp_path / "ours", test=tmp_path / "theirs")


def test_images_to_train_on_are_not_tested_on(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(flat)
    with pytest.raises(LowRankError, match=r"files with images to test on, .* would be trained on as well"):
        open_data(flat, test=tmp_path / "same")


def test_a_validation_folder_beside_a_test_folder_is_not_used_and_that_is_said(
    tmp_path: Path, photo: Photo, write_folder: WriteFolder
) -> None:
    names = ["train/a/0.png", "train/a/1.png", "val/a/2.png", "val/a/3.png", "test/a/4.png"]
    root = write_folder(tmp_path / "photos", {name: photo(n) for n, name in enumerate(names)})
    with pytest.warns(LowRankWarning, match=r"photos is tested on test; val is not used \(--test .*photos/val"):
        data = open_data(root)
    assert len(data.test) == 1
    assert data.details == {"tested_split": "test", "unused_splits": ["val"]}
    with pytest.warns(LowRankWarning, match=r"--data .*photos/val tests on val"):
        open_data(root, only_test=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_data(root, test=root / "val").test) == 2
