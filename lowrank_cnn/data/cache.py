"""Results worth keeping between runs, as safetensors files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lowrank_cnn.system.cache import cache_folder

_LAYOUT = 1


def digest(images: Tensor, *parameters: float) -> str:
    """A name for what is computed from these images with these parameters."""
    text = f"{_LAYOUT}/{tuple(images.shape)}/{'/'.join(map(repr, parameters))}"
    hashed = hashlib.sha256(text.encode())
    hashed.update(images.cpu().contiguous().numpy().data)
    return hashed.hexdigest()[:32]


def cached(key: str, make: Callable[[], dict[str, Tensor]], *, folder: Path | None = None) -> dict[str, Tensor]:
    """The stored tensors of this key; else they are made and stored.

    A damaged file is made anew, and a folder that cannot be written only costs the next run some time.
    """
    from safetensors.torch import load_file, save

    file = (folder or cache_folder()) / f"{key}.safetensors"
    try:
        return load_file(file)
    except Exception:  # absent, unreadable or damaged: safetensors has no common error for these
        made = make()
    _write_whole(file, save(made))
    return made


def _write_whole(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{file.name}.", delete=False) as part:
            try:
                part.write(content)
                part.flush()
                os.fsync(part.fileno())
                Path(part.name).replace(file)
            except OSError:
                Path(part.name).unlink(missing_ok=True)
    except OSError:
        return
