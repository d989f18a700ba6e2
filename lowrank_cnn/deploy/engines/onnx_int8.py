"""int8 in .onnx files: static quantisation by ONNX Runtime's own tool, weights per channel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.system.errors import LowRankError, first_line, require
from lowrank_cnn.train.fake_int8 import widen

_AVERAGES = ("AveragePool", "GlobalAveragePool", "ReduceMean")
"""They stay in float: the tool would give means the levels of the values, which are too coarse for them."""
_READERS = ("Conv", "Gemm", "MatMul", *_AVERAGES)
"""Operations whose input may have a range that training found."""
_SAME_RANGE = ("MaxPool", "Reshape", "Flatten", "Squeeze", "Transpose")
"""Operations whose output the tool gives the range of their input."""


def quantize_onnx(path: Path, request: ExportRequest) -> None:
    """Replace a float32 .onnx file by one with unsigned 8-bit activations and signed 8-bit weights."""
    from numpy import float32

    tool: Any = require("onnxruntime.quantization", extra="onnx", purpose="int8 in ONNX")
    onnx: Any = require("onnx", extra="onnx", purpose="int8 in ONNX")
    nodes = list(onnx.load(str(path)).graph.node)
    kept = [node.name for node in nodes if node.op_type in _AVERAGES or request.is_in_float(node.name)]
    found = _ranges(nodes, request).items()
    ranges = {name: [{"rmin": float32(low), "rmax": float32(high)}] for name, (low, high) in found}
    before, target = logging.root.manager.disable, path.with_name(f"int8-{path.name}")
    logging.disable(logging.WARNING)  # a piece of advice about preparing the graph, which has nothing to prepare
    try:
        tool.quantize_static(
            str(path),
            str(target),
            _reader(tool, request),
            per_channel=True,
            activation_type=tool.QuantType.QUInt8,
            weight_type=tool.QuantType.QInt8,
            nodes_to_exclude=kept,
            extra_options={"TensorQuantOverrides": ranges},
        )
        _with_metadata(onnx, target, request)
    except Exception as error:  # operators that the tool cannot quantise
        raise LowRankError(f"onnxruntime cannot quantise this network: {first_line(error)}.") from error
    finally:
        logging.disable(before)
    target.replace(path)


def _ranges(nodes: list[Any], request: ExportRequest) -> dict[str, tuple[float, float]]:
    """The ranges that training found, by the tensors that have them."""
    makers = {node.output[0]: node for node in nodes}
    found: dict[str, tuple[float, float]] = {}
    for node in nodes:
        ends = request.trained_range(node.name) if node.op_type in _READERS else None
        name = node.input[0] if ends is not None else ""
        while name and ends is not None:
            widen(found, name, ends)
            maker = makers.get(name)
            name = maker.input[0] if maker is not None and maker.op_type in _SAME_RANGE else ""
    return found


def _reader(tool: Any, request: ExportRequest) -> Any:
    """The calibration images as the tool reads them."""

    class CalibrationImages(tool.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.samples: Iterator[Any] = iter(request.calibration or ())

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self.samples, None)
            if sample is None:
                return None
            return {name: tensor.numpy() for name, tensor in zip(request.call.names, sample, strict=True)}

    return CalibrationImages()


def _with_metadata(onnx: Any, path: Path, request: ExportRequest) -> None:
    model = onnx.load(str(path))
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {**request.metadata, "precision": "int8"})
    onnx.save(model, str(path))
