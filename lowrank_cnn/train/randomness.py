"""Seed, save and restore every random generator that a training run draws from."""

from __future__ import annotations

import random
from types import ModuleType

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LowRankError, require

_RANK_STRIDE = 1_000_003  # keeps the processes' streams apart, and apart from those of neighbouring seeds


def seed_generators(seed: int, rank: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators; each process gets its own stream."""
    if not 0 <= seed < 2**32:
        raise LowRankError(f"a seed lies between 0 and {2**32 - 1}, not at {seed}.")
    seed = (seed + rank * _RANK_STRIDE) % 2**32
    random.seed(seed)
    _numpy().random.seed(seed)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator, as tensors."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = _numpy().random.get_state(legacy=True)
    states = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore every generator to the state that `generator_states` returned."""
    version, *words = states["python"].tolist()
    has_spare, spare = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), spare if has_spare else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    words = _numpy().array(keys, dtype="uint32")
    _numpy().random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _numpy() -> ModuleType:
    return require("numpy", extra="train", purpose="training")
