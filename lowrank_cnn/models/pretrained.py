"""Trained weights that come with the package: a file for each network and data set, its card inside.

A file holds the weights in half precision, what images are prepared with (`preprocess.`), and, in its header, the
card as JSON: options of the network, recipe, classes, seed, accuracy, and what it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LowRankError

FOLDER = Path(__file__).parent / "weights"
_PREPROCESS = "preprocess."
_FREE = ("dropout", "num_classes")
"""Options that whoever trains on may have otherwise: they change no weights, or those of the last layer alone."""


@dataclass(frozen=True)
class Pretrained:
    """Weights and preprocessing as tensors by name, and the card."""

    weights: dict[str, Tensor]
    preprocess: dict[str, Tensor]
    card: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """The options of `create_model` that build the network."""
        return self.card["model"]


def list_pretrained(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """Networks and the data they were trained on, of all weights that are there."""
    pairs = (path.name.removesuffix(".safetensors").rpartition(".") for path in folder.glob("*.safetensors"))
    return sorted((name, data) for name, _, data in pairs)


def read_pretrained(name: str, data: str, folder: Path = FOLDER) -> Pretrained:
    """The weights of a network trained on a data set."""
    if (name, data) not in list_pretrained(folder):
        known = ", ".join(f"{name} on {data}" for name, data in list_pretrained(folder)) or "none"
        raise LowRankError(f"there are no weights of {name} on {data}; there are: {known}.")
    from safetensors import SafetensorError, safe_open

    path = _path(name, data, folder)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            card = json.loads(file.metadata()["card"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LowRankError(f"{path} is damaged: install the package again.") from error
    preprocess = {k.removeprefix(_PREPROCESS): t for k, t in tensors.items() if k.startswith(_PREPROCESS)}
    weights = {k: t for k, t in tensors.items() if not k.startswith(_PREPROCESS)}
    return Pretrained(weights, preprocess, card)


def write_pretrained(found: Pretrained, data: str, folder: Path = FOLDER) -> Path:
    """Keep weights with the package, in half precision."""
    from safetensors.torch import save_file

    halves = {k: t.half() if t.is_floating_point() else t for k, t in found.weights.items()}
    tensors = halves | {_PREPROCESS + key: tensor for key, tensor in found.preprocess.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(found.config["name"], data, folder)
    kept = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(kept, path, metadata={"card": json.dumps(found.card)})
    path.chmod(0o644)  # safetensors writes for its owner alone, and the package is for all
    return path


def load_into(model: torch.nn.Module, found: Pretrained) -> None:
    """Give a network the weights it was described for; a layer for other classes keeps its fresh ones."""
    own, classes = model.state_dict(), found.config["num_classes"]
    of_classes = [name for name, weight in found.weights.items() if weight.shape[:1] == (classes,) and name in own]
    fresh = [name for name in of_classes if own[name].shape != found.weights[name].shape]
    try:
        model.load_state_dict({**found.weights, **{name: own[name] for name in fresh}})
    except RuntimeError as error:
        raise LowRankError(f"the weights of {found.config['name']} do not fit the network.") from error


def agreed(
    options: Mapping[str, Any], defaults: Mapping[str, Any], found: Pretrained, data: str
) -> dict[str, Any]:
    """The options that the weights want; one that was asked for otherwise is refused, unless it is free."""
    asked = {key: value for key, value in options.items() if value != defaults[key]}
    for key, value in asked.items():
        if key not in _FREE and value != found.config.get(key):
            stated = found.config.get(key)
            raise LowRankError(
                f"the weights of {found.config['name']} on {data} are for {key}={stated!r}, not {value!r}."
            )
    return {**found.config, **{key: asked[key] for key in _FREE if key in asked}}


def _path(name: str, data: str, folder: Path) -> Path:
    return folder / f"{name}.{data}.safetensors"
