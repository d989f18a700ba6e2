"""Decode many rows of a store into one uint8 tensor, by worker processes if there are many."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.data.image_progress import ImageProgress
from lowrank_cnn.data.images.decode import (
    UNDECODABLE,
    BadImageError,
    ImageHeader,
    cover_and_crop,
    decode_image,
    image_header,
    stack,
)
from lowrank_cnn.data.readers.decoded_cache import DecodedRows, decoded_once
from lowrank_cnn.data.readers.image_store import ImageStore, note_contents, read_watched
from lowrank_cnn.data.resident import Decoded
from lowrank_cnn.data.types import Bad, Problems, Size
from lowrank_cnn.system.arithmetic import ceil_div
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted

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
