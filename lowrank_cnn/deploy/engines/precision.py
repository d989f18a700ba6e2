"""Half precision for engines that compute in the precision of the graph they are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.candidates import groups_apart
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.rewriting import copy_with
from lowrank_cnn.models.files import dtype_of
from lowrank_cnn.models.rebuild import name_of
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note
from lowrank_cnn.system.results import mapped

Precision = Literal["fp32", "fp16"]
_BY_THE_ENGINE = (".xml", ".param", ".mnn", ".tflite")
"""Engines that lower a float32 graph to half precision themselves."""


class InSingle(nn.Module):
    """A layer that computes in float32 within a network in half precision."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()).to(x.dtype)


class InHalf(nn.Module):
    """A network that computes in half precision, between inputs and outputs in float32.

    The layers that `in_single` names compute in float32.
    """

    def __init__(self, network: nn.Module, in_single: Callable[[nn.Module], bool] = lambda _: False) -> None:
        super().__init__()
        whole = copy.deepcopy(network).half()
        single = {part: InSingle(part) for part in whole.modules() if in_single(part)}
        self.network = copy_with(whole, single) if single else whole
        note(self, name=name_of(network))  # refusals speak of the user's network

    def forward(self, *tensors: Tensor) -> Any:
        return _cast(self.network(*_cast(tensors, torch.float32, torch.float16)), torch.float16, torch.float32)


def at_precision(request: ExportRequest, suffix: str, precision: str) -> ExportRequest:
    """The same request for a file in another precision."""
    if precision not in get_args(Precision):
        raise LowRankError(f"the precision is fp32 or fp16, not {precision!r}; lr.quantize (--int8) writes int8.")
    if precision == "fp32":
        return request
    if dtype_of(request.network) != torch.float32:
        raise LowRankError(f"fp16 is for networks in float32, and this one is in {dtype_of(request.network)}.")
    if request.call.arguments[1]:
        raise LowRankError("fp16 is for networks whose inputs go by position: call model.half() and export that.")
    if suffix in _BY_THE_ENGINE:
        return replace(request, precision="fp16")

    def in_single(part: nn.Module) -> bool:
        if suffix != ".onnx":
            return False
        # A file with strips is for the CPU, where ONNX Runtime multiplies matrices much faster in float32.
        return _has_groups(part) or (request.strips and type(part) is nn.Linear)

    # The groups of composites are taken apart first: a graph with casts in it is not captured again.
    network = InHalf(groups_apart(request.network), in_single).eval()
    return replace(request, network=network, precision="fp16")


def _has_groups(part: nn.Module) -> bool:
    """Whether a layer has groups of channels: on Arm ONNX Runtime 1.31 computes these wrongly in half precision.

    It computes a conv right that has as many groups as channels, before and after.
    """
    if not isinstance(part, nn.Conv2d | CompositeConv2d):
        return False
    return part.groups > 1 and not part.groups == part.in_channels == part.out_channels


def _cast(values: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return mapped(lambda x: x.to(after) if isinstance(x, Tensor) and x.dtype == before else x, values)
