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

from lowrank_cnn.core.files import LARGEST_JSON, parse_json, read_regular, write_atomically

FORMAT = "lowrank-cnn cache 1"


def cache_folder() -> Path:
    """LOWRANK_CACHE, or a folder where the system keeps caches."""
    if chosen := os.environ.get("LOWRANK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowrank-cnn"


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
        payload = json.dumps({**self._read(), **self._changed}, indent=1, sort_keys=True).encode()
        try:
            write_atomically(self.path, json.dumps(self._header(payload)).encode() + b"\n" + payload)
        except (OSError, ValueError):
            return False
        return True

    def _read(self) -> dict[str, Any]:
        """The entries of the file: a line of JSON with the checksum, then the entries."""
        if self.path is None:
            return {}
        try:
            first, _, payload = read_regular(self.path, most=LARGEST_JSON).partition(b"\n")
            values = parse_json(payload) if parse_json(first) == self._header(payload) else {}
        except (OSError, ValueError, MemoryError):
            return {}
        return {name: entry for name, entry in values.items() if self._valid(entry)}

    def _header(self, payload: bytes) -> dict[str, str]:
        digest = hashlib.sha256(self._key.encode() + b"\n" + payload).hexdigest()
        return {"format": FORMAT, "key": self._key, "sha256": digest}
