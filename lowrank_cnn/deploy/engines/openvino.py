"""OpenVINO: write .xml files (and weights as .bin), and run them on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from lowrank_cnn.core.errors import LowRankError, first_line, require
from lowrank_cnn.deploy.engines.onnx import write_onnx
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Port, Runner, quiet
from lowrank_cnn.train.int8 import widen

_NOTES = "lowrank_cnn"
"""The key of `rt_info` under which a file keeps our metadata."""
_LAYERS = ("Convolution", "GroupConvolution", "MatMul", "AvgPool", "ReduceMean")
_SAME_RANGE = ("MaxPool", "Reshape", "Squeeze", "Transpose", "Concat")


class OpenVinoRunner(Runner):
    """An .xml file in OpenVINO, in the precision that it was written for: the default on Arm is half."""

    engine = "openvino"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        openvino = require("openvino", extra="engines", purpose="running an .xml file")
        core = openvino.Core()
        model = core.read_model(str(path))
        self.metadata = _notes(model)
        hint = "f16" if self.metadata.get("precision") == "fp16" else "f32"
        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
        if threads:
            options["INFERENCE_NUM_THREADS"] = threads
        self.request = core.compile_model(model, "CPU", options).create_infer_request()
        self.inputs = tuple(map(_port, model.inputs))
        self.outputs = tuple(map(_port, model.outputs))

    def _run(self, arrays: Arrays) -> Arrays:
        results = self.request.infer(arrays, share_inputs=True)
        return [results[place].copy() for place in range(len(self.outputs))]


def write_openvino(path: Path, request: ExportRequest) -> None:
    """Write an .xml and a .bin file from ONNX; int8 by NNCF's post-training quantisation."""
    openvino = require("openvino", extra="engines", purpose="writing OpenVINO's files")
    onnx = path.with_suffix(".onnx")
    write_onnx(onnx, replace(request, precision="fp32"))
    try:
        model = openvino.Core().read_model(str(onnx))
    except RuntimeError as error:  # a trace of its own sources; operations behind the one that it lacks fail too
        named = re.findall(r"^-- (\w+)-\d+ with a message", str(error), re.MULTILINE)
        reason = f"it cannot convert {', '.join(named)}" if named else first_line(error)
        raise LowRankError(f"the network cannot be written for OpenVINO: {reason}.") from error
    onnx.unlink()
    if request.precision == "int8":
        model = _quantized(model, request)
    for key, value in {**request.metadata, "precision": request.precision}.items():
        model.set_rt_info(value, [_NOTES, key])
    openvino.save_model(model, str(path), compress_to_fp16=request.precision == "fp16")


def _quantized(model: Any, request: ExportRequest) -> Any:
    nncf = require("nncf", extra="engines", purpose="int8 in OpenVINO")
    images = [tuple(tensor.numpy() for tensor in sample) for sample in request.calibration]
    kept = list(filter(request.is_in_float, (node.get_friendly_name() for node in model.get_ops())))
    with quiet(), redirect_stdout(StringIO()):  # its progress bars would appear in the output of --json
        made = nncf.quantize(
            model,
            nncf.Dataset(images, list),
            subset_size=len(images),
            preset=nncf.QuantizationPreset.MIXED,  # unsigned activations after a ReLU
            ignored_scope=nncf.IgnoredScope(names=kept, validate=False),
            advanced_parameters=_as_trained(nncf) if request.ranges else None,
        )
    _set_ranges(made, request)
    return made


def _as_trained(nncf: Any) -> Any:
    """For layers trained with rounding: biases are not corrected, and tensors between layers are not clipped."""
    whole = require("nncf.quantization.range_estimator", extra="engines").RangeEstimatorParametersSet.MINMAX
    return nncf.AdvancedQuantizationParameters(
        disable_bias_correction=True, activations_range_estimator_params=whole
    )


def _set_ranges(model: Any, request: ExportRequest) -> None:
    """Give the inputs of layers the ranges that training found."""
    openvino = require("openvino", extra="engines")
    rounders: dict[str, Any] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for node in model.get_ordered_ops():
        ends = request.trained_range(node.get_friendly_name()) if node.get_type_name() in _LAYERS else None
        for rounder in _rounders(node.input_value(0).get_node()) if ends is not None else ():
            rounders[rounder.get_friendly_name()] = rounder
            widen(ranges, rounder.get_friendly_name(), ends)  # type: ignore[arg-type]
    for name, (low, high) in ranges.items():
        for place, value in ((1, low), (2, high), (3, low), (4, high)):
            port = rounders[name].input(place)
            constant = openvino.opset13.constant([value], port.get_element_type())
            port.replace_source_output(constant.output(0))


def _rounders(node: Any) -> Iterator[Any]:
    """The operations that round the result of a node, looking through those that only move values."""
    if node.get_type_name() == "FakeQuantize":
        yield node
    elif node.get_type_name() in _SAME_RANGE:
        parts = node.inputs() if node.get_type_name() == "Concat" else [node.input(0)]
        for part in parts:
            yield from _rounders(part.get_source_output().get_node())


def _notes(model: Any) -> dict[str, str]:
    if not model.has_rt_info([_NOTES]):
        return {}
    found = model.get_rt_info([_NOTES])
    values = found.value if hasattr(found, "value") else found
    return {key: str(getattr(value, "value", value)) for key, value in values.items()}


def _port(node: Any) -> Port:
    shape = tuple(None if size.is_dynamic else size.get_length() for size in node.get_partial_shape())
    return Port(node.get_any_name(), shape, node.get_element_type().to_dtype().name)


_USAGE = """import numpy, openvino; {made}
network = openvino.compile_model({file}, "CPU", {{"INFERENCE_PRECISION_HINT": "{mode}"}})
logits = network([{given}])[0]"""
OPENVINO = Engine(
    ".xml", OpenVinoRunner, write_openvino, _USAGE, "openvino", modes=("f32", "f16"), int8=True, lowers=True
)
