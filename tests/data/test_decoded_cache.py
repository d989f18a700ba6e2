"""Decoded images are kept between runs, and never served for other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowrank_cnn.data import ResidentSplit, open_data
from lowrank_cnn.data import workers as decoded_cache


@pytest.fixture
def photos(tmp_path: Path, write_folder, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWRANK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoded_cache, "WORTH_SECONDS", 0.0)
    images = {f"{split}/ant/{n}.png": n for split in ("train", "val") for n in range(4)}
    return write_folder(tmp_path / "photos", images | {"train/ant/bad.png": b"junk"})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images were decoded, each time that some were."""
    counts: list[int] = []
    decode = decoded_cache._decode

    def counting(parts, *more):
        counts.append(parts.lanes.shape[1])
        return decode(parts, *more)

    monkeypatch.setattr(decoded_cache, "_decode", counting)
    return counts


def train_of(path: Path, **options: object) -> ResidentSplit:
    split = open_data(path, progress=False, **options).train
    assert isinstance(split, ResidentSplit)
    return split


def test_a_second_start_decodes_nothing(photos: Path, decoded: list[int]) -> None:
    first, second = train_of(photos), train_of(photos)
    assert first.images.equal(second.images)
    assert first.labels.equal(second.labels)
    assert decoded == [5]
    assert second.problems.counts == {"undecodable image": 1}
    assert second.describe(0) == "train/ant/0.png"


def test_other_files_sizes_and_rows_are_decoded(photos: Path, decoded: list[int], photo) -> None:
    before = train_of(photos).images
    train_of(photos, image_size=6).images  # noqa: B018
    train_of(photos, limit=3).images  # noqa: B018
    (photos / "train/ant/0.png").write_bytes(photo(99))
    after = train_of(photos).images
    assert decoded == [5, 5, 3, 5]
    assert not before.equal(after)


def test_damaged_entries_are_made_anew(photos: Path, decoded: list[int], tmp_path: Path) -> None:
    before = train_of(photos).images
    [entry] = (tmp_path / "cache" / "decoded").iterdir()
    content = bytearray(entry.read_bytes())
    content[-20] ^= 1
    entry.write_bytes(bytes(content))
    assert before.equal(train_of(photos).images)
    assert decoded == [5, 5]


def test_quick_and_huge_sets_are_not_kept(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_cache, "MOST_BYTES", 10)
    train_of(photos).images  # noqa: B018
    monkeypatch.setattr(decoded_cache, "MOST_BYTES", 2**30)
    monkeypatch.setattr(decoded_cache, "WORTH_SECONDS", 100.0)
    train_of(photos).images  # noqa: B018
    assert not (tmp_path / "cache" / "decoded").exists()


def test_old_entries_make_room(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_cache, "MOST_BYTES_OF_ALL", 1)
    for size in (4, 6, 8):
        train_of(photos, image_size=size).images  # noqa: B018
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 1
