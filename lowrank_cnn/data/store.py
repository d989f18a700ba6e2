"""Rows of encoded images, as parquet shards and image folders both give them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.files import open_regular, read_regular
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.decode import BadImageError, decode_image, image_header
from lowrank_cnn.data.types import (
    Problems,
    digest_of,
    evenly_spaced,
    fingerprint_of_parts,
    hash_of,
    places_by_name,
)

NO_LABEL = torch.iinfo(torch.int64).min
UNKNOWN_CLASS = NO_LABEL + 1
"""The label of an image whose class is counted as a problem already."""
Item = TypeVar("Item")
_LARGEST_FILE = 2**29
MOST_SIZES = 2**16
"""File sizes are read for this many files at most: each costs a request to a network file system."""
SAMPLED_FILES = 64
_PIECE = 2**14
_SAMPLED_HEADERS = 64
_RUN = 8


@dataclass
class ImageStore:
    """Image files below one folder, each a numbered row with its label (NO_LABEL if it has none).

    Another store (`ParquetStore`) has many rows in a file. A store remembers a stamp of each file and a digest of
    each image that was read, 8 bytes each: a run notices if an image changes while it is in use, or before the run
    is resumed.
    """

    root: Path
    paths: Sequence[str | Path]
    """The files that hold the images."""
    labels: Tensor

    def read(self, row: int) -> bytes:
        """The bytes of an image file; raises `BadImageError` if they cannot be read."""
        try:
            return read_image(self.paths[row])
        except OSError as error:
            raise BadImageError(error.strerror or "unreadable") from error

    def file_of(self, row: int) -> int:
        """The place in `paths` of the file that holds a row."""
        return row

    def where(self, row: int) -> str:
        """A name by which the user finds the row."""
        return os.path.relpath(self.paths[row], self.root.parent)

    def shuffled(self, draw: torch.Generator) -> Tensor:
        """All rows in a random order that is still cheap to read."""
        return torch.randperm(len(self.paths), generator=draw)

    def keep(self, places: int, rows: int) -> None:
        """Announce that rows will be read at this many places, each mixing this many neighbours."""

    def fingerprint(self, rows: Tensor) -> str:
        """The identity of some rows, with their labels, without decoding any."""
        whole = fingerprint_of_files(self.root, self.paths)
        return fingerprint_of_parts("subset", whole, hash_of(torch.stack([rows, self.labels[rows]])))

    def with_classes(self, theirs: Sequence[str], ours: Sequence[str], problems: Problems) -> ImageStore:
        """The store with labels that are places among our classes; classes that we do not have are a problem."""
        labels, found = self.labels, places_by_name(theirs, ours)
        for number, name in enumerate(theirs):
            if found[number] is None and (images := int((labels == number).sum())):
                problems.add("unknown class", f"{name}: {counted(images, 'image')}")
        places = torch.tensor([UNKNOWN_CLASS if place is None else place for place in found])
        known = (labels >= 0) & (labels < len(theirs))
        return replace(self, labels=torch.where(known, places[labels.clamp(0, len(theirs) - 1)], labels))

    def headers(self, rows: Tensor) -> list[tuple[tuple[int, int], bool]]:
        """The size of each image of a sample, and whether it is grey, without those that cannot be read."""
        headers = []
        for index in sample_rows(len(rows), _SAMPLED_HEADERS).tolist():
            with suppress(BadImageError):
                headers.append(image_header(self.read(int(rows[index]))))
        return headers

    def first_readable(self, rows: Tensor, which: str) -> tuple[tuple[int, int], bool]:
        """The header of the first of these images that can be decoded; `which` names them where none can."""
        first = ""
        for row in rows.tolist():
            try:
                data = self.read(row)
                decode_image(data, channels=3)
                return image_header(data)
            except BadImageError as error:
                first = first or f"{self.where(row)}: {error}"
        raise LowRankError(f"none of the {counted(len(rows), 'image')} {which} can be read; the first is {first}.")

    @cached_property
    def stamps(self) -> Tensor:
        """The size and time of each file, as first seen, as one number that is the same in every process."""
        return torch.tensor([hash(file_state(path)) for path in self.paths], dtype=torch.int64)

    @cached_property
    def digests(self) -> Tensor:
        """A digest of each image that was read; 0 for the others."""
        return torch.zeros(len(self.labels), dtype=torch.int64)

    def contents(self) -> dict[str, Tensor]:
        """Stamps and digests for a checkpoint."""
        return {"stamps": self.stamps, "digests": self.digests}

    def read_watched(self, row: int, fresh: dict[int, int]) -> bytes:
        """Read an image; `fresh` gets its digest if it is read first, or its file was written since."""
        data, file = self.read(row), self.file_of(row)
        # The stamp is that after reading: with one before, new contents could pass for old ones.
        if not self.digests[row] or hash(file_state(self.paths[file])) != self.stamps[file]:
            fresh[row] = digest_of(data)
        return data

    def note(self, fresh: Mapping[int, int]) -> None:
        """Remember the digests of images that were read; refuses an image that had other contents before."""
        for row, digest in fresh.items():
            if digest and self.digests[row] not in (0, digest):
                raise LowRankError(
                    f"{self.where(row)} was changed while it was in use: bring the old image back and go on with "
                    f"{option('resume', True)}, or start a new run."
                )
            self.digests[row] = digest or self.digests[row]

    def changed(self, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
        """The images of written files that have other contents than before, and how many cannot be compared."""
        digests = before["digests"].tolist()
        if before["stamps"].shape != self.stamps.shape or len(digests) != len(self.digests):
            return ["some images"], 0
        written = (before["stamps"] != self.stamps).tolist()
        suspects = [row for row in rows.tolist() if written[self.file_of(row)]] if any(written) else []
        compared = counting(suspects, "Comparing images that were written since", len(suspects))
        changed = [self.where(row) for row in compared if digests[row] and self._digest(row) != digests[row]]
        self.digests.copy_(torch.where(self.digests == 0, before["digests"], self.digests))
        return changed, sum(not digests[row] for row in suspects)

    def _digest(self, row: int) -> int:
        try:
            return int(self.digests[row]) or digest_of(self.read(row))
        except BadImageError:
            return 0


def read_image(path: str | Path) -> bytes:
    """The content of an image file; `OSError` for anything but a regular file of bounded size."""
    return read_regular(path, most=_LARGEST_FILE)


def fingerprint_of_files(root: Path, files: Sequence[str | Path]) -> str:
    """From the names below `root`, the sizes, and pieces of some of the files: cheap on a million files.

    A copy of a set in another place, with other dates, has the same fingerprint. As content is only sampled, a
    resumed run compares digests of the images as well (`ImageStore.changed`).
    """
    names = [os.path.relpath(file, root) for file in files]
    sizes = [file_state(files[index])[0] for index in evenly_spaced(len(files), MOST_SIZES)]
    pieces = [_pieces(files[index]) for index in evenly_spaced(len(files), SAMPLED_FILES)]
    return fingerprint_of_parts("files", "\0".join(names), str(sizes), *pieces)


def file_state(path: str | Path) -> tuple[int, int]:
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


def sample_rows(n: int, most: int) -> Tensor:
    """At most this many positions of 0 to n - 1, in short runs: reading one row reads its neighbours too."""
    if n <= most:
        return torch.arange(n)
    runs = max(1, most // _RUN)
    return (torch.arange(runs)[:, None] * n // runs + torch.arange(_RUN)).flatten()


@dataclass(frozen=True)
class LabelledImages:
    """The images of a source before they become splits: stores and problems of "train", "test" or both.

    `tested` names the split to test on (test, val, ...), and then others that could be; `unlabelled` those whose
    images have no class folders.
    """

    name: str
    classes: tuple[str, ...]
    stores: Mapping[str, ImageStore]
    problems: dict[str, Problems]
    tested: tuple[str, ...] = ()
    unlabelled: tuple[str, ...] = ()


def counting(
    items: Iterable[Item], what: str, total: int, images: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """The items, and beside them a line of `core.progress` with the images done, unless `what` is empty."""
    done, said = 0, 0.0
    with progress(what) if what else nullcontext():
        for item in items:
            yield item
            done += images(item)
            if what and time.monotonic() - said > 0.1:  # a line for each image would slow the work down
                said = time.monotonic()
                step(f"{done:,} of {counted(total, 'image')}")
