"""Opening image folders and tables: their splits, classes and sizes, and what is wrong with them."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.data import ResidentSplit, StreamedSplit, open_data
from lowrank_cnn.data.sources import parse_image_size


@pytest.fixture
def flat(tmp_path: Path, write_folder) -> Path:
    """Ten photographs of ants and five of bees, one folder each, and a folder without images."""
    images = {f"{name}/{n}.png": n for name, number in (("ant", 10), ("bee", 5)) for n in range(number)}
    return write_folder(tmp_path / "photos", images | {"notes/read.me": b""})


@pytest.fixture
def folder(tmp_path: Path, write_folder) -> Path:
    """Photographs of ants and bees in train and val, among other files."""
    train = {f"train/{name}/{n}.png": n for name in ("bee", "ant") for n in range(3)}
    other = {"train/ant/notes.txt": b"no image", "train/ant/.hidden.png": b"", "train/README": b""}
    images = train | other | {"train/ant/deeper/9.JPG": 9} | {f"val/{name}/0.png": 0 for name in ("bee", "ant")}
    return write_folder(tmp_path / "own", images)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"image_size": size}, "an image size is a side like 64")
            for size in (0, -1, True, "a", "64x", "1x2x3")
        ),
        *(({"image_size": size}, "an image size is") for size in ((1, 2, 3), 1.5, (4, "8"), 10**9, [], {})),
        ({"image_size": 32}, "1x28x28, which image_size does not change"),
        ({"bad": "maybe"}, "bad must be skip or refuse"),
        ({"limit": 0}, "limit must be a whole number of at least 1"),
        ({"limit": "9"}, "limit must be a whole number"),
        ({"channels": 2}, "channels must be 1"),
        ({"channels": "3"}, "channels must be 1"),
        ({"val_split": 1.0}, "val_split must be a number above 0 and below 1, not 1.0"),
        ({"val_split": "0.2"}, "val_split must be a number"),
        ({"test": 3}, "test must be of type str or .*Path"),
        ({"class_names": 3}, "class_names must be of type"),
        ({"val_split": 0.5}, "test images and class names of its own"),
        ({"val_split": 0.5, "test": "digits"}, "give one of them"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LowRankError, match=says):
        open_data("digits", **options)


def test_sizes_are_sides_or_height_and_width() -> None:
    assert {parse_image_size(size) for size in ((48, 64), "48x64", [48, 64])} == {(48, 64)}
    assert {parse_image_size(size) for size in (64, "64", (64,), " 64 ")} == {(64, 64)}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        *(
            (name, "there is no data at .*: give digits, a folder")
            for name in ("nothing/at/all", "./missing", "digit", "/no/such")
        ),
        (None, "by its name or path, not by None"),
        ("notes", "neither parquet shards"),
        ("loose", "put those of each class into a folder"),
        ("kaggle", "each class needs a folder"),
        ("loose/cat.JPG", r"cat\.JPG is one image: give the folder"),
        ("tested", "none to train on"),
        ("single", r"0\.2 of its 1 image leaves none"),
    ],
)
def test_what_is_no_data_set_gets_a_sentence(source: Any, says: str, tmp_path, write_folder, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        "loose/cat.JPG",
        "kaggle/train/0.png",
        "kaggle/test/1.png",
        "tested/test/bee/0.png",
        "single/ant/0.png",
    ]
    write_folder(tmp_path, dict.fromkeys(names, 0) | {"notes/notes.txt": b"hello"})
    with pytest.raises(LowRankError, match=says):
        open_data(source)


def test_classes_are_folders_by_name(folder: Path) -> None:
    data = open_data(folder)
    assert (data.name, data.classes) == ("own", ("ant", "bee"))
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [0, 1]
    assert isinstance(data.train, ResidentSplit)
    assert data.train.images.shape == (7, 3, 12, 10)
    assert not data.train.problems


def test_a_flat_folder_is_divided_class_by_class(flat: Path) -> None:
    data = open_data(flat)
    assert data.classes == ("ant", "bee")
    assert data.train.labels.bincount().tolist() == [8, 4]
    assert data.test.labels.bincount().tolist() == [2, 1]
    assert data.details == {"val_split": {"share": 0.2, "seed": 0}}
    assert str(data.train.problems) == "1 empty class folder (photos/notes)"
    assert open_data(flat, val_split=0.2).digest == data.digest != open_data(flat, val_split=0.3).digest
    half = open_data(flat, val_split=0.4, resident_bytes=0)
    assert (len(half.train), len(half.test)) == (9, 6)
    assert sorted(half.train.rows.tolist() + half.test.rows.tolist()) == list(range(15))


@pytest.mark.parametrize(("train", "test"), [("Train", "VAL"), ("training", "Testing"), ("TRAIN", "Validation")])
def test_other_spellings_of_train_and_test(tmp_path: Path, write_folder, train: str, test: str) -> None:
    write_folder(tmp_path, {f"{train}/ant/0.png": 0, f"{test}/ant/1.png": 1})
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test), data.details) == (1, 1, {})
    with pytest.raises(LowRankError, match="has test images: leave val_split out"):
        open_data(tmp_path, val_split=0.3)


def test_test_is_preferred_to_val_where_it_has_classes(folder: Path, write_folder) -> None:
    write_folder(folder, {"test/0001.png": 0})  # as ILSVRC's test images: no classes
    with pytest.warns(LowRankWarning, match=r"^test of own has no class folders: val is tested on instead\.$"):
        assert len(open_data(folder).test) == 2
    write_folder(folder, {f"test/bee/{n}.png": n for n in range(5)} | {"test/ant/1.png": 1})
    with pytest.warns(LowRankWarning, match=r"own is tested on test; val is not used \(test='.*own/val"):
        data = open_data(folder)
    assert (len(data.test), data.details) == (6, {"tested_split": "test", "unused_splits": ["val"]})
    with pytest.warns(LowRankWarning, match=r"data='.*own/val' tests on val"):
        open_data(folder, only_test=True)
    shutil.rmtree(folder / "test/ant")
    shutil.rmtree(folder / "test/bee")
    shutil.rmtree(folder / "val")
    (folder / "eval").mkdir()  # empty: there is nothing to pass over
    write_folder(folder, {"valid/0002.png": 1})
    told = r"^test and valid of own have no class folders: other images are tested on instead\.$"
    with pytest.warns(LowRankWarning, match=told):
        assert len(open_data(folder, val_split=0.5).test) == 4


def test_a_test_set_can_be_chosen(folder: Path, flat: Path, tmp_path: Path, write_folder) -> None:
    write_folder(folder, {"test/bee/0.png": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_data(folder / "train", test=folder / "val").test) == 2
    write_folder(tmp_path / "other", {"bee/0.png": 1, "cow/0.png": 2, "bee/1.png": 3})
    write_folder(tmp_path / "theirs", {f"{name}/{n}.png": n for name in ("tree", "bush") for n in range(4)})
    data = open_data(flat, test=tmp_path / "other")
    assert (len(data.train), data.test.labels.tolist()) == (15, [1, 1])
    assert str(data.test.problems) == "1 unknown class (cow: 1 image)"
    (tmp_path / "same").symlink_to(flat)
    for test, says in (
        ("digits", "cannot be the test set of another"),
        (tmp_path / "theirs", r"theirs has none of the classes of photos \(ant, bee\), but bush, tree"),
        (tmp_path / "same", "files with images to test on, .* would be trained on as well"),
    ):
        with pytest.raises(LowRankError, match=says):
            open_data(flat, test=test)


def test_for_evaluation_no_training_images_are_needed(flat: Path, tmp_path: Path, write_folder) -> None:
    data = open_data(flat, only_test=True)
    assert (len(data.train), len(data.test)) == (0, 15)
    write_folder(tmp_path / "tests", {"test/bee/0.png": 0})
    assert open_data(tmp_path / "tests", only_test=True).classes == ("bee",)


def test_empty_unknown_and_untrained_classes_are_named(folder: Path, tmp_path: Path, write_folder) -> None:
    (folder / "train" / "cow").mkdir()
    write_folder(folder, {"val/dog/0.png": 0})
    data = open_data(folder)
    assert data.classes == ("ant", "bee", "cow")
    assert data.train.problems.examples == {"empty class folder": ["train/cow"]}
    assert data.test.problems.examples == {
        "empty class folder": ["val/cow"],
        "unknown class folder": ["val/dog: not in train"],
    }
    with pytest.raises(LowRankError, match=r"1 empty class folder \(train/cow\)"):
        open_data(folder, bad="refuse")
    data = open_data(write_folder(tmp_path / "few", {"ant/0.png": 0, "bee/0.png": 1}), val_split=0.5)
    assert str(data.train.problems) == f"1 untrained class ({data.classes[int(data.test.labels[0])]})"


def test_a_class_that_is_called_as_a_split_is_told(tmp_path: Path, write_folder) -> None:
    names = ("car", "plane", "train")
    write_folder(tmp_path / "own", {f"{name}/{n}.png": n for name in names for n in range(5)})
    data = open_data(tmp_path / "own")
    assert data.classes == ("car", "plane")
    assert "own/train: if it is a class, put all class folders into train/" in str(data.train.problems)
    write_folder(tmp_path / "other/train", {f"{name}/{n}.png": n for name in names for n in range(5)})
    data = open_data(tmp_path / "other")
    assert (data.classes, len(data.train), len(data.test)) == (names, 12, 3)


def test_corrupt_and_lost_files_are_named_and_left_out(folder: Path) -> None:
    (folder / "train" / "bee" / "1.png").write_bytes(b"junk")
    data = open_data(folder)
    (folder / "train" / "bee" / "2.png").unlink()
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1]
    assert data.train.describe(4) == "train/bee/0.png"
    junk, lost = data.train.problems.examples["undecodable image"]
    assert junk == "train/bee/1.png: not a known image format"
    assert lost.startswith("train/bee/2.png: No such file")


def test_pipes_devices_and_links(folder: Path, tmp_path: Path, write_folder) -> None:
    bee = folder / "train" / "bee"
    os.mkfifo(bee / "pipe.png")
    (bee / "zero.jpg").symlink_to("/dev/zero")
    write_folder(tmp_path / "elsewhere", {f"{n}.png": n for n in range(3)})
    write_folder(folder, {"train/bee/.thumbs/0.png": 0})
    (bee / "more").symlink_to(tmp_path / "elsewhere")
    (bee / "back").symlink_to(bee)
    data = open_data(folder)
    assert len(data.train) == 10
    assert data.train.problems.counts == {"special file": 2}


@pytest.mark.parametrize("number", [1, 6])
def test_unreadable_images_are_blamed_and_not_the_share_to_test_on(tmp_path, photo, write_folder, number) -> None:
    broken = {"cat": b"junk", "dog": photo(0)[:60]}  # of the second, the header can be read
    write_folder(tmp_path / "photos", {f"{name}/{n}.png": broken[name] for name in broken for n in range(number)})
    says = f"none of the {2 * number} images of photos can be read; the first is .*0.png: not a known image format"
    for options in ({}, {"val_split": 0.5}, {"only_test": True}):
        with pytest.raises(LowRankError, match=says):
            open_data(tmp_path / "photos", **options)


def test_a_sample_without_a_readable_image_is_not_the_whole_set(tmp_path: Path, write_folder) -> None:
    images: dict[str, Any] = {f"ant/{n:04}.png": b"junk" for n in range(1000)}
    data = open_data(write_folder(tmp_path, images | {"ant/9999.png": 0}), only_test=True)
    assert (data.test.size, len(data.test)) == ((3, 12, 10), 1)


def test_too_many_open_files_are_no_bad_images(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(flat)

    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LowRankError, match="too many files are open"):
        len(data.train)


def test_sizes_decide_between_memory_and_stream(tmp_path: Path, photo, write_folder) -> None:
    write_folder(tmp_path / "one", {f"ant/{n}.jpg": photo(n, size=(300, 400), format="JPEG") for n in range(5)})
    write_folder(tmp_path / "many", {f"ant/{n}.png": photo(n, size=(20 + n, 20)) for n in range(5)})
    write_folder(tmp_path / "small", {f"ant/{n}.png": photo(n, size=(20, 20)) for n in range(5)})
    many = open_data(tmp_path / "many")
    assert isinstance(many.train, StreamedSplit)
    assert (many.train.size, many.train.channels) == (None, 3)
    square = open_data(tmp_path / "many", image_size=8).train
    assert isinstance(square, ResidentSplit)
    assert (square.images.shape, square.problems.total) == ((4, 3, 8, 8), 0)
    held = many.holdout(1, seed=0)
    rows = [*held.train.rows.tolist(), *held.test.rows.tolist()]
    assert sorted(rows) == sorted(many.train.rows.tolist())
    assert isinstance(open_data(tmp_path / "small", resident_bytes=4 * 3 * 20 * 20 - 1).train, StreamedSplit)
    assert isinstance(open_data(tmp_path / "small", resident_bytes=4 * 3 * 20 * 20).train, ResidentSplit)
    # Camera photos come to the default size.
    sizes = {name: open_data(tmp_path / name, default_size=16) for name in ("one", "many", "small")}
    assert {name: data.train.size for name, data in sizes.items()} == {
        "one": (3, 16, 16),
        "many": (3, 16, 16),
        "small": (3, 20, 20),
    }
    assert sizes["one"].details["sized_by"] == "network"
    assert "sized_by" not in sizes["small"].details
    assert open_data(tmp_path / "one", image_size="8x12", default_size=16).test.size == (3, 8, 12)


def test_a_set_in_memory_takes_a_limit_and_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowrank_cnn.data import Data, small_sets

    draw = torch.Generator().manual_seed(0)
    split = ResidentSplit.of(torch.randint(0, 256, (40, 3, 8, 8), generator=draw).byte(), torch.arange(40) % 2)
    monkeypatch.setattr(small_sets, "open_digits", lambda: Data("squares", ("a", "b"), split, split))
    grey = open_data("digits", channels=1).test
    photos = [Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L") for image in split.images]
    assert torch.equal(grey.images[:, 0], torch.stack([torch.tensor(np.array(photo)) for photo in photos]))
    monkeypatch.setattr(small_sets, "open_digits", lambda: Data("squares", ("a", "b"), grey, grey))
    again = open_data("digits", channels=3, limit=10).train
    assert (again.size, len(again)) == ((3, 8, 8), 10)
    assert torch.equal(again.images[:, 0], again.images[:, 2])


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_of_paths_and_labels(flat: Path, mark: str) -> None:
    lines = ["Path,Label,Split", "ant/0.png,insect,train", 'bee/0.png,"insect",', 'ant/1.png,"o\nther",training']
    lines += [
        'bee/1.png,"o\nther",test',
        'gone.png,"o\nther",test',
        "./ant/0.png,insect,test",
        "bee/2.png,insect,val",
    ]
    (flat / "labels.csv").write_text("\n".join(lines).replace(",", mark))
    with pytest.warns(LowRankWarning, match="is tested on test; val is not used"):
        data = open_data(flat / "labels.csv")
    assert (data.name, data.classes) == ("photos/labels.csv", ("insect", "o\nther"))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1], [1])
    assert data.test.problems.examples == {"missing file": ["gone.png"], "file to train on": ["./ant/0.png"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not nothing"),
        (b"a,b\n1,2\n", "columns path and label.*not a, b"),
        (b"path,label\nx.png\n", "line 2 of .* has no path or no label"),
        (b"path,label\nx.png,\n", "line 2 of .* has no path or no label"),
        (b"path,label,split\nx.png,a,test\n", "lists no image to train on"),
        ("path,label\n\ufeff".encode(), "line 2"),
        (b"path,label\n%b,a\n" % (b"x" * 2**18), "cannot be read as a table: field larger than field limit"),
        (b"path,label,split\nx.png,a,train\ny.png,a,trian\n", "line 3 .* the split 'trian': did you mean train"),
        (b"path,label\n\xff.png,a\n", "is not UTF-8 text"),
    ],
)
def test_damaged_tables(tmp_path: Path, text: bytes, says: str) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(LowRankError, match=says):
        open_data(tmp_path / "t.csv")


def test_class_names_to_show(flat: Path, tmp_path: Path, write_folder) -> None:
    (tmp_path / "names.txt").write_text("ant\tthe ant, small\n\ncow, a cow\n")
    write_folder(tmp_path / "other", {"bee/0.png": 1})
    data = open_data(flat, class_names=tmp_path / "names.txt", test=tmp_path / "other")
    assert (data.classes, data.test.labels.tolist()) == (("the ant, small", "bee"), [1])


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "alone\n", "a class and its name in each line"),
        ("a.txt", "", "a class and its name in each line"),
        ("a.txt", "ant,x\nbee,x", "two classes the name 'x'"),
        ("a.txt", "cow,x", "names none of the classes, such as 'ant'"),
        ("none.txt", None, "cannot be read"),
    ],
)
def test_files_of_no_class_names(flat: Path, tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(LowRankError, match=says):
        open_data(flat, class_names=tmp_path / name)
