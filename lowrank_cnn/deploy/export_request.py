"""Prepare an export: from a network and options, the example call, names, axes and metadata that writers take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.candidates import in_layers
from lowrank_cnn.deploy.engines.request import Axes, Call, ExportRequest, free_axes
from lowrank_cnn.deploy.metadata import PreparedNetwork, metadata_of
from lowrank_cnn.deploy.optimized import Optimized
from lowrank_cnn.deploy.parity import checked_outputs
from lowrank_cnn.method.rewriting import copy_with
from lowrank_cnn.models.files import Stored, dtype_of
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted
from lowrank_cnn.train.trained import trained_of

Layout = Literal["nchw", "nhwc"]
"""Axes of a batch of uint8 images: [N, C, H, W] or [N, H, W, C]."""


def request_for(
    stored: Stored,
    example: Any = None,
    dynamic: Any = ("batch",),
    names: Mapping[str, Sequence[str] | None] = MappingProxyType({}),
    preprocess: bool | Layout = False,
) -> tuple[nn.Module, ExportRequest]:
    """The network that the file is compared with, and the request for its writer, both on the CPU."""
    network = copy_with(stored.network).eval().cpu()
    if isinstance(network, Optimized):
        network.forget()  # compiled code stays behind; it would be compiled anew for every size that is compared
    layout: Layout | None = "nchw" if preprocess is True else preprocess or None
    if layout:
        network, example = _prepared(replace(stored, network=network), layout, example)
    example = _images(stored) if example is None else example
    call = Call.of(network, example, names.get("inputs"))
    call = call.replaced({name: tensor.detach().cpu() for name, tensor in call.tensors.items()})
    found = checked_outputs(network, call)
    outputs = _output_names(found, call.names, names.get("outputs"))
    axes = free_axes(call, dynamic)
    results = dict(zip(outputs, found.values(), strict=True))
    metadata = metadata_of(stored, pixels=layout) | {
        "inputs": _described(call.tensors, axes),
        "outputs": _described(results, {name: {} for name in results}, fixed=not any(axes.values())),
    }
    return network, ExportRequest(in_layers(network).eval(), call, outputs, axes, metadata=metadata)


def _prepared(stored: Stored, layout: Layout, example: Any) -> tuple[nn.Module, Tensor]:
    """A trained network that prepares its images itself, and uint8 images of the size that it then takes."""
    trained = trained_of(stored)
    if layout not in ("nchw", "nhwc"):
        raise LowRankError(f"preprocess is True, 'nchw' or 'nhwc', not {layout!r}.")
    if trained is None or example is not None:
        raise LowRankError(
            "preprocess is for a trained network of images, which knows how they are prepared: give a run, or "
            "what load or fit made, and no example_input."
        )
    whole = trained.image if trained.preprocess.to_dict().keys() != {"mean", "std"} else trained.input_size
    drawn = torch.randint(0, 256, (2, *whole), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    network = PreparedNetwork(trained, layout).eval()
    return network, drawn.permute(0, 2, 3, 1).contiguous() if layout == "nhwc" else drawn


def _images(stored: Stored) -> Tensor:
    if stored.input_size is None:
        raise LowRankError(
            "say the size of the images (channels, height, width) that the network takes, or give example_input."
        )
    drawn = torch.randn(2, *stored.input_size, generator=torch.Generator().manual_seed(2))
    return drawn.to(dtype_of(stored.network))


def _output_names(
    found: Mapping[str, Tensor], inputs: Sequence[str], asked: Sequence[str] | None
) -> tuple[str, ...]:
    if asked is None:
        return tuple(f"output_{name}" if name in inputs else name for name in found)
    if len(asked) != len(found) or len({*asked, *inputs}) != len(asked) + len(inputs):
        raise LowRankError(
            f"the network gives {counted(len(found), 'output')} ({', '.join(found)}): give as many different "
            "output_names."
        )
    return tuple(asked)


def _described(tensors: Mapping[str, Tensor], axes: Axes, *, fixed: bool = True) -> str:
    """Names, shapes and types for formats that keep none; of results with free axes, no lengths."""
    rows = []
    for name, tensor in tensors.items():
        shape = [axes[name].get(axis, size if fixed else None) for axis, size in enumerate(tensor.shape)]
        rows.append({"name": name, "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch.")})
    return json.dumps(rows)
