"""A network in ONNX Runtime, called like any other module."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.system.errors import LowRankError, first_line, require

_DTYPES = {
    "tensor(float16)": torch.float16,
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
}


class OnnxModel(nn.Module):
    """An .onnx file that runs on the CPU; `threads` limits what it uses, 0 leaves that to ONNX Runtime."""

    def __init__(self, path: str | Path, *, threads: int = 0, profile: str | Path | None = None) -> None:
        super().__init__()
        runtime = require("onnxruntime", extra="onnx", purpose="running an .onnx file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        try:
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own family of errors, none of them public
            raise LowRankError(f"onnxruntime cannot read {path}: {first_line(error)}") from error
        image = _only_input(self.session, path)
        self.input: str = image.name
        self.input_size = tuple(size if isinstance(size, int) else None for size in image.shape[1:])
        self.dtype = _DTYPES[image.type]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        try:
            output = self.session.run(None, {self.input: x.detach().cpu().numpy()})[0]
        except Exception as error:  # as above
            raise LowRankError(f"onnxruntime cannot run this file: {first_line(error)}") from error
        return torch.from_numpy(output)

    def _check(self, x: Tensor) -> None:
        """Refuse in a sentence what the runtime would refuse in its own words."""
        sizes = zip(x.shape[1:], self.input_size, strict=False)
        if x.dim() != 1 + len(self.input_size) or any(
            right is not None and size != right for size, right in sizes
        ):
            takes, given = ("x".join(str(n or "any") for n in shape) for shape in (self.input_size, x.shape[1:]))
            raise LowRankError(f"this file is for a batch of images of {takes}, not of {given}.")
        if x.dtype != self.dtype:
            raise LowRankError(f"this file takes images in {self.dtype}, not in {x.dtype}.")


def _only_input(session: Any, path: str | Path) -> Any:
    """The one input of a network: images as floating-point numbers, a batch first."""
    inputs = session.get_inputs()
    if len(inputs) != 1:
        raise LowRankError(f"{path} takes {len(inputs)} inputs; a network here takes one, a batch of images.")
    if inputs[0].type not in _DTYPES or not inputs[0].shape:
        raise LowRankError(
            f"{path} takes {inputs[0].type} of shape {inputs[0].shape}; a network here takes a batch of images as "
            "float, float16 or double."
        )
    return inputs[0]


def node_macs(path: str | Path) -> dict[str, int]:
    """The multiply-accumulates of each node of an .onnx file for one image, read off its graph."""
    onnx = require("onnx", extra="onnx", purpose="reading an .onnx file")
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path))).graph
    weights = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    values = [*graph.value_info, *graph.output]
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}
    found: dict[str, int] = {}
    for node in graph.node:
        weight = weights.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type == "Conv" and weight:
            found[node.name] = prod(weight) * prod(shapes[node.output[0]][2:])
        elif node.op_type in ("Gemm", "MatMul") and weight:
            found[node.name] = prod(weight)
    return found
