"""The interface that parquet shards and image folders share: numbered rows of encoded images."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.cache import cache_folder, read_cached, write_cached
from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.processes import first_process
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
    fingerprint_of_parts,
    fingerprint_of_subset,
)

# A progress bar on standard error for work that takes more than a moment.

QUIET_SECONDS = 1.0


class ImageProgress:
    """Shows nothing for a moment, then a bar on a terminal, or elsewhere one line.

    Of several processes, the first alone shows it.
    """

    def __init__(self, what: str, total: int, *, enabled: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self.enabled = enabled and first_process()
        self.began = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self.bar, "stop"):
            self.bar.stop()

    def advance(self, images: int) -> None:
        """Count some more images as done."""
        self.done += images
        if not self.enabled or time.monotonic() - self.began < QUIET_SECONDS:
            return
        if self.bar is None:
            self.bar = self._start()
        if hasattr(self.bar, "update"):
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def _start(self) -> Any:
        if not sys.stderr.isatty():
            print(f"{self.what}: {counted(self.total, 'image')} ...", file=sys.stderr, flush=True)
            return "said"
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(self.what, total=self.total)
        bar.start()
        return bar


NO_LABEL = torch.iinfo(torch.int64).min
UNKNOWN_CLASS = NO_LABEL + 1
"""The label of an image whose class is counted as a problem already."""
WRONG_LABEL = "wrong label"
MOST_WRONG = 10**5
"""More wrong labels than this mean a wrong column, and naming each would take more memory than the images."""


class ImageStore(Protocol):
    """Numbered rows of encoded images with their labels (NO_LABEL if a row has none)."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def paths(self) -> Sequence[str | Path]:
        """The files that hold the images."""
        ...

    def read(self, row: int) -> bytes:
        """The bytes of an image file; raises `BadImageError` if they cannot be read."""
        ...

    @property
    def contents(self) -> Contents:
        """What tells whether images were changed since they were listed."""
        ...

    def file_of(self, row: int) -> int:
        """The place in `paths` of the file that holds a row."""
        ...

    def where(self, row: int) -> str:
        """A name by which the user finds the row."""
        ...

    def shuffled(self, draw: torch.Generator) -> Tensor:
        """All rows in a random order that is still cheap to read."""
        ...

    def fingerprint(self) -> str:
        """The identity of all images (`data.fingerprint`), without decoding any."""
        ...

    def version(self) -> str:
        """A text that changes whenever a file is written again, for caches."""
        ...

    def keep(self, places: int, rows: int) -> None:
        """Announce that rows will be read at this many places, each mixing this many neighbours."""
        ...


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
    """The images that have other contents than before, and the number of those of which nobody can tell.

    Only images whose files have another size or time are compared, by their digests.
    """
    now = store.contents
    stamps, digests = before["stamps"], before["digests"].tolist()
    if stamps.shape != now.stamps.shape or len(digests) != len(now.digests):
        return ["some images"], 0
    written = (stamps != now.stamps).tolist()
    suspects = [row for row in rows.tolist() if written[store.file_of(row)]] if any(written) else []
    unknown = {row for row in suspects if not digests[row]}
    changed = []
    with ImageProgress("Comparing images that were written since", len(suspects)) as progress:
        for row in suspects:
            if row not in unknown and _digest(store, row) != digests[row]:
                changed.append(store.where(row))
            progress.advance(1)
    now.digests = torch.where(now.digests == 0, before["digests"], now.digests)
    return changed, len(unknown)


def _digest(store: ImageStore, row: int) -> int:
    try:
        return int(store.contents.digests[row]) or digest_of(store.read(row))
    except BadImageError:
        return 0


# Decoded images kept between runs, so that a second start does not decode them again.
#
# An entry belongs to the exact files: their paths, sizes and times of change. Anything else counts as another
# set.

WORTH_SECONDS = 2.0
"""Sets that take less time to decode are not cached."""
MOST_BYTES = 2**30
DECODER = "upright"
"""How images are decoded: another word where the pixels change, so that what is cached is decoded again."""
MOST_BYTES_OF_ALL = 2**33


class DecodedRows(NamedTuple):
    """Rows as uint8 [n, C, H, W], which of them are good, the problems of the others, and digests of the files."""

    images: Tensor
    good: Tensor
    found: list[tuple[str, str]]
    digests: Tensor


def decoded_once(
    store: ImageStore, rows: Tensor, size: Size, *, any_size: bool, decode: Callable[[], DecodedRows]
) -> DecodedRows:
    """These rows from the cache; else from `decode`, and cached if that took long."""
    key = "decoded-" + fingerprint_of_parts(
        DECODER, store.version(), hashlib.sha256(rows.numpy().data).hexdigest(), str(size), str(any_size)
    )
    path = cache_folder() / "decoded" / f"{key}.safetensors"
    if (stored := _read(path, key, len(rows), size)) is not None:
        return stored
    began = time.monotonic()
    made = decode()
    worth = time.monotonic() - began >= WORTH_SECONDS and made.images.nbytes <= MOST_BYTES
    if worth and not path.parent.is_symlink():  # a link in the cache could lead to any folder of the user's
        _write(path, key, made)
    return made


def _read(path: Path, key: str, rows: int, size: Size) -> DecodedRows | None:
    stored = read_cached(path, key) if path.exists() else None
    if stored is None:
        return None
    safetensors = require("safetensors.torch", extra="train", purpose="reading decoded images")
    try:
        tensors = safetensors.load(stored)
        images, good, digests = tensors["images"], tensors["good"].bool(), tensors["digests"]
        found = [(str(kind), str(where)) for kind, where in json.loads(bytes(tensors["found"].tolist()))]
    except Exception:  # of safetensors, of JSON, or a missing name: the file is not what was written
        return None
    fits = images.shape == (rows, *size) and images.dtype == torch.uint8 and good.shape == digests.shape == (rows,)
    return DecodedRows(images, good, found, digests) if fits else None


def _write(path: Path, key: str, made: DecodedRows) -> None:
    safetensors = require("safetensors.torch", extra="train", purpose="keeping decoded images")
    found = torch.tensor(list(json.dumps(made.found).encode()), dtype=torch.uint8)
    tensors = {"images": made.images.contiguous(), "good": made.good.to(torch.uint8), "found": found}
    tensors["digests"] = made.digests
    if write_cached(path, key, safetensors.save(tensors)):
        _make_room(path)


def _make_room(newest: Path) -> None:
    """Remove the oldest entries where all together take too much."""
    entries = sorted(newest.parent.glob("decoded-*.safetensors"), key=lambda path: path.lstat().st_mtime_ns)
    total = sum(path.lstat().st_size for path in entries)
    for path in entries:
        if total <= MOST_BYTES_OF_ALL or path == newest:
            return
        total -= path.lstat().st_size
        path.unlink(missing_ok=True)


# Decode many rows of a store into one uint8 tensor, by worker processes if there are many.

OTHER_SIZE = "resized image"
_CHUNK = 256
_WORTH_WORKERS = 4096
_MOST_WORKERS = 16
_SAMPLED_HEADERS = 64
_RUN = 8

Chunk = tuple[Tensor, Tensor, list[tuple[str, str]], Tensor]


@dataclass(frozen=True)
class Chunks(Dataset):
    """Rows decoded to one size, in chunks: images, which of them are good, the problems found, and digests."""

    store: ImageStore
    rows: Tensor
    size: Size
    any_size: bool

    def __len__(self) -> int:
        return ceil_div(len(self.rows), _CHUNK)

    def __getitem__(self, chunk: int) -> Chunk:
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
        images = stack(pixels, height, width, channels)
        taken = self.store.contents.take()
        digests = torch.tensor([taken.get(row, 0) for row in rows], dtype=torch.int64)
        return images.permute(0, 3, 1, 2).contiguous(), good, found, digests


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

    `what` is the title of a progress bar; an empty one shows none.
    """
    chunks = Chunks(store, rows, size, any_size)
    _ = store.contents.stamps  # sizes and times of all files, listed here and not by each worker
    refuse = problems.refuse if bad == "refuse" else None

    def decode() -> DecodedRows:
        return _decode(chunks, what, problems, refuse)

    images, good, found, digests = decoded_once(store, rows, size, any_size=any_size, decode=decode)
    note_contents(store, dict(zip(rows.tolist(), digests.tolist(), strict=True)))
    problems.add_all(found)
    if bad == "refuse":
        problems.refuse()
    if not good.any():
        raise LowRankError(f"none of {counted(len(rows), 'image')} can be decoded: {problems}.")
    kept = rows[good]
    images = images if good.all() else images[good]
    return Decoded(images, store.labels[kept], problems, lambda place: store.where(int(kept[place])))


def _decode(chunks: Chunks, what: str, problems: Problems, refuse: Callable[[], None] | None) -> DecodedRows:
    """All chunks as one; `refuse` raises at the first bad image."""
    number = len(chunks.rows)
    images = torch.empty(number, *chunks.size, dtype=torch.uint8)
    good, all_found = torch.ones(number, dtype=torch.bool), []
    digests = torch.zeros(number, dtype=torch.int64)
    with ImageProgress(what, number, enabled=bool(what)) as progress:
        for index, (part, kept, found, read) in enumerate(_each(chunks)):
            place = slice(index * _CHUNK, index * _CHUNK + len(kept))
            images[place], good[place], digests[place] = part, kept, read
            problems.add_all(found)
            all_found += found
            if refuse:
                refuse()
            progress.advance(len(kept))
    return DecodedRows(images, good, all_found, digests)


def _each(chunks: Chunks) -> Iterable[Chunk]:
    """Every chunk in order, by processes for large sets: Pillow holds the interpreter on small images."""
    workers = min(_MOST_WORKERS, os.cpu_count() or 1) if len(chunks.rows) >= _WORTH_WORKERS else 0
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return (chunks[number] for number in range(len(chunks)))
    return DataLoader(chunks, batch_size=None, num_workers=workers, multiprocessing_context="fork")


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
