"""What was measured on this device with these versions, kept as JSON in the user's cache folder."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.system.cache import JsonCache, cache_folder

LAYOUT = 5
"""What an entry holds; files of another layout are left alone."""
WAYS = ("graph", "call")
"""How a path is timed: within a CUDA graph, and called from Python."""
_PLAN = re.compile(r"[a-z]+(-[a-z][0-9]{1,6})+")
"""A plan as text: a kernel, and the sizes of its tile."""
_passing: dict[str, Any] = {}


@lru_cache(maxsize=1)
def entries() -> JsonCache:
    """What was measured on this device with these versions."""
    path = store_path()
    return JsonCache(path, key=path.stem, valid=_is_entry)


def keep(key: str, entry: dict[str, Any], *, lasting: bool) -> None:
    """Go by an entry from now on; one that is not to last holds in this run alone, where there is no other."""
    if not lasting:
        _passing[key] = entry
        return
    entries()[key] = entry
    entries().save()


def find(key: str) -> dict[str, Any] | None:
    """What was measured before, if anything was."""
    return entries().get(key) or _passing.get(key)


def _is_entry(entry: object) -> bool:
    """Whether a stored value is an entry: times of both paths, a plan, and whether it was tuned."""
    if not isinstance(entry, dict) or not isinstance(entry.get("tuned"), bool):
        return False
    plan, paths = entry.get("plan"), (entry.get("fused"), entry.get("torch"))
    has_times = all(isinstance(path, dict) and all(_is_time(path.get(way)) for way in WAYS) for path in paths)
    return has_times and isinstance(plan, str) and _PLAN.fullmatch(plan) is not None


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def store_path() -> Path:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = [torch.__version__, _triton_version()]
    name = "-".join([f"kernels{LAYOUT}", device, *versions]).replace(" ", "-").replace("/", "-")
    return cache_folder() / f"{name}.json"


def _triton_version() -> str:
    if find_spec("triton") is None:
        return "none"
    import triton

    return triton.__version__
