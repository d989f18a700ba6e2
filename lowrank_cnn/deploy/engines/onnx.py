"""ONNX Runtime: run .onnx files on the CPU."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowrank_cnn.deploy.engines.runner import Port, Runner
from lowrank_cnn.system.errors import LowRankError, first_line, require

if TYPE_CHECKING:
    from numpy import ndarray

_DTYPES = {"float": "float32", "double": "float64"}


class OnnxRunner(Runner):
    """An .onnx file in ONNX Runtime; `profile` is the prefix of the file that its own profiler writes."""

    engine = "onnxruntime"

    def __init__(self, path: Path, *, threads: int = 0, profile: str | Path | None = None) -> None:
        runtime = require("onnxruntime", extra="onnx", purpose="running an .onnx file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        try:
            self.session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own family of errors, none of them public
            raise LowRankError(f"onnxruntime cannot read {path}: {first_line(error)}.") from error
        self.inputs = tuple(map(_port, self.session.get_inputs()))
        self.outputs = tuple(map(_port, self.session.get_outputs()))
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        results = self.session.run(None, inputs)
        return {port.name: result for port, result in zip(self.outputs, results, strict=True)}


def _port(node: Any) -> Port:
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    return Port(node.name, tuple(node.shape), _DTYPES.get(kind, kind))


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
