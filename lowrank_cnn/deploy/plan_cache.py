"""Measured times on disk, found again by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowrank_cnn.deploy.blocks import Block
from lowrank_cnn.kernels.mode import is_for_graphs
from lowrank_cnn.system.cache import JsonCache, cache_folder
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.version import __version__


@dataclass
class Cache:
    """Times of blocks, by a key of device, versions, threads, layer and input; without a path, nothing is kept.

    `taken` is how many were found; `blind`, it finds none, and what is measured replaces what it has.
    """

    entries: JsonCache
    taken: int = 0
    blind: bool = False

    @classmethod
    def open(cls, where: str | Path | bool) -> Cache:
        """True is the user's cache directory, False none; a damaged file counts as empty."""
        path = cache_folder() / "plans.json" if where is True else Path(where) if where else None
        return cls(JsonCache(path, key="plans", valid=_is_times))

    def times(self, block: Block, x: Tensor, ways: list[str]) -> dict[str, float] | None:
        """What was measured before, if it was measured for exactly these ways."""
        found = self.entries.get(_key(block, x))
        if self.blind or found is None or set(found) != set(ways):
            return None
        self.taken += 1
        return dict(found)

    def keep(self, block: Block, x: Tensor, times: dict[str, float]) -> None:
        self.entries[_key(block, x)] = times

    def save(self) -> bool:
        """Keep what was measured; False where it cannot be written, which costs the next plan its time."""
        return self.entries.save()


def _is_times(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    return all(isinstance(ms, int | float) and not math.isnan(ms) and ms >= 0 for ms in entry.values())


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
