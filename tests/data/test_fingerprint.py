"""The identity of a set of images: it stays with a copy and changes with the images."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.data.types import fingerprint_of_files


def _photos(root: Path, write_folder, photo, *, first: int = 0) -> Path:
    names = [f"{split}/{name}/{n}.png" for split in ("train", "val") for name in ("cat", "dog") for n in range(3)]
    return write_folder(root, {name: photo(first + number, format="BMP") for number, name in enumerate(names)})


def test_a_copy_elsewhere_is_the_same_set(tmp_path: Path, write_folder, photo) -> None:
    one = _photos(tmp_path / "one", write_folder, photo)
    shutil.copytree(one, tmp_path / "other")
    streamed = open_data(tmp_path / "other", resident_bytes=0)
    assert open_data(one).digest == open_data(tmp_path / "other", image_size=4).digest == streamed.digest


def test_replaced_images_of_equal_file_size_are_another_set(tmp_path: Path, write_folder, photo) -> None:
    before = open_data(_photos(tmp_path, write_folder, photo)).digest
    sizes = sorted(path.stat().st_size for path in tmp_path.rglob("*.png"))
    after = open_data(_photos(tmp_path, write_folder, photo, first=50)).digest
    assert sizes == sorted(path.stat().st_size for path in tmp_path.rglob("*.png"))
    assert before != after


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_an_image_that_turns_into_a_pipe_is_unreadable_and_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"image")
    before = fingerprint_of_files(tmp_path, [tmp_path / "a.png"])
    (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    assert fingerprint_of_files(tmp_path, [tmp_path / "a.png"]) != before


def test_names_classes_and_chosen_images_count(tmp_path: Path, write_folder, photo) -> None:
    data = open_data(_photos(tmp_path / "photos", write_folder, photo), image_size=8)
    others = {open_data(tmp_path / "photos", limit=4).digest, data.holdout(2, seed=0).digest}
    (tmp_path / "photos/train/cat/0.png").rename(tmp_path / "photos/train/cat/zero.png")
    others.add(open_data(tmp_path / "photos").digest)
    assert len(others | {data.digest}) == 4


def test_shards_have_a_fingerprint(shards: Path, tmp_path: Path, write_shards, photo) -> None:
    before = open_data(shards).digest
    assert before == open_data(shards, resident_bytes=0).digest
    write_shards(shards, "test", [[(photo(200 + number), number % 3) for number in range(10)]])
    assert before != open_data(shards).digest


def test_tensors_are_known_by_their_pixels_and_labels() -> None:
    def digest(pixel: int, label: int) -> str:
        images, labels = torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)
        images[3, 0, 1, 1], labels[5] = pixel, label
        return Data("set", ("a", "b"), split := ResidentSplit.of(images, labels), split).digest

    assert digest(0, 0) == digest(0, 0)
    assert len({digest(0, 0), digest(1, 0), digest(0, 1)}) == 3
