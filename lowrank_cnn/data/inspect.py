"""Look at every image of a data set before a network is trained on it, and draw a few of each class."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import write_atomically
from lowrank_cnn.core.text import printable
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, decode_image, open_image
from lowrank_cnn.data.sources import open_data
from lowrank_cnn.data.store import counting
from lowrank_cnn.data.streamed import StreamedSplit
from lowrank_cnn.data.types import Data, Problems, Split, evenly_spaced

if TYPE_CHECKING:
    from PIL.Image import Image

_CHUNK = 256
_TILE, _GAP, _NAME_WIDTH = 96, 4, 180
MOST_CLASSES = 100
"""Rows of a contact sheet: more would make a picture that nobody opens."""


class Look(NamedTuple):
    """What one image shows: its height and width, its colour mode, and a digest of its pixels."""

    size: tuple[int, int]
    mode: str
    digest: bytes


@dataclass
class SplitSummary:
    """The images of a split: counts by class name, by size (height, width) and by colour mode, and problems."""

    classes: dict[str, int]
    problems: Problems
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)

    @property
    def images(self) -> int:
        """Images that can be decoded."""
        return self.modes.total()


@dataclass
class DataSummary:
    """What `inspect_data` finds. Duplicates are pairs of names: an image, and an earlier one with equal pixels.

    - `leaks`: test images that are training images as well. They make a test meaningless.
    - `repeated`: duplicates within a split, by its name.
    - `contradictions`: duplicates of any kind whose labels differ.
    """

    data: Data
    splits: dict[str, SplitSummary]
    leaks: list[tuple[str, str]] = field(default_factory=list)
    repeated: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: {"train": [], "test": []})
    contradictions: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The summary in values that JSON can hold."""
        splits = {
            name: {
                "images": split.images,
                "classes": split.classes,
                "sizes": {f"{height}x{width}": n for (height, width), n in split.sizes.most_common()},
                "modes": dict(split.modes.most_common()),
                "problems": split.problems.found,
            }
            for name, split in self.splits.items()
        }
        found = {"leaks": self.leaks, "repeated": self.repeated, "contradictions": self.contradictions}
        return {"name": self.data.name, "splits": splits, **found}


def inspect_data(source: str | Path | Data, **options: Any) -> DataSummary:
    """Decode every image once, and count: classes, sizes, modes, unreadable images, duplicates, leaks.

    >>> found = inspect_data("digits", limit=100)
    >>> found.splits["train"].images, len(found.leaks)
    (100, 0)

    `options` are those of `open_data`. Duplicates are images with equal pixels, whatever their names and formats.
    Images are read in turn and never all held in memory.
    """
    shown = options.get("progress", True)
    data = source if isinstance(source, Data) else open_data(source, **{**options, "resident_bytes": 0})
    found, seen = DataSummary(data, {}), {}
    for name, split in (("train", data.train), ("test", data.test)):
        found.splits[name] = summary = SplitSummary(dict.fromkeys(data.classes, 0), split.problems)
        labels, what = split.labels.tolist(), f"Looking at images of {name}" if shown else ""
        for index, look in counting(_looks(split, summary.problems), what, len(split), lambda _: 1):
            summary.classes[data.classes[labels[index]]] += 1
            summary.sizes[look.size] += 1
            summary.modes[look.mode] += 1
            here = (name, index, labels[index])
            if (first := seen.setdefault(look.digest, here)) is not here:
                pair = _where(split, index), _where(split if first[0] == name else data.train, first[1])
                (found.repeated[name] if first[0] == name else found.leaks).append(pair)
                if first[2] != labels[index]:
                    found.contradictions.append(pair)
    return found


def _looks(split: Split, problems: Problems) -> Iterator[tuple[int, Look]]:
    """What each image shows, by its number; threads decode, and images that cannot be decoded are problems."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(split), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(split)))
            read = [_read(split, index) for index in chunk]  # a store reads for one thread at a time
            for index, look in zip(chunk, threads.map(_look, read), strict=True):
                if isinstance(look, Look):
                    yield index, look
                else:
                    problems.add(UNDECODABLE, f"{_where(split, index)}: {look}")


def _read(split: Split, index: int) -> bytes | Image | BadImageError:
    """The encoded image, or the image itself if it is in memory, or why it cannot be read."""
    if not isinstance(split, StreamedSplit):
        return _from_pixels(split.picture(index))
    try:
        return split.store.read(int(split.rows[index]))
    except BadImageError as error:
        return error


def _from_pixels(pixels: Any) -> Image:
    if pixels is None:
        raise LowRankError("a Dataset of your own prepares its images itself: they cannot be inspected.")
    rows = pixels.permute(1, 2, 0)
    rows = rows.squeeze(2) if rows.shape[2] == 1 else rows
    return require("PIL.Image", extra="data", purpose="inspecting images").fromarray(rows.contiguous().numpy())


def _look(read: bytes | Image | BadImageError) -> Look | BadImageError:
    if isinstance(read, BadImageError):
        return read
    try:
        image = decode_image(read, channels=3) if isinstance(read, bytes) else read.convert("RGB")
        mode = open_image(read).mode if isinstance(read, bytes) else read.mode
    except BadImageError as error:
        return error
    size = image.height, image.width
    return Look(size, mode, hashlib.blake2b(image.tobytes(), digest_size=16, key=str(size).encode()).digest())


def _where(split: Split, index: int) -> str:
    return split.store.where(int(split.rows[index])) if isinstance(split, StreamedSplit) else split.describe(index)


def check_sheet(path: Path, *, overwrite: bool) -> None:
    """Refuse a name that is not of a PNG file, and a file that exists."""
    if path.suffix.lower() != ".png":
        raise LowRankError(f"a contact sheet is a .png file: {path} is none.")
    if path.exists() and not overwrite:
        raise LowRankError(f"{path} exists; overwrite=True (--overwrite) replaces it.")


def write_contact_sheet(data: Data, path: Path, *, per_class: int = 8, overwrite: bool = False) -> Path:
    """Draw a few training images of each class in a row beside its name, as a PNG file."""
    check_sheet(path, overwrite=overwrite)
    images, draws, fonts, ops = (
        require(f"PIL.{name}", extra="data", purpose="drawing images")
        for name in ("Image", "ImageDraw", "ImageFont", "ImageOps")
    )
    classes, step = data.classes[:MOST_CLASSES], _TILE + _GAP
    sheet = images.new("RGB", (_NAME_WIDTH + per_class * step + _GAP, len(classes) * step + _GAP), "white")
    pen, font = draws.Draw(sheet), fonts.load_default(14)
    for label, name in enumerate(classes):
        top = _GAP + label * step
        of_class = (data.train.labels == label).nonzero()[:, 0].tolist()
        text = printable(name)
        while font.getlength(text) > _NAME_WIDTH - 2 * _GAP:
            text = text[:-2] + "…"
        pen.text((_GAP, top + _TILE // 2 - 8), text, fill="black", font=font)
        for place, number in enumerate(evenly_spaced(len(of_class), per_class)):
            read = _read(data.train, of_class[number])
            try:
                image = decode_image(read, channels=3) if isinstance(read, bytes) else read
            except BadImageError as error:
                image = error
            if not isinstance(image, BadImageError):
                sheet.paste(ops.contain(image, (_TILE, _TILE)), (_NAME_WIDTH + place * step, top))
    written = io.BytesIO()
    sheet.save(written, "PNG")
    write_atomically(path, written.getvalue())
    return path
