"""Fingerprints of image sets: names, sizes and a sample of the content, cheap on a million files.

Two sets with one fingerprint are taken for the same set. A fingerprint does not depend on where a folder lies or
on file dates: a copy on another machine has the same one. Content is sampled: a run that continues therefore
compares `Contents` as well, which tell of every single image whether it was changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.system.files import open_regular

MOST_SIZES = 2**16
"""File sizes are read for this many files at most: each costs a request to a network file system."""
SAMPLED_FILES = 64
SAMPLED_IMAGES = 256
_PIECE = 2**14


def fingerprint_of_parts(*parts: str) -> str:
    """One fingerprint from several texts, in their order."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part.encode(errors="surrogateescape"))
    return hashed.hexdigest()[:32]


def fingerprint_of_files(root: Path, files: Sequence[str | Path]) -> str:
    """From the names below `root`, the sizes, and pieces of some of the files."""
    names = [os.path.relpath(file, root) for file in files]
    sizes = [_state(files[index])[0] for index in evenly_spaced(len(files), MOST_SIZES)]
    pieces = [_pieces(files[index]) for index in evenly_spaced(len(files), SAMPLED_FILES)]
    return fingerprint_of_parts("files", "\0".join(names), str(sizes), *pieces)


def version_of_files(files: Sequence[str | Path]) -> str:
    """From the places, sizes and times of change of all files: it tells when any of them was written again."""
    return fingerprint_of_parts("version", *(f"{Path(file).absolute()}/{_state(file)}" for file in files))


class Contents:
    """The size and time of each file, and a digest of each image once it is read: 8 bytes a file, 8 an image.

    `digests` are 0 for images that were not read yet. `fresh` are those that this process took since `take`.
    """

    def __init__(self, files: Sequence[str | Path], images: int) -> None:
        self.files = files
        self.digests = torch.zeros(images, dtype=torch.int64)
        self.fresh: dict[int, int] = {}

    @cached_property
    def stamps(self) -> Tensor:
        """The size and time of each file as one number, as they are when they are first asked for."""
        return torch.tensor([_stamp(file) for file in self.files], dtype=torch.int64)

    def look(self, row: int, file: int, data: bytes) -> None:
        """Take the digest of an image that is read for the first time, or whose file was written since."""
        # The time is that after reading: with a time before, new contents could pass for old ones.
        if not self.digests[row] or _stamp(self.files[file]) != self.stamps[file]:
            self.fresh[row] = digest_of(data)

    def take(self) -> dict[int, int]:
        """The digests that `look` took since the last call."""
        taken, self.fresh = self.fresh, {}
        return taken


def digest_of(data: Any) -> int:
    """63 bits of a hash of some bytes, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 or 1


def digest_of_pixels(images: Tensor) -> Tensor:
    """One digest of all images, as a tensor of one number."""
    return torch.tensor([digest_of(images.cpu().contiguous().numpy().data)])


def fingerprint_of_tensors(images: Tensor, labels: Tensor) -> str:
    """From the shape, all labels, and some of the images."""
    some = images[torch.tensor(list(evenly_spaced(len(images), SAMPLED_IMAGES)), dtype=torch.int64)]
    return fingerprint_of_parts("tensors", str(tuple(images.shape)), _hashed(labels), _hashed(some))


def fingerprint_of_subset(whole: str, index: Tensor) -> str:
    """Of the images at these positions of a set with this fingerprint."""
    return fingerprint_of_parts("subset", whole, _hashed(index))


def evenly_spaced(n: int, most: int) -> Iterable[int]:
    """At most this many positions of 0 to n - 1, the first and the last among them."""
    if n <= most:
        return range(n)
    return (place * (n - 1) // (most - 1) for place in range(most))


def _hashed(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().data).hexdigest()


def _stamp(path: str | Path) -> int:
    """The file's size and time of change as one number."""
    return hash(_state(path))  # of whole numbers, so it is the same in every process


def _state(path: str | Path) -> tuple[int, int]:
    """The file's size and time of change; -1 if it cannot be read, which decoding reports."""
    try:
        found = os.stat(path)  # noqa: PTH116  a Path for each of a million files takes longer than the look
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _pieces(path: str | Path) -> str:
    """A digest of the beginning, the middle and the end of a file."""
    hashed = hashlib.sha256()
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for start in (0, size // 2, max(0, size - _PIECE)):
                file.seek(start)
                hashed.update(file.read(_PIECE))
    except OSError:
        return "unreadable"
    return hashed.hexdigest()
