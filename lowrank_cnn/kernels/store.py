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

LAYOUT = 2
"""What an entry holds; files of another layout are left alone."""


@lru_cache(maxsize=1)
def entries() -> dict[str, Any]:
    """What was measured on this device with these versions."""
    try:
        return json.loads(store_path().read_text())
    except (OSError, ValueError):
        return {}


def save() -> None:
    path = store_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(entries(), indent=1))
        part.replace(path)


def store_path() -> Path:
    folder = os.environ.get("LOWRANK_CACHE") or Path.home() / ".cache" / "lowrank_cnn"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = [torch.__version__, _triton_version()]
    return Path(folder) / (
        f"kernels{LAYOUT}-" + "-".join([device, *versions]).replace(" ", "-").replace("/", "-") + ".json"
    )


def _triton_version() -> str:
    if find_spec("triton") is None:
        return "none"
    import triton

    return triton.__version__
