"""The one cache: results that are kept between runs, in files with a checksum and a key.

A cache saves time and never decides a result. A file that is absent, damaged, of another key, or of another kind
counts as empty. A file that cannot be written costs the next run some time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import parse_json, read_regular, write_atomically

FORMAT = "lowrank-cnn cache 1"
LARGEST_FILE = 2**32
"""Bytes of the largest file that is read: the whitening matrix of the largest images takes a quarter of it."""


def cache_folder() -> Path:
    """LOWRANK_CACHE, or a folder where the system keeps caches."""
    if chosen := os.environ.get("LOWRANK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowrank-cnn"


def read_cached(path: Path, key: str) -> bytes | None:
    """The values that `write_cached` stored under this key; None if the file holds anything else."""
    try:
        first, _, payload = read_regular(path, most=LARGEST_FILE).partition(b"\n")
        header = parse_json(first)
    except (OSError, ValueError, MemoryError):
        return None
    return payload if header == _header(key, payload) else None


def write_cached(path: Path, key: str, payload: bytes) -> bool:
    """Store bytes under a key: a line of JSON with their checksum, then the bytes. False if that failed."""
    try:
        write_atomically(path, json.dumps(_header(key, payload)).encode() + b"\n" + payload)
    except (OSError, ValueError):
        return False
    return True


def cached_tensors(
    key: str, make: Callable[[], dict[str, Tensor]], *, folder: Path | None = None
) -> dict[str, Tensor]:
    """The tensors that were stored under this key, else those of `make`.

    cached_tensors("zca-1f3b", compute)
    """
    from safetensors.torch import load, save

    path = (folder or cache_folder()) / f"{key}.safetensors"
    if (stored := read_cached(path, key)) is not None:
        return load(stored)
    made = make()
    write_cached(path, key, save(made))
    return made


def tensor_key(tensor: Tensor, *parameters: float) -> str:
    """A key for what is computed from this tensor with these parameters."""
    hashed = hashlib.sha256(f"{tensor.dtype}/{tuple(tensor.shape)}/{'/'.join(map(repr, parameters))}".encode())
    hashed.update(tensor.cpu().contiguous().numpy().data)
    return hashed.hexdigest()[:32]


class JsonCache:
    """Entries by name in one file. Every entry passes `valid`; others are left out when the file is read.

    times = JsonCache(cache_folder() / "plans.json", key="plans", valid=is_times)
    times["conv1"] = {"as given": 0.3}
    times.save()
    """

    def __init__(self, path: Path | None, *, key: str, valid: Callable[[object], bool]) -> None:
        self.path, self._key, self._valid = path, key, valid
        self.entries, self._changed = self._read(), {}

    def get(self, name: str) -> Any:
        """The entry of this name, or None."""
        return self.entries.get(name)

    def __setitem__(self, name: str, entry: Any) -> None:
        self.entries[name] = self._changed[name] = entry

    def save(self) -> bool:
        """Write this process's entries beside those that others have written since; False if that failed."""
        if self.path is None or not self._changed:
            return True
        payload = json.dumps({**self._read(), **self._changed}, indent=1, sort_keys=True)
        return write_cached(self.path, self._key, payload.encode())

    def _read(self) -> dict[str, Any]:
        stored = None if self.path is None else read_cached(self.path, self._key)
        try:
            values = {} if stored is None else parse_json(stored)
        except LowRankError:
            return {}
        if not isinstance(values, dict):
            return {}
        return {name: entry for name, entry in values.items() if self._valid(entry)}


def _header(key: str, payload: bytes) -> dict[str, str]:
    digest = hashlib.sha256(key.encode() + b"\n" + payload).hexdigest()
    return {"format": FORMAT, "key": key, "sha256": digest}
