"""Read and write networks as .safetensors files: weights, how to build the network, and what images it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.rewriting import copy_with
from lowrank_cnn.models.network_file import NetworkFile, read_header, write_network_file
from lowrank_cnn.models.rebuild import rebuild, rebuild_options
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.history import TrainingCard
from lowrank_cnn.system.provenance import note, notes

CHANGED = (
    "the network no longer is what its configuration builds (merged, planned, optimised or changed by hand): "
    "export it before that, or to .onnx or .pt2."
)


@dataclass(frozen=True)
class Stored:
    """A network read from a file, with the size of its images; `card` describes how it was trained.

    `optimized` is what `optimize` chose for the network.
    """

    network: nn.Module
    input_size: tuple[int, ...] | None = None
    card: Mapping[str, Any] | None = None
    preprocess: dict[str, Tensor] = field(default_factory=dict)
    optimized: Mapping[str, Any] | None = None


def write_weights(path: Path, stored: Stored) -> None:
    """Write a network that `read_weights` can build again, each tensor in its own precision; refuse any other."""
    description = rebuild_options(stored.network)
    _check_description(stored.network, description)
    size = stored.input_size
    about = {"input": list(size) if size else None, "card": stored.card, "optimized": stored.optimized}
    write_network_file(path, stored.network.state_dict(), {**description, **about}, stored.preprocess)


def read_weights(path: Path, *, into: nn.Module | None = None) -> Stored:
    """The network of a file with its weights; `into` is one that is not ours, before any conversion.

    The network is built without storage first and compared with the file, so that a small file cannot ask for a
    large network.
    """
    file = read_header(path)
    with torch.device("meta"):
        plan = rebuild(file.description, into=None if into is None else without_storage(into))
    _check_fits(file, plan)
    if into is None:
        network = plan
        network.load_state_dict(file.weights(), assign=True)
    else:
        network = rebuild(file.description, into=into)
        network = copy_with(network) if network is into else network
        _load_into(network, file)
    card, size = file.description.get("card"), _size(file.description.get("input"))
    note(network, begun_from=path.name, input_size=size)
    card, preprocess = card if isinstance(card, Mapping) else None, file.preprocess()
    if card is not None:
        note(network, training_card=TrainingCard(card, preprocess))
    chosen = file.description.get("optimized")
    return Stored(network, size, card, preprocess, chosen if isinstance(chosen, Mapping) else None)


def read_card(path: Path) -> Mapping[str, Any] | None:
    """What a file says of the training of its network, without building it; None where it says nothing."""
    card = read_header(path).description.get("card")
    return card if isinstance(card, Mapping) else None


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


def _check_fits(file: NetworkFile, network: nn.Module) -> None:
    """Names and shapes of the file are those of the network; a shared tensor has one of its names in the file."""
    state = network.state_dict(keep_vars=True)
    there = {id(tensor) for name, tensor in state.items() if name in file.shapes}
    missing = [name for name, tensor in state.items() if name not in file.shapes and id(tensor) not in there]
    if wrong := sorted({*missing, *(file.shapes.keys() - state.keys())}):
        raise LowRankError(f"the weights in {file.path} do not fit the network: {wrong[0]} is missing or unknown.")
    for name, shape in file.shapes.items():
        if shape != state[name].shape:
            raise LowRankError(
                f"the weights in {file.path} do not fit the network: {name} is {list(shape)} in the file and "
                f"{list(state[name].shape)} in the network."
            )


def _load_into(network: nn.Module, file: NetworkFile) -> None:
    """Load weights into a network that exists, in the precision of the file; tensors that are shared stay so."""
    weights, state = file.weights(), network.state_dict(keep_vars=True)
    values = {id(state[name]): weight for name, weight in weights.items()}
    for tensor in state.values():
        tensor.data = tensor.data.to(values[id(tensor)].dtype)
    network.load_state_dict({name: values[id(tensor)] for name, tensor in state.items()})


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


def _size(value: object) -> tuple[int, ...] | None:
    """The size of an image as JSON holds it; None for anything else."""
    right = isinstance(value, Sequence) and len(value) == 3 and all(isinstance(v, int) and v > 0 for v in value)
    return tuple(value) if right else None  # type: ignore[arg-type]
