"""The one format of a network's file: safetensors with a description of the network in its header.

The header holds JSON under `lowrank_cnn`: `model` (options of `create_model`), `conversion` (layers rewritten and
their schemes), `input` (size of the images), `card` (classes, recipe and accuracy of a trained network) and
`dtype` (the precision to compute in, where that is not the one of the stored tensors). The tensors that images
are prepared with lie beside the weights, under `lowrank_cnn.preprocess.`. Reading runs no code. The header can be
read alone, so that shapes are known before anything is allocated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, require, to_caller
from lowrank_cnn.core.files import regular
from lowrank_cnn.core.notes import TrainingCard, note, notes
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.models.build import rebuild, rebuild_options

_KEY = "lowrank_cnn"
_PREPROCESS = f"{_KEY}.preprocess."
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class NetworkFile:
    """The header of a network's file: how to build the network, and the shapes of its weights."""

    path: Path
    description: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def card(self) -> Mapping[str, Any] | None:
        """How the network was trained; None if the file does not say."""
        card = self.description.get("card")
        return card if isinstance(card, Mapping) else None

    @property
    def input_size(self) -> tuple[int, ...] | None:
        """The size of one image; None if the file does not say."""
        size: Any = self.description.get("input")
        right = isinstance(size, list) and len(size) == 3 and all(isinstance(v, int) and v > 0 for v in size)
        return tuple(size) if right else None

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, in the precision they were written in, or in that which the description names."""
        dtype = _DTYPES.get(str(self.description.get("dtype")))
        found = self._tensors(prepared=False)
        return {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in found.items()}

    def preprocess(self) -> dict[str, Tensor]:
        """The tensors that images are prepared with."""
        found = self._tensors(prepared=True)
        return {name.removeprefix(_PREPROCESS): tensor for name, tensor in found.items()}

    def _tensors(self, *, prepared: bool) -> dict[str, Tensor]:
        safetensors = require("safetensors", extra="train", purpose="reading weights")
        with safetensors.safe_open(regular(self.path), framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(_PREPROCESS) == prepared]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}


def read_header(path: Path) -> NetworkFile:
    """Read the header of a file, without its tensors."""
    safetensors = require("safetensors", extra="train", purpose="reading weights")
    try:
        with safetensors.safe_open(regular(path), framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            names = [name for name in file.keys() if not name.startswith(_PREPROCESS)]  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise LowRankError(f"{path} is not a safetensors file: {error}.") from error
    if text is None:
        raise LowRankError(f"{path} holds weights but not how to build a network around them.")
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise LowRankError(f"{path} does not say how to build a network: its description is damaged.")
    return NetworkFile(path, found, shapes)


def write_network_file(
    path: Path, weights: Mapping[str, Tensor], description: Mapping[str, Any], preprocess: Mapping[str, Tensor]
) -> None:
    """Write weights, each in its own precision, with the description; a tensor of two names is written once."""
    safetensors = require("safetensors.torch", extra="train", purpose="writing weights")
    tensors = _once(weights) | {_PREPROCESS + name: tensor for name, tensor in preprocess.items()}
    # Copied one by one: tensors may be parts of one memory, which safetensors refuses, or lie on a GPU.
    kept = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    try:
        safetensors.save_file(kept, str(path), metadata={"format": "pt", _KEY: json.dumps(description)})
    except Exception as error:  # its own, with the number of the system's error in the text
        if not (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the further names of a tensor that several layers share."""
    found: dict[tuple[object, ...], str] = {}
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise LowRankError(f"{name} is a {type(tensor).__name__} and not a tensor: export to .onnx or .pt2.")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        found.setdefault(place if tensor.numel() else (name,), name)
    return {name: weights[name] for name in found.values()}


@dataclass(frozen=True)
class Stored:
    """A network of a file, the size of its images, how it was trained, and what `optimize` chose for it."""

    network: nn.Module
    input_size: tuple[int, ...] | None = None
    card: TrainingCard | None = None
    optimized: Mapping[str, Any] | None = None


def write_weights(path: Path, stored: Stored) -> None:
    """Write a network that `read_weights` can build again, each tensor in its own precision; refuse any other."""
    network, description = stored.network, rebuild_options(stored.network)
    if description["model"] is None:
        merged = any(row.error is not None for row in notes(network).merging)
        plans = (notes(part).plan for part in network.modules())
        changed = merged or any(plan and plan.used for plan in plans) or notes(network).optimized
    else:
        with torch.device("meta"):
            again = rebuild(description).state_dict()
        changed = {k: t.shape for k, t in network.state_dict().items()} != {k: t.shape for k, t in again.items()}
    if changed:
        raise LowRankError(
            "the network no longer is what its configuration builds (merged, planned, optimised or changed by "
            "hand): export it before that, or to .onnx or .pt2."
        )
    size, known = stored.input_size, stored.card
    about = {"input": list(size) if size else None, "card": known and known.card, "optimized": stored.optimized}
    write_network_file(path, network.state_dict(), {**description, **about}, known.preprocess if known else {})


def read_weights(path: Path, *, into: nn.Module | None = None) -> Stored:
    """The network of a file with its weights; `into` is one that is not ours, before any conversion.

    The network is built without storage first and compared with the file, so that a small file cannot ask for a
    large network.
    """
    file = read_header(path)
    with torch.device("meta"):
        plan = rebuild(file.description, into=None if into is None else without_storage(into))
    check_weights(file.path, file.shapes, plan)
    if into is None:
        network = plan
        network.load_state_dict(file.weights(), assign=True)
    else:
        network = rebuild(file.description, into=into)
        network = copy_with(network) if network is into else network
        _load_into(network, file)
    card = None if file.card is None else TrainingCard(file.card, file.preprocess())
    note(network, begun_from=path.name, input_size=file.input_size, training_card=card)
    chosen = file.description.get("optimized")
    return Stored(network, file.input_size, card, chosen if isinstance(chosen, Mapping) else None)


def is_exported(path: Path) -> bool:
    """Whether a path is that of an exported file; a checkpoint of a run has a manifest beside it."""
    return path.suffix == ".safetensors" and path.is_file() and not path.with_suffix(".json").is_file()


def dtype_of(model: nn.Module) -> torch.dtype:
    """The precision of a network's weights, or of what a plan has made of them."""
    tensors = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point())
    return next((tensor.dtype for tensor in tensors), torch.float32)


def without_storage(model: nn.Module) -> nn.Module:
    """A copy of a network on the meta device, made without allocating another set of weights."""
    empty: dict[Any, Any] = {buffer: buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        empty[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy_with(model, empty)


def check_weights(path: Path, shapes: Mapping[str, Sequence[int]], network: nn.Module) -> None:
    """Names and shapes of a file are those of the network; a shared tensor has one of its names in the file."""
    state = network.state_dict(keep_vars=True)
    there = {id(tensor) for name, tensor in state.items() if name in shapes}
    missing = [name for name, tensor in state.items() if name not in shapes and id(tensor) not in there]
    if wrong := sorted({*missing, *(shapes.keys() - state.keys())}):
        raise LowRankError(f"the weights in {path} do not fit the network: {wrong[0]} is missing or unknown.")
    for name, shape in shapes.items():
        if shape != state[name].shape:
            raise LowRankError(
                f"the weights in {path} do not fit the network: {name} is {list(shape)} in the file and "
                f"{list(state[name].shape)} in the network."
            )


def _load_into(network: nn.Module, file: NetworkFile) -> None:
    """Load weights into a network that exists, in the precision of the file; tensors that are shared stay so."""
    weights, state = file.weights(), network.state_dict(keep_vars=True)
    values = {id(state[name]): weight for name, weight in weights.items()}
    for tensor in state.values():
        tensor.data = tensor.data.to(values[id(tensor)].dtype)
    network.load_state_dict({name: values[id(tensor)] for name, tensor in state.items()})


FOLDER = Path(__file__).parent / "weights"
"""Trained weights that come with the package, in half precision: a file for each network and data set."""


def list_pretrained(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """All networks with weights in the package, and the data sets that they were trained on.

    >>> import lowrank_cnn as lr
    >>> ("nin-c3-lr", "cifar10") in lr.list_pretrained()
    True
    """
    pairs = (path.name.removesuffix(".safetensors").rpartition(".") for path in folder.glob("*.safetensors"))
    return sorted((name, data) for name, _, data in pairs)


def read_pretrained(name: str, data: str, folder: Path = FOLDER) -> NetworkFile:
    """The file of a network trained on a data set; "default" is the first one that there is."""
    if data == "default":
        data = next((one for known, one in list_pretrained(folder) if known == name), data)
    if (name, data) not in list_pretrained(folder):
        known = ", ".join(f"{name} on {data}" for name, data in list_pretrained(folder)) or "none"
        other = to_caller("", " Networks of timm and torchvision take --pretrained.")
        raise LowRankError(f"there are no weights of {name} on {data}; there are: {known}.{other}")
    path = folder / f"{name}.{data}.safetensors"
    try:
        return read_header(path)
    except LowRankError as error:
        raise LowRankError(f"{path} is damaged: install the package again.") from error
