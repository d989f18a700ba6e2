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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import regular

_KEY = "lowrank_cnn"
_PREPROCESS = f"{_KEY}.preprocess."
_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class NetworkFile:
    """The header of a network's file: how to build the network, and the shapes of its weights."""

    path: Path
    description: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, in the precision they were written in, or in that which the description names."""
        dtype = _DTYPES.get(str(self.description.get("dtype")))
        found = self._tensors(prepared=False)
        if dtype is None:
            return found
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in found.items()}

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
    """What a file says of its network, without its tensors."""
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
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LowRankError(f"{path} does not say how to build a network: its description is damaged.")
    return NetworkFile(path, found, shapes)


def write_network_file(
    path: Path,
    weights: Mapping[str, Tensor],
    description: Mapping[str, Any],
    preprocess: Mapping[str, Tensor],
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
