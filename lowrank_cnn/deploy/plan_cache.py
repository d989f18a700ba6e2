"""Measured times on disk, found again by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowrank_cnn.deploy.blocks import Block
from lowrank_cnn.kernels.mode import is_for_graphs
from lowrank_cnn.system.cache import cache_folder
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.version import __version__


@dataclass
class Cache:
    """Times of blocks, by a key of device, versions, threads, layer and input; without a path, nothing is kept.

    `taken` is how many were found; `blind`, it finds none, and what is measured replaces what it has.
    """

    path: Path | None
    entries: dict[str, dict[str, float]] = field(default_factory=dict)
    changed: bool = False
    taken: int = 0
    blind: bool = False

    @classmethod
    def open(cls, where: str | Path | bool) -> Cache:
        """True is the user's cache directory, False none; a damaged file counts as empty."""
        if where is False:
            return cls(None)
        path = cache_folder() / "plans.json" if where is True else Path(where)
        try:
            entries = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            entries = {}
        return cls(path, entries if isinstance(entries, dict) else {})

    def times(self, block: Block, x: Tensor, ways: list[str]) -> dict[str, float] | None:
        """What was measured before, if it was measured for exactly these ways."""
        found = self.entries.get(_key(block, x))
        if self.blind or not isinstance(found, dict) or set(found) != set(ways):
            return None
        self.taken += 1
        return dict(found)

    def keep(self, block: Block, x: Tensor, times: dict[str, float]) -> None:
        self.entries[_key(block, x)] = times
        self.changed = True

    def save(self) -> None:
        """Replace the file in one move."""
        if self.path is None or not self.changed:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.entries, indent=1, sort_keys=True))
            temporary.replace(self.path)
        except OSError as error:
            raise LowRankError(f"the plan cannot be kept in {self.path}: {error.strerror}.") from error


def _key(block: Block, x: Tensor) -> str:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    parts = [str(module) for module in block.modules]
    where = [_machine(), torch.get_num_threads(), str(x.device), is_for_graphs()]
    text = json.dumps([__version__, where, str(x.dtype), list(x.shape), last, parts])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _machine() -> str:
    known = environment()
    return str([known[name] for name in ("torch", "triton", "cudnn", "gpu", "cpu")])
