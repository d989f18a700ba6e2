"""Trained weights that come with the package: a network file for each network and data set.

The weights are stored in half precision and loaded in single. The card states recipe, classes, seed, accuracy, and
the environment that the network was trained in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.models.network_file import read_header, write_network_file
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import replacing
from lowrank_cnn.system.version import __version__

FOLDER = Path(__file__).parent / "weights"
_PREPROCESS = "preprocess."
_FREE = ("dropout", "num_classes")
"""Options that may differ from the trained network's: they change at most the weights of the last layer."""


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
    """All networks with weights in the package, and the data sets that they were trained on.

    >>> import lowrank_cnn as lr
    >>> ("nin-c3-lr", "cifar10") in lr.list_pretrained()
    True
    """
    pairs = (path.name.removesuffix(".safetensors").rpartition(".") for path in folder.glob("*.safetensors"))
    return sorted((name, data) for name, _, data in pairs)


def read_pretrained(name: str, data: str, folder: Path = FOLDER) -> Pretrained:
    """The weights of a network trained on a data set."""
    if (name, data) not in list_pretrained(folder):
        known = ", ".join(f"{name} on {data}" for name, data in list_pretrained(folder)) or "none"
        raise LowRankError(f"there are no weights of {name} on {data}; there are: {known}.")
    path = _path(name, data, folder)
    try:
        file = read_header(path)
        card = {"model": file.description["model"], **file.description["card"]}
        return Pretrained(file.weights(), file.preprocess(), card)
    except (LowRankError, KeyError, TypeError) as error:
        raise LowRankError(f"{path} is damaged: install the package again.") from error


def write_pretrained(found: Pretrained, data: str, folder: Path = FOLDER) -> Path:
    """Store weights in the package, in half precision."""
    halves = {k: t.half() if t.is_floating_point() else t for k, t in found.weights.items()}
    card = {key: value for key, value in found.card.items() if key != "model"}
    description = {
        "version": __version__,
        "model": found.config,
        "conversion": {"changed": []},
        "input": card["data"]["image"],
        "card": card,
        "dtype": "torch.float32",
    }
    path = _path(found.config["name"], data, folder)
    with replacing(path) as temporary:
        write_network_file(temporary, halves, description, found.preprocess)
        temporary.chmod(0o644)  # safetensors writes for its owner alone, and the package is for all
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
    """The options that the weights were trained with; a conflicting option is refused unless it may differ."""
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
