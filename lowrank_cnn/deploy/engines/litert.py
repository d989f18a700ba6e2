"""LiteRT (TensorFlow Lite): write .tflite files from ONNX, and run them on the CPU through XNNPACK.

LiteRT's own converter has no build for Linux on Arm, so the package `onnx_tflite` (in tflite/) writes the file. A
file holds the network for one image, [1, C, H, W].
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import read_regular
from lowrank_cnn.deploy.engines.onnx import write_onnx
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Port, Runner, parse_metadata, silent_process
from lowrank_cnn.graph.merge import merge

_LARGEST_FILE = 2**31  # of a flat buffer
_NOTES = "lowrank_cnn"
"""The name under which a file keeps our metadata."""


class LitertRunner(Runner):
    engine = "litert"
    one_image = True

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        library: Any = require("ai_edge_litert.interpreter", extra="engines", purpose="running a .tflite file")
        with silent_process():
            content = read_regular(path, most=_LARGEST_FILE)
            self._take(parse_metadata(_read_notes(content)))
            count = threads or torch.get_num_threads()
            self.interpreter = library.Interpreter(model_content=content, num_threads=count)
            self.interpreter.allocate_tensors()
        details = self.interpreter.get_input_details(), self.interpreter.get_output_details()
        self.places = [[each["index"] for each in found] for found in details]
        # A file of others has no metadata.
        self.inputs = self.inputs or tuple(map(_port, details[0]))
        self.outputs = self.outputs or tuple(map(_port, details[1]))

    def _run(self, arrays: Arrays) -> Arrays:
        for place, array in zip(self.places[0], arrays, strict=True):
            self.interpreter.set_tensor(place, array)
        self.interpreter.invoke()
        return [self.interpreter.get_tensor(place) for place in self.places[1]]


def write_litert(path: Path, request: ExportRequest) -> None:
    """Write a .tflite file; in fp16 the weights of layers are stored in half precision."""
    library: Any = require("onnx_tflite", extra="engines", purpose="writing a .tflite file")
    call = request.one_image("litert")
    if wrong := [t.dtype for t in call.tensors.values() if t.dtype not in (torch.float32, torch.uint8)]:
        raise LowRankError(f"files for LiteRT take float32 or uint8, not {wrong[0]}: export model.float().")
    call = call.replaced({name: _laid_out(tensor) for name, tensor in call.tensors.items()})
    fixed = replace(request, network=_prepared(request), call=call, axes={name: {} for name in call.names})
    onnx = path.with_suffix(".onnx")
    write_onnx(onnx, replace(fixed, precision="fp32"))
    notes = json.dumps({**request.metadata, "precision": request.precision}).encode()
    try:
        with silent_process():
            library.write_tflite(
                onnx,
                path,
                precision=request.precision,
                calibration=([tensor.numpy() for tensor in batch] for batch in request.calibration),
                ranges=request.ranges,
                in_float=request.in_float,
                metadata={_NOTES: notes},
                description="lowrank-cnn",
            )
    except library.ConversionError as error:
        raise LowRankError(f"the network cannot be written for LiteRT: {error}; take another target.") from error
    onnx.unlink()


def _read_notes(content: bytes) -> bytes:
    """The metadata that `write_litert` put into a file; empty if there is none."""
    schema: Any = require("ai_edge_litert.schema_py_generated", extra="engines", purpose="running a .tflite file")
    model = schema.Model.GetRootAs(content)
    entries = [model.Metadata(place) for place in range(model.MetadataLength())]
    found = [entry.Buffer() for entry in entries if entry.Name() == _NOTES.encode()]
    return model.Buffers(found[0]).DataAsNumpy().tobytes() if found else b""


def _prepared(request: ExportRequest) -> nn.Module:
    """The network with its batch norms folded."""
    args, keywords = request.call.arguments
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in request.network.modules())
    network = request.network
    if norms and not keywords:
        network = merge(network, chains=False, example_input=args)
    for parameter in network.parameters():
        parameter.data = _laid_out(parameter.data)
    return network


def _laid_out(tensor: Tensor) -> Tensor:
    """A tensor in torch's default memory format: for channels_last, torch.export writes strides into the graph."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _port(details: Any) -> Port:
    return Port(details["name"], tuple(int(size) for size in details["shape"]), details["dtype"].__name__)


_USAGE = """import numpy; from ai_edge_litert.interpreter import Interpreter; {made}
network = Interpreter({file}).get_signature_runner()
logits = network(**{{{named}}})[{output}]"""
LITERT = Engine(
    ".tflite", LitertRunner, write_litert, _USAGE, "ai_edge_litert", writer="onnx_tflite", int8=True, lowers=True
)
