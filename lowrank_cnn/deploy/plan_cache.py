"""Measured times on disk, found again by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import Block
from lowrank_cnn.kernels.mode import is_for_graphs
from lowrank_cnn.kernels.strips import installed_version
from lowrank_cnn.system.cache import JsonCache, cache_folder
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.version import __version__


@dataclass
class Cache:
    """Times of blocks and of whole networks, by `block_key` and `network_key`; without a path, nothing is kept.

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

    def times(self, key: str, ways: list[str] | None = None) -> dict[str, float] | None:
        """What was measured before; with `ways`, if it was measured for exactly these."""
        found = self.entries.get(key)
        if self.blind or not found or (ways is not None and set(found) != set(ways)):
            return None
        self.taken += 1
        return dict(found)

    def keep(self, key: str, times: dict[str, float]) -> None:
        """Remember what was measured."""
        self.entries[key] = times

    def save(self) -> bool:
        """Keep what was measured; False where it cannot be written, which costs the next plan its time."""
        return self.entries.save()


def _is_times(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    return all(isinstance(ms, int | float) and not math.isnan(ms) and ms >= 0 for ms in entry.values())


def block_key(block: Block, inputs: Sequence[Tensor]) -> str:
    """Everything that the times of a block depend on: machine, versions, threads, layer, epilogue and inputs."""
    return _key("block", str(block), inputs, is_for_graphs())


def network_key(network: nn.Module, inputs: Sequence[Tensor], *options: object) -> str:
    """Everything that the times of a whole network depend on: its structure instead of one layer's."""
    return _key("network", f"{type(network).__qualname__} {network}", inputs, *options)


def _key(kind: str, what: str, inputs: Sequence[Tensor], *options: object) -> str:
    where = [_machine(), torch.get_num_threads(), str(inputs[0].device)]
    text = json.dumps([__version__, kind, where, [_described(x) for x in inputs], what, list(map(str, options))])
    return hashlib.sha256(text.encode()).hexdigest()


def _described(x: Tensor) -> list[object]:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return [str(x.dtype), list(x.shape), last]


@cache
def _machine() -> str:
    known = environment()
    return str([*(known[name] for name in ("torch", "triton", "cudnn", "gpu", "cpu")), installed_version()])
