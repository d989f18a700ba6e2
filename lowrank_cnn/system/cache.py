"""Where results are kept between runs: whitening matrices, times of kernels, plans."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """LOWRANK_CACHE, or a folder in the place that the system keeps for caches."""
    if chosen := os.environ.get("LOWRANK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowrank-cnn"
