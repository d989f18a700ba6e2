"""What was measured on this device with these versions, kept as JSON in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.system.cache import cache_folder

LAYOUT = 5
"""What an entry holds; files of another layout are left alone."""
_passing: dict[str, Any] = {}


@lru_cache(maxsize=1)
def entries() -> dict[str, Any]:
    """What was measured on this device with these versions."""
    return _read()


def keep(key: str, entry: dict[str, Any], *, lasting: bool) -> None:
    """Go by an entry from now on; one that is not to last holds in this run alone, where there is no other."""
    (entries() if lasting else _passing)[key] = entry
    if lasting:
        _save()


def find(key: str) -> dict[str, Any] | None:
    """What was measured before, if anything was."""
    return entries().get(key) or _passing.get(key)


def _read() -> dict[str, Any]:
    try:
        return json.loads(store_path().read_text())
    except (OSError, ValueError):
        return {}


def _save() -> None:
    """Write what this process knows beside what others have written since it began."""
    path = store_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**_read(), **entries()}, indent=1))
        part.replace(path)


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
