"""`lr.inspect_data` and `lowrank data`: what a set holds, and images that should not be in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import lowrank_cnn as lr
from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError


@pytest.fixture
def photos(tmp_path: Path, write_folder, photo) -> Path:
    """Two classes with a leak, a repetition, a contradiction, a broken file and an empty folder."""
    root = write_folder(tmp_path / "photos", {f"train/ant/{i}.png": i for i in range(7)})
    write_folder(root, {"train/bee/0.png": photo(20, size=(8, 8), mode="L"), "train/bee/bad.jpg": b"no image"})
    write_folder(root, {"train/ant/again.bmp": photo(3, format="BMP"), "train/bee/other.png": 5})
    write_folder(root, {"test/ant/0.png": 30, "test/bee/seen.webp": photo(2, format="PPM"), "test/bee/1.png": 31})
    (root / "train" / "cow").mkdir()
    return root


def test_everything_wrong_with_a_set_is_found(photos: Path) -> None:
    found = lr.inspect_data(photos, progress=False)
    train, test = found.train, found.test
    assert (train.images, train.classes) == (10, {"ant": 8, "bee": 2, "cow": 0})
    assert train.sizes == {"12x10": 9, "8x8": 1}
    assert train.modes == {"RGB": 9, "L": 1}
    assert train.problems == [
        ("empty class folder", "train/cow"),
        ("undecodable image", "train/bee/bad.jpg: not a known image format"),
    ]
    assert found.leaks == [("test/bee/seen.webp", "train/ant/2.png")]
    assert train.repeated == [
        ("train/ant/again.bmp", "train/ant/3.png"),
        ("train/bee/other.png", "train/ant/5.png"),
    ]
    assert ("train/bee/other.png", "train/ant/5.png") in found.contradictions
    assert (test.images, test.repeated) == (3, [])


def test_the_command_prints_it_and_draws_a_sheet(photos: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    words = ["data", str(photos), "--sheet", str(sheet)]
    shown = CliRunner().invoke(build(), words, catch_exceptions=False).stdout
    for part in (
        "Leak: 1 test image, trained on as well:\n  test/bee/seen.webp = train/ant/2.png",
        "train: 1 empty class folder:\n  train/cow",
        "bad.jpg: not a known image format",
        "10 images: batches of 10, ",
        "ant has 8 training images, cow 0: with the recipe's class_weights=balanced",
        "images differ in size, so they are brought to the network's input size",
    ):
        assert part in shown
    with Image.open(sheet) as drawn:
        assert (drawn.width > 8 * 96, drawn.height > 3 * 96) == (True, True)
        assert drawn.convert("L").getextrema() == (0, 255)
    before = sheet.read_bytes()
    assert isinstance(CliRunner().invoke(build(), words).exception, LowRankError)
    assert sheet.read_bytes() == before
    told = json.loads(CliRunner().invoke(build(), [*words, "--overwrite", "--json"]).stdout)
    assert told["leaks"] == [["test/bee/seen.webp", "train/ant/2.png"]]
    assert told["training"]["batch_size"] == 10


def test_sets_in_memory_and_in_shards_are_inspected(shards: Path) -> None:
    found = lr.inspect_data(shards, progress=False)
    assert (found.train.images, found.test.images, found.leaks) == (40, 10, [])
    digits = lr.inspect_data("digits", limit=60, progress=False)
    assert digits.train.modes == {"L": 60}
    assert digits.train.sizes == {"28x28": 60}
    assert digits.train.classes == {str(n): 6 for n in range(10)}
