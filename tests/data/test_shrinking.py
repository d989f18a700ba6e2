from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import StreamedSplit, open_data
from lowrank_cnn.data.shrink import shrink, shrunk


@pytest.fixture
def folder(tmp_path: Path, photo, write_folder) -> Path:
    """Twelve photographs of two classes to train on, one of them broken, and four to test on."""
    images = {f"train/{'ab'[n % 2]}/{n}.jpg": photo(n, size=(40 + n, 60), format="JPEG") for n in range(12)}
    images["train/a/2.jpg"] = b"junk"
    images |= {f"val/{'ab'[n % 2]}/{n}.png": photo(50 + n, size=(60, 44 + n)) for n in range(4)}
    return write_folder(tmp_path / "large", images)


def streamed(path: Path) -> tuple[StreamedSplit, StreamedSplit]:
    data = open_data(path, resident_bytes=0)
    assert isinstance(data.train, StreamedSplit)
    return data.train, data.test


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_is_stored_at_its_shorter_side_and_opens_again(folder: Path, tmp_path: Path, workers: int) -> None:
    problems = shrink(folder, tmp_path / "small", side=20, per_shard=5, workers=workers)
    assert problems["train"].counts == {"undecodable image": 1}
    assert not problems["test"]
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert names == [f"test-{0:05d}-of-00001.parquet", *(f"train-{n:05d}-of-00003.parquet" for n in range(3))]
    train, test = streamed(tmp_path / "small")
    assert open_data(tmp_path / "small").classes == ("a", "b")
    assert (len(train), len(test)) == (11, 4)
    assert sorted(train.labels.tolist()) == [0] * 5 + [1] * 6
    assert train.labels.tolist() != sorted(train.labels.tolist())
    for split in (train, test):
        for row in range(len(split)):
            image = Image.open(io.BytesIO(split.store.read(row)))
            assert (min(image.size), image.format) == (20, "JPEG")


def test_the_stored_image_is_the_scaled_one(photo) -> None:
    smooth = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8))
    out = io.BytesIO()
    smooth.resize((100, 80), Image.Resampling.BICUBIC).save(out, "PNG")
    stored = np.asarray(Image.open(io.BytesIO(shrunk(out.getvalue(), 3, 40, 95)))).astype(int)
    wanted = np.asarray(Image.open(io.BytesIO(out.getvalue())).resize((50, 40), Image.Resampling.BILINEAR))
    assert stored.shape == (40, 50, 3)
    assert np.abs(stored - wanted).mean() < 3


def test_small_jpegs_stay_as_they_are_and_other_files_become_jpegs(photo) -> None:
    small = photo(0, size=(20, 30), format="JPEG")
    assert shrunk(small, 3, 20, 95) is small
    image = Image.open(io.BytesIO(shrunk(photo(0, size=(12, 10)), 3, 20, 95)))
    assert (image.size, image.format) == ((10, 12), "JPEG")


def test_work_that_was_cut_goes_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    shrink(folder, out, side=20, per_shard=5)
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "train-00001-of-00003.parquet").unlink()
    marks = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    shrink(folder, out, side=20, per_shard=5)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert all(path.stat().st_mtime_ns == mark for path, mark in marks.items())


def test_what_cannot_be_meant_is_refused(folder: Path, tmp_path: Path) -> None:
    for wrong in ({"quality": 101}, {"side": 0}, {"per_shard": 0}, {"workers": -1}, {"workers": 10**9}):
        with pytest.raises(LowRankError, match=f"{next(iter(wrong))} must be a whole number of at least"):
            shrink(folder, tmp_path / "small", **wrong)
    with pytest.raises(LowRankError, match="nothing to shrink"):
        shrink("digits", tmp_path / "small")
