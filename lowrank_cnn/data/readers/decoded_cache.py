"""Decoded images kept between runs, so that a second start does not decode them again.

An entry belongs to the exact files: their paths, sizes and times of change. Anything else counts as another set.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.data.fingerprint import fingerprint_of_parts
from lowrank_cnn.data.readers.image_store import ImageStore
from lowrank_cnn.data.types import Size
from lowrank_cnn.system.cache import cache_folder, read_cached, write_cached
from lowrank_cnn.system.errors import require

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
