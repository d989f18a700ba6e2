"""Checkpoints: written whole or not at all, verified by checksum, read without running code.

A checkpoint is a pair of files. `step-00000120.safetensors` holds the tensors; `step-00000120.json` holds
everything else, the checksum of the tensors, and its own. The JSON file is written last, so a pair that is
complete was written to the end. The two most recent pairs are kept, and the best one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import LARGEST_JSON, delete, parse_json, read_regular, write_atomically
from lowrank_cnn.system.seal import BrokenSealError, sealed, unsealed

FORMAT = "lowrank-cnn checkpoint 1"
KEEP = 2
LARGEST_TENSORS = 2**36
"""Bytes of the largest file of tensors that is read: more than any network here has, less than a device gives."""


class DamagedCheckpointError(LowRankError):
    """The files are cut short, changed, or not a checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors by name, and the state that JSON can hold; `stem` is where it was read from."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    stem: Path | None = None

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, without it."""
        start = prefix + "."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run, in one directory."""

    directory: Path

    def save(self, checkpoint: Checkpoint, iteration: int, *, kind: str = "step", keep: int = KEEP) -> None:
        """Write a checkpoint, and only then remove those that it replaces."""
        write_checkpoint(self.directory / f"{kind}-{iteration:08d}", checkpoint)
        for stem in self._superseded(kind, iteration, keep):
            # The manifest goes first: without it, what is left no longer counts as a checkpoint.
            if delete(stem.with_suffix(".json")):
                delete(stem.with_suffix(".safetensors"))

    def latest(self, say: Callable[[str], None], *, kind: str = "step") -> Checkpoint | None:
        """The newest intact checkpoint; `say` gets a sentence about each damaged newer one."""
        damages: list[str] = []
        for stem in reversed(self._stems(kind, ".json")):
            try:
                checkpoint = read_checkpoint(stem)
            except DamagedCheckpointError as damage:
                damages.append(str(damage))
                continue
            for damage in damages:
                say(damage)
            return checkpoint
        if damages:
            raise LowRankError(
                f"every checkpoint in {self.directory} is damaged, and none can be used: "
                "train anew, in another directory."
            )
        return None

    def newest(self) -> Path | None:
        """The path of the newest checkpoint, intact or not; None if nothing has been saved yet."""
        return max(self._stems("step", ".json"), default=None)

    def _stems(self, kind: str, suffix: str) -> list[Path]:
        return sorted(path.with_suffix("") for path in self.directory.glob(f"{kind}-*{suffix}"))

    def _superseded(self, kind: str, iteration: int, keep: int) -> list[Path]:
        """All but the last few complete pairs; also any beyond `iteration`, of a run that was taken back."""
        complete = [stem for stem in self._stems(kind, ".json") if stem.name <= f"{kind}-{iteration:08d}"]
        return sorted({*self._stems(kind, ".json"), *self._stems(kind, ".safetensors")} - {*complete[-keep:]})


def write_checkpoint(stem: Path, checkpoint: Checkpoint) -> None:
    """Write the pair of files `stem.safetensors` and `stem.json`, in this order, to a folder that is there.

    A folder that was moved is not made again: the run would then lie in two places.
    """
    safetensors = require("safetensors.torch", extra="train", purpose="writing a checkpoint")
    payload = safetensors.save({name: _portable(tensor) for name, tensor in checkpoint.tensors.items()})
    manifest = {"format": FORMAT, "tensors": _sha256(payload), "state": checkpoint.state}
    write_atomically(stem.with_suffix(".safetensors"), payload, parents=False)
    write_atomically(stem.with_suffix(".json"), _manifest_bytes(manifest), parents=False)


def read_checkpoint(stem: Path) -> Checkpoint:
    """Read a pair of files back, or say in one sentence why it cannot be trusted."""
    safetensors = require("safetensors.torch", extra="train", purpose="reading a checkpoint")
    manifest = _read_manifest(stem.with_suffix(".json"))
    path = stem.with_suffix(".safetensors")
    try:
        payload = read_regular(path, most=LARGEST_TENSORS)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    if _sha256(payload) != manifest.get("tensors"):
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not the one that was written.")
    return Checkpoint(safetensors.load(payload), manifest["state"], stem)


def read_state(stem: Path) -> dict[str, Any]:
    """What a checkpoint holds besides its tensors, without reading those."""
    return _read_manifest(stem.with_suffix(".json"))["state"]


def _portable(tensor: Tensor) -> Tensor:
    """A contiguous copy in main memory: safetensors knows neither strides nor shared storage."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _manifest_bytes(manifest: Mapping[str, object]) -> bytes:
    return json.dumps(sealed(manifest), sort_keys=True).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_regular(path, most=LARGEST_JSON)
        manifest = unsealed(parse_json(content))
        known = manifest["format"] == FORMAT and isinstance(manifest["state"], dict)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except BrokenSealError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged or not a checkpoint of this library.") from error
    # Byte by byte: two ways to write one number have the same value, and so the same checksum.
    if content != _manifest_bytes(manifest) or not known:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not the one that was written.")
    return manifest


def _sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()
