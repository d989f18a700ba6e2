"""Look at every image of a data set before a network is trained on it, and draw a few of each class."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.errors import LowRankError, option, require
from lowrank_cnn.core.files import write_atomically
from lowrank_cnn.core.text import printable
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, decode_image, open_image
from lowrank_cnn.data.sources import open_data
from lowrank_cnn.data.store import counting
from lowrank_cnn.data.streamed import StreamedSplit
from lowrank_cnn.data.types import Data, Split, evenly_spaced

if TYPE_CHECKING:
    from PIL.Image import Image

_CHUNK = 256
_TILE, _GAP, _NAME_WIDTH, _PER_CLASS = 96, 4, 180, 8
MOST_CLASSES = 100
"""Rows of a contact sheet: more would make a picture that nobody opens."""
_READING = Lock()
"""Stores read for one thread at a time; threads decode side by side."""

Pairs = list[tuple[str, str]]
"""Names of duplicates: an image, and an earlier one with equal pixels."""
Look = tuple[str, str, bytes]
"""The height and width of an image, its colour mode, and a digest of its pixels."""


@dataclass
class SplitSummary:
    """The decodable images of a split, counted by class, by size and by colour mode; duplicates; problems."""

    images: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    sizes: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    repeated: Pairs = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class DataSummary:
    """What `inspect_data` finds. `to_dict` gives it in values that JSON can hold.

    - `leaks`: test images that are training images as well. They make a test meaningless.
    - `contradictions`: duplicates, within a split or across both, whose labels differ.
    """

    data: Data
    train: SplitSummary = field(default_factory=SplitSummary)
    test: SplitSummary = field(default_factory=SplitSummary)
    leaks: Pairs = field(default_factory=list)
    contradictions: Pairs = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        found = {**vars(self), "train": vars(self.train), "test": vars(self.test)}
        return {"name": self.data.name} | {name: value for name, value in found.items() if name != "data"}


def inspect_data(source: str | Path, **options: Any) -> DataSummary:
    """Decode every image once, and count: classes, sizes, modes, unreadable images, duplicates, leaks.

    >>> found = inspect_data("digits", limit=100)
    >>> found.train.images, len(found.leaks)
    (100, 0)

    `source` and `options` are those of `open_data`. Duplicates are images with equal pixels, whatever their names
    and formats. Images are read in turn and never all held in memory.
    """
    data = open_data(source, **{**options, "resident_bytes": 0})
    found, seen, shown = DataSummary(data), {}, options.get("progress", True)
    for name, split, summary in (("train", data.train, found.train), ("test", data.test, found.test)):
        labels, what = split.labels.tolist(), f"Looking at images of {name}" if shown else ""
        summary.classes = dict.fromkeys(data.classes, 0)
        for index, (size, mode, digest) in counting(_looks(split), what, len(split)):
            summary.images += 1
            summary.classes[data.classes[labels[index]]] += 1
            summary.sizes[size] += 1
            summary.modes[mode] += 1
            here = (split, index, labels[index])
            if (first := seen.setdefault(digest, here)) is not here:
                pair = _where(split, index), _where(*first[:2])
                (summary.repeated if first[0] is split else found.leaks).append(pair)
                if first[2] != labels[index]:
                    found.contradictions.append(pair)
        summary.problems = split.problems.found
    return found


def _looks(split: Split) -> Iterator[tuple[int, Look]]:
    """Each image with its number; images that cannot be decoded are added to the problems."""
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(split), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(split)))
            for index, look in zip(chunk, threads.map(partial(_look, split), chunk), strict=True):
                if isinstance(look, tuple):
                    yield index, look
                else:
                    split.problems.add(UNDECODABLE, f"{_where(split, index)}: {look}")


def _look(split: Split, index: int) -> Look | BadImageError:
    try:
        image, mode = _decoded(split, index)
    except BadImageError as error:
        return error
    size = f"{image.height}x{image.width}"
    return size, mode, hashlib.blake2b(image.tobytes(), digest_size=16, key=size.encode()).digest()


def _decoded(split: Split, index: int) -> tuple[Image, str]:
    """An image in RGB, and the colour mode that it is stored in."""
    if isinstance(split, StreamedSplit):
        with _READING:
            data = split.store.read(int(split.rows[index]))
        return decode_image(data, channels=3), open_image(data).mode
    pixels: Any = split.picture(index)
    if pixels is None:
        raise LowRankError("these are volumes, and this is for images.")
    rows = pixels.permute(1, 2, 0).squeeze(2).contiguous().numpy()
    image = require("PIL.Image", extra="data", purpose="inspecting images").fromarray(rows)
    return image.convert("RGB"), image.mode


def _where(split: Split, index: int) -> str:
    return split.store.where(int(split.rows[index])) if isinstance(split, StreamedSplit) else split.describe(index)


def check_sheet(path: Path, *, overwrite: bool) -> None:
    """Refuse a name that is not of a PNG file, and a file that exists."""
    if path.suffix.lower() != ".png":
        raise LowRankError(f"a contact sheet is a .png file: {path} is none.")
    if path.exists() and not overwrite:
        raise LowRankError(f"{path} exists; {option('overwrite', True)} replaces it.")


def write_contact_sheet(data: Data, path: Path) -> None:
    """Draw a few training images of each class in a row beside its name, as a PNG file."""
    images, draws, fonts, ops = (
        require(f"PIL.{name}", extra="data", purpose="drawing images")
        for name in ("Image", "ImageDraw", "ImageFont", "ImageOps")
    )
    classes, step = data.classes[:MOST_CLASSES], _TILE + _GAP
    sheet = images.new("RGB", (_NAME_WIDTH + _PER_CLASS * step + _GAP, len(classes) * step + _GAP), "white")
    pen, font = draws.Draw(sheet), fonts.load_default(14)
    for label, name in enumerate(classes):
        top, text = _GAP + label * step, printable(name)
        while font.getlength(text) > _NAME_WIDTH - 2 * _GAP:
            text = text[:-2] + "…"
        pen.text((_GAP, top + _TILE // 2 - 8), text, fill="black", font=font)
        of_class = (data.train.labels == label).nonzero()[:, 0].tolist()
        for place, number in enumerate(evenly_spaced(len(of_class), _PER_CLASS)):
            with suppress(BadImageError):
                image = ops.contain(_decoded(data.train, of_class[number])[0], (_TILE, _TILE))
                sheet.paste(image, (_NAME_WIDTH + place * step, top))
    written = io.BytesIO()
    sheet.save(written, "PNG")
    write_atomically(path, written.getvalue())
