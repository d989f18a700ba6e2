from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import ResidentSplit, open_data
from lowrank_cnn.data import small_sets as cifar_binary
from lowrank_cnn.data.small_sets import content_sum, open_archive, open_cifar_folder

NAMES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


@pytest.fixture
def files() -> dict[str, bytes]:
    """Four records in each file: a label, then 3072 random pixels."""
    records = np.random.default_rng(0).integers(0, 256, (len(NAMES), 4, 3073), dtype=np.uint8)
    records[:, :, 0] = np.arange(24).reshape(6, 4) % 10
    return {name: record.tobytes() for name, record in zip(NAMES, records, strict=True)}


def archive(folder: Path, files: dict[str, bytes], name: str = cifar_binary.ARCHIVE) -> Path:
    with tarfile.open(folder / name, "w:gz") as out:
        for file, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{file}")
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return folder / name


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def sums(files: dict[str, bytes]) -> dict[str, str]:
    return {"train": content_sum(files[name] for name in NAMES[:5]), "test": content_sum([files[NAMES[5]]])}


def test_the_archive_is_read_in_place(tmp_path: Path, files: dict[str, bytes]) -> None:
    path = archive(tmp_path, files)
    data = open_archive(path, md5=md5(path))
    assert list(tmp_path.iterdir()) == [path]
    assert data.classes[3] == "cat"
    assert (len(data.train), len(data.test)) == (20, 4)
    assert data.train.labels.tolist() == [number % 10 for number in range(20)]
    assert isinstance(data.train, ResidentSplit)
    second = np.frombuffer(files[NAMES[0]], dtype=np.uint8)[3073 + 1 : 2 * 3073].reshape(3, 32, 32)
    assert (data.train.images[1].numpy() == second).all()


def test_another_archive_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    path = archive(tmp_path, files)
    for source in (path, tmp_path):
        with pytest.raises(
            LowRankError, match=r"is not CIFAR-10's .* instead of c32a1d4ab5d03f1284b67883e8d87530"
        ):
            open_data(source)


def test_extracted_files_are_checked_by_content(tmp_path: Path, files: dict[str, bytes]) -> None:
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    for name, content in files.items():
        (inner / name).write_bytes(content)
    for place in (tmp_path, inner):
        assert len(open_cifar_folder(place, content_sums=sums(files)).train) == 20
        with pytest.raises(LowRankError, match=r"train files .* do not hold the images of CIFAR-10"):
            open_data(place)
    (inner / NAMES[2]).unlink()
    with pytest.raises(LowRankError, match=r"lacks data_batch_3\.bin"):
        open_data(inner)


def test_content_sums_ignore_the_order_and_nothing_else(files: dict[str, bytes]) -> None:
    one, two = files[NAMES[0]], files[NAMES[1]]
    assert content_sum([one, two]) == content_sum([two, one]) == content_sum([two + one])
    assert content_sum([one, one]) != content_sum([one, two])
    assert content_sum([bytes([one[0] ^ 1]) + one[1:]]) != content_sum([one])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda content: content[:-1], "cut short"),
        (lambda content: bytes([10]) + content[1:], "has the label 10"),
        (lambda content: b"", "cut short"),
    ],
)
def test_impossible_records_are_refused(tmp_path: Path, files: dict[str, bytes], spoil, sentence: str) -> None:
    path = archive(tmp_path, {**files, NAMES[5]: spoil(files[NAMES[5]])})
    with pytest.raises(LowRankError, match=sentence):
        open_archive(path, md5=md5(path))


def test_an_archive_without_a_file_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    del files[NAMES[4]]
    path = archive(tmp_path, files)
    with pytest.raises(LowRankError, match=r"lacks cifar-10-batches-bin/data_batch_5\.bin"):
        open_archive(path, md5=md5(path))


def test_the_pickled_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    for source in (tmp_path, tmp_path / "cifar-10-python.tar.gz"):
        with pytest.raises(LowRankError, match="pickled CIFAR-10, which is not read"):
            open_data(source)
    batches = tmp_path / "x" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    (batches / "data_batch_1").write_bytes(b"\x80\x04.")
    for source in (batches, batches.parent):
        with pytest.raises(LowRankError, match="pickled"):
            open_data(source)
