"""Weights in a .safetensors file, with how to build the network around them and what images it takes.

Beside the weights the file holds a description as JSON in its header: what `rebuild` needs, the size of the images
and, of a trained network, its classes and recipe (`card`). What images are prepared with lies among the tensors,
under `lowrank_cnn.preprocess.`. Reading runs no code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.models.network import TrainingCard
from lowrank_cnn.models.rebuild import describe, rebuild
from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.provenance import note, notes

CHANGED = (
    "the network no longer is what its configuration builds (merged, planned, optimised or changed by hand): "
    "export it before that, or to .onnx or .pt2."
)
_KEY = "lowrank_cnn"
_PREPROCESS = f"{_KEY}.preprocess."
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Stored:
    """A network out of a file, with what the file says of its images; the card is that of a trained one."""

    network: nn.Module
    input_size: tuple[int, ...] | None = None
    card: Mapping[str, Any] | None = None
    preprocess: dict[str, Tensor] = field(default_factory=dict)


def write_weights(path: Path, stored: Stored) -> None:
    """Write a network that `read_weights` can build again; another is refused."""
    safetensors = require("safetensors.torch", extra="train", purpose="writing weights")
    description = describe(stored.network)
    _check_description(stored.network, description)
    size = stored.input_size
    about = {"input": list(size) if size else None, "card": stored.card, "dtype": str(dtype_of(stored.network))}
    text = json.dumps({**description, **about})
    whole = _Whole(stored.network, {_PREPROCESS + name: tensor for name, tensor in stored.preprocess.items()})
    try:
        safetensors.save_model(whole, str(path), metadata={"format": "pt", _KEY: text})
    except RuntimeError as error:  # parts of one memory, as layers laid out for the kernels
        raise LowRankError("layers here share their memory: export the network that was optimised.") from error


def read_weights(path: Path, *, into: nn.Module | None = None) -> Stored:
    """The network of a file with its weights; `into` is one that is not ours, before any conversion."""
    safetensors = require("safetensors.torch", extra="train", purpose="reading weights")
    description, preprocess = _description(path)
    network = rebuild(description, into=into)
    network = copy.deepcopy(network) if network is into else network
    network.to(_DTYPES.get(str(description.get("dtype")), dtype_of(network)))
    try:
        missing, unknown = safetensors.load_model(network, str(path), strict=False)
    except RuntimeError as error:
        raise LowRankError(f"the weights in {path} do not fit the network: {_first_line(error)}") from error
    wrong = [*missing, *(name for name in unknown if not name.startswith(_PREPROCESS))]
    if wrong:
        raise LowRankError(
            f"the weights in {path} do not fit the network: {sorted(wrong)[0]} is missing or unknown."
        )
    card, size = description.get("card"), _size(description.get("input"))
    note(network, begun_from=path.name, input_size=size)
    card = card if isinstance(card, Mapping) else None
    if card is not None:
        note(network, training_card=TrainingCard(card, preprocess))
    return Stored(network, size, card, preprocess)


def read_card(path: Path) -> Mapping[str, Any] | None:
    """What a file says of the training of its network, without building it; None where it says nothing."""
    description, _ = _description(path)
    card = description.get("card")
    return card if isinstance(card, Mapping) else None


def is_exported(path: Path) -> bool:
    """Whether a path is that of an exported file; a checkpoint of a run has a manifest beside it."""
    return path.suffix == ".safetensors" and path.is_file() and not path.with_suffix(".json").is_file()


def dtype_of(model: nn.Module) -> torch.dtype:
    """The precision of a network's weights, or of what a plan has made of them."""
    tensors = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point())
    return next((tensor.dtype for tensor in tensors), torch.float32)


class _Whole(nn.Module):
    """A network's weights and the tensors beside them, as safetensors wants them: in one state."""

    def __init__(self, network: nn.Module, beside: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network, self.beside = network, beside

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {**self.network.state_dict(), **self.beside}


def _check_description(model: nn.Module, description: Mapping[str, Any]) -> None:
    if description["model"] is None:
        merged = any(row.error is not None for row in notes(model).merging)
        plans = (notes(part).plan for part in model.modules())
        if merged or any(plan and plan.used for plan in plans) or notes(model).optimized:
            raise LowRankError(CHANGED)
        return
    with torch.device("meta"):
        again = rebuild(description).state_dict()
    stored = model.state_dict()
    if {name: t.shape for name, t in stored.items()} != {name: t.shape for name, t in again.items()}:
        raise LowRankError(CHANGED)


def _description(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the header says, and the tensors that images are prepared with."""
    safetensors = require("safetensors", extra="train", purpose="reading weights")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            names = [name for name in file.keys() if name.startswith(_PREPROCESS)]  # noqa: SIM118
            preprocess = {name.removeprefix(_PREPROCESS): file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise LowRankError(f"{path} is not a safetensors file: {error}.") from error
    if text is None:
        raise LowRankError(f"{path} holds weights but not how to build a network around them.")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise LowRankError(f"{path} does not say how to build a network: its description is damaged.")
    return found, preprocess


def _size(value: object) -> tuple[int, ...] | None:
    """The size of an image as JSON holds it; what is none is left out."""
    right = isinstance(value, Sequence) and len(value) == 3 and all(isinstance(v, int) and v > 0 for v in value)
    return tuple(value) if right else None  # type: ignore[arg-type]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
