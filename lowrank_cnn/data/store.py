"""Rows of encoded images, as parquet shards and image folders both give them, and decoding many of them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.cache import cache_folder, read_cached, write_cached
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.decode import (
    UNDECODABLE,
    BadImageError,
    ImageHeader,
    cover_and_crop,
    decode_image,
    image_header,
    stack,
)
from lowrank_cnn.data.types import (
    Bad,
    Contents,
    Decoded,
    Problems,
    Size,
    digest_of,
    fingerprint_of_files,
    fingerprint_of_parts,
    fingerprint_of_subset,
    places_by_name,
    version_of_files,
)

NO_LABEL = torch.iinfo(torch.int64).min
UNKNOWN_CLASS = NO_LABEL + 1
"""The label of an image whose class is counted as a problem already."""
WRONG_LABEL = "wrong label"
MOST_WRONG = 10**5
"""More wrong labels than this mean a wrong column, and naming each would take more memory than the images."""
OTHER_SIZE = "resized image"


@dataclass
class ImageStore(ABC):
    """Numbered rows of encoded images below one folder, with their labels (NO_LABEL if a row has none)."""

    root: Path
    paths: Sequence[str | Path]
    """The files that hold the images."""
    labels: Tensor

    @cached_property
    def contents(self) -> Contents:
        """Tells whether images were changed since they were listed."""
        return Contents(self.paths, len(self.labels))

    def fingerprint(self) -> str:
        """The identity of all images, without decoding any."""
        return fingerprint_of_files(self.root, self.paths)

    def version(self) -> str:
        """A text that changes whenever a file is written again, for caches."""
        return version_of_files(self.paths)

    def keep(self, places: int, rows: int) -> None:  # noqa: B027  files that are read one by one need none of it
        """Announce that rows will be read at this many places, each mixing this many neighbours."""

    @abstractmethod
    def read(self, row: int) -> bytes:
        """The bytes of an image file; raises `BadImageError` if they cannot be read."""

    @abstractmethod
    def file_of(self, row: int) -> int:
        """The place in `paths` of the file that holds a row."""

    @abstractmethod
    def where(self, row: int) -> str:
        """A name by which the user finds the row."""

    @abstractmethod
    def shuffled(self, draw: torch.Generator) -> Tensor:
        """All rows in a random order that is still cheap to read."""


def no_problems() -> dict[str, Problems]:
    """Counts of problems for both splits."""
    return {"train": Problems(), "test": Problems()}


@dataclass(frozen=True)
class LabelledImages:
    """The images of a source before they become splits; None for a split that it lacks.

    `tested` names the split to test on (test, val, ...), and then others that could be; `unlabelled` those whose
    images have no class folders.
    """

    name: str
    classes: tuple[str, ...]
    train: ImageStore | None
    test: ImageStore | None = None
    tested: tuple[str, ...] = ()
    unlabelled: tuple[str, ...] = ()
    problems: dict[str, Problems] = field(default_factory=no_problems)


def with_classes(store: ImageStore, theirs: Sequence[str], ours: Sequence[str], problems: Problems) -> ImageStore:
    """A store whose labels are places among our classes; classes that we do not have are a problem."""
    labels, found = store.labels, places_by_name(theirs, ours)
    for number, name in enumerate(theirs):
        if found[number] is None and (images := int((labels == number).sum())):
            problems.add("unknown class", f"{name}: {counted(images, 'image')}")
    places = torch.tensor([UNKNOWN_CLASS if place is None else place for place in found])
    known = (labels >= 0) & (labels < len(theirs))
    return replace(store, labels=torch.where(known, places[labels.clamp(0, len(theirs) - 1)], labels))


def shuffled_rows(store: ImageStore, rows: Tensor, draw: torch.Generator) -> Tensor:
    """Some rows of a store in a random order that is cheap to read."""
    wanted = torch.zeros(len(store.labels), dtype=torch.bool)
    wanted[rows] = True
    order = store.shuffled(draw)
    return order[wanted[order]]


def labelled_rows(store: ImageStore, classes: int, problems: Problems) -> Tensor:
    """The rows whose label names a class; the others are counted as problems."""
    right = (store.labels >= 0) & (store.labels < classes)
    wrong = (~right & (store.labels != UNKNOWN_CLASS)).nonzero()[:, 0]
    if len(wrong) > MOST_WRONG:
        raise LowRankError(
            f"{len(wrong):,} of {counted(len(right), 'label')}, {store.where(int(wrong[0]))} first, are none of "
            f"the {counted(classes, 'class')}: is this the column of labels?"
        )
    for row in wrong.tolist():
        label = int(store.labels[row])
        problems.add(WRONG_LABEL, f"{store.where(row)}: {'none' if label == NO_LABEL else label}")
    return right.nonzero()[:, 0]


def fingerprint_of_rows(store: ImageStore, rows: Tensor) -> str:
    """The identity of some rows of a store, with their labels."""
    return fingerprint_of_subset(store.fingerprint(), torch.stack([rows, store.labels[rows]]))


class ImageProgress:
    """Counts images on the line of `core.progress`."""

    def __init__(self, what: str, total: int, *, enabled: bool = True) -> None:
        self.what, self.total, self.enabled = what, total, enabled
        self.done, self.said = 0, 0.0
        self.line = ExitStack()

    def __enter__(self) -> ImageProgress:
        if self.enabled:
            self.line.enter_context(progress(self.what))
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def advance(self, images: int) -> None:
        """Count some more images as done."""
        self.done += images
        if self.enabled and time.monotonic() - self.said > 0.1:  # a line for each image would slow the work down
            self.said = time.monotonic()
            step(f"{self.done:,} of {counted(self.total, 'image')}")


def read_watched(store: ImageStore, row: int) -> bytes:
    """The bytes of an image, and its digest among the fresh ones if it may have changed."""
    data = store.read(row)
    store.contents.look(row, store.file_of(row), data)
    return data


def note_contents(store: ImageStore, fresh: Mapping[int, int]) -> None:
    """Remember the digests of images that were read; refuses an image that had other contents before."""
    digests = store.contents.digests
    for row, digest in fresh.items():
        if digest and digests[row] not in (0, digest):
            raise LowRankError(
                f"{store.where(row)} was changed while it was in use: bring the old image back and go on with "
                "--resume, or start a new run."
            )
        digests[row] = digest or digests[row]


def changed_images(store: ImageStore, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
    """The images that have other contents than before, and how many cannot be compared.

    Only images whose files have another size or time are compared, by their digests.
    """
    now = store.contents
    stamps, digests = before["stamps"], before["digests"].tolist()
    if stamps.shape != now.stamps.shape or len(digests) != len(now.digests):
        return ["some images"], 0
    written = (stamps != now.stamps).tolist()
    suspects = [row for row in rows.tolist() if written[store.file_of(row)]] if any(written) else []
    changed = []
    with ImageProgress("Comparing images that were written since", len(suspects)) as shown:
        for row in suspects:
            if digests[row] and _digest(store, row) != digests[row]:
                changed.append(store.where(row))
            shown.advance(1)
    now.digests = torch.where(now.digests == 0, before["digests"], now.digests)
    return changed, sum(not digests[row] for row in suspects)


def _digest(store: ImageStore, row: int) -> int:
    try:
        return int(store.contents.digests[row]) or digest_of(store.read(row))
    except BadImageError:
        return 0


_CHUNK = 256
_WORTH_WORKERS = 4096
_MOST_WORKERS = 16


class DecodedRows(NamedTuple):
    """Rows as uint8 [n, C, H, W], which of them are good, the problems of the others, and digests of the files."""

    images: Tensor
    good: Tensor
    found: list[tuple[str, str]]
    digests: Tensor


@dataclass(frozen=True)
class Chunks(Dataset):
    """Rows decoded to one size, some at a time."""

    store: ImageStore
    rows: Tensor
    size: Size
    any_size: bool

    def __len__(self) -> int:
        return ceil_div(len(self.rows), _CHUNK)

    def __getitem__(self, chunk: int) -> DecodedRows:
        rows = self.rows[chunk * _CHUNK : (chunk + 1) * _CHUNK].tolist()
        channels, height, width = self.size
        at_least = max(height, width) if self.any_size else None
        pixels: list[bytes] = []
        good = torch.ones(len(rows), dtype=torch.bool)
        found: list[tuple[str, str]] = []
        for place, row in enumerate(rows):
            try:
                image = decode_image(read_watched(self.store, row), channels=channels, at_least=at_least)
            except BadImageError as error:
                good[place] = False
                pixels.append(bytes(channels * height * width))
                found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
                continue
            if image.size != (width, height) and not self.any_size:
                found.append((OTHER_SIZE, f"{self.store.where(row)}: {image.height}x{image.width}"))
            pixels.append(cover_and_crop(image, height, width).tobytes())
        images = stack(pixels, height, width, channels).permute(0, 3, 1, 2).contiguous()
        taken = self.store.contents.take()
        digests = torch.tensor([taken.get(row, 0) for row in rows], dtype=torch.int64)
        return DecodedRows(images, good, found, digests)


def decode_rows(
    store: ImageStore,
    rows: Tensor,
    *,
    size: Size,
    any_size: bool,
    bad: Bad,
    problems: Problems,
    what: str = "",
) -> Decoded:
    """All these rows as one tensor, without the bad ones, which are added to the problems.

    `what` is the title of a progress line; an empty one shows none.
    """
    _ = store.contents.stamps  # sizes and times of all files, listed here and not by each worker

    def note(found: Iterable[tuple[str, str]]) -> None:
        problems.add_all(found)
        if bad == "refuse":
            problems.refuse()

    images, good, found, digests = _decode_once(Chunks(store, rows, size, any_size), what, note)
    note_contents(store, dict(zip(rows.tolist(), digests.tolist(), strict=True)))
    note(found)
    if not good.any():
        raise LowRankError(f"none of {counted(len(rows), 'image')} can be decoded: {problems}.")
    kept = rows[good]
    images = images if good.all() else images[good]
    return Decoded(images, store.labels[kept], problems, lambda place: store.where(int(kept[place])))


def _decode(chunks: Chunks, what: str, note: Callable[[list[tuple[str, str]]], None]) -> DecodedRows:
    """All chunks as one; `note` gets the problems as they are found."""
    number = len(chunks.rows)
    images = torch.empty(number, *chunks.size, dtype=torch.uint8)
    good, all_found = torch.ones(number, dtype=torch.bool), []
    digests = torch.zeros(number, dtype=torch.int64)
    with ImageProgress(what, number, enabled=bool(what)) as shown:
        for index, (part, kept, found, read) in enumerate(_each(chunks)):
            place = slice(index * _CHUNK, index * _CHUNK + len(kept))
            images[place], good[place], digests[place] = part, kept, read
            note(found)
            all_found += found
            shown.advance(len(kept))
    return DecodedRows(images, good, all_found, digests)


def _each(chunks: Chunks) -> Iterable[DecodedRows]:
    """Every chunk in order, by processes for large sets: Pillow holds the interpreter on small images."""
    workers = min(_MOST_WORKERS, os.cpu_count() or 1) if len(chunks.rows) >= _WORTH_WORKERS else 0
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return (chunks[number] for number in range(len(chunks)))
    return DataLoader(chunks, batch_size=None, num_workers=workers, multiprocessing_context="fork")


WORTH_SECONDS = 2.0
"""Sets that take less time to decode are not cached."""
MOST_BYTES, MOST_BYTES_OF_ALL = 2**30, 2**33
"""The largest set that is cached, and what all cached sets may take together."""
DECODER = "upright, with digests"
"""What a cache entry holds: change it with the pixels or the tensors, and old entries are decoded again."""


def _decode_once(chunks: Chunks, what: str, note: Callable[[list[tuple[str, str]]], None]) -> DecodedRows:
    """The rows from the cache; else decoded, and cached if that took long.

    An entry belongs to the exact files: their paths, sizes and times of change. The cache checks its sum.
    """
    rows = hashlib.sha256(chunks.rows.numpy().data).hexdigest()
    described = (DECODER, chunks.store.version(), rows, str(chunks.size), str(chunks.any_size))
    key = "decoded-" + fingerprint_of_parts(*described)
    path = cache_folder() / "decoded" / f"{key}.safetensors"
    if path.exists() and (stored := read_cached(path, key)) is not None:
        tensors = load(stored)
        found = [(kind, where) for kind, where in json.loads(bytes(tensors["found"].tolist()))]
        return DecodedRows(tensors["images"], tensors["good"].bool(), found, tensors["digests"])
    began = time.monotonic()
    made = _decode(chunks, what, note)
    worth = time.monotonic() - began >= WORTH_SECONDS and made.images.nbytes <= MOST_BYTES
    if worth and not path.parent.is_symlink():  # a link in the cache could lead to any folder of the user's
        tensors = made._asdict() | {"images": made.images.contiguous(), "good": made.good.to(torch.uint8)}
        tensors["found"] = torch.tensor(list(json.dumps(made.found).encode()), dtype=torch.uint8)
        if write_cached(path, key, save(tensors)):
            _make_room(path)
    return made


def _make_room(newest: Path) -> None:
    """Remove the oldest entries while all together take too much."""
    entries = sorted(newest.parent.glob("decoded-*.safetensors"), key=lambda path: path.lstat().st_mtime_ns)
    total = sum(path.lstat().st_size for path in entries)
    for path in entries:
        if total <= MOST_BYTES_OF_ALL or path == newest:
            return
        total -= path.lstat().st_size
        path.unlink(missing_ok=True)


_SAMPLED_HEADERS = 64
_RUN = 8


def read_headers(store: ImageStore, rows: Tensor) -> list[ImageHeader]:
    """The headers of a sample of the rows, without those that cannot be read."""
    headers: list[ImageHeader] = []
    for index in sample_rows(len(rows), _SAMPLED_HEADERS).tolist():
        try:
            headers.append(image_header(store.read(int(rows[index]))))
        except BadImageError:
            continue
    return headers


def first_readable(store: ImageStore, rows: Tensor, which: str) -> ImageHeader:
    """The header of the first of these images that can be decoded; refuses rows of which none can.

    `which` says in that sentence which images these are: "of photos", "to train on".
    """
    first = ""
    for row in rows.tolist():
        try:
            data = store.read(row)
            decode_image(data, channels=3)
            return image_header(data)
        except BadImageError as error:
            first = first or f"{store.where(row)}: {error}"
    raise LowRankError(f"none of the {counted(len(rows), 'image')} {which} can be read; the first is {first}.")


def sample_rows(n: int, most: int) -> Tensor:
    """At most this many positions of 0 to n - 1, in short runs: reading one row reads its neighbours too."""
    if n <= most:
        return torch.arange(n)
    runs = max(1, most // _RUN)
    return (torch.arange(runs)[:, None] * n // runs + torch.arange(_RUN)).flatten()
