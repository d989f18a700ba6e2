"""int8 in .onnx files: static quantisation by ONNX Runtime's own tool, weights per channel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowrank_cnn.system.errors import LowRankError, first_line, require

if TYPE_CHECKING:
    from lowrank_cnn.deploy.engines.request import ExportRequest


def quantize_onnx(path: Path, request: ExportRequest) -> None:
    """Replace a float32 .onnx file by one with unsigned 8-bit activations and signed 8-bit weights."""
    tool: Any = require("onnxruntime.quantization", extra="onnx", purpose="int8 in ONNX")
    onnx: Any = require("onnx", extra="onnx", purpose="int8 in ONNX")
    kept = [node.name for node in onnx.load(str(path)).graph.node if request.is_in_float(node.name)]
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
        )
        _with_metadata(onnx, target, request)
    except Exception as error:  # operators that the tool cannot quantise
        raise LowRankError(f"onnxruntime cannot quantise this network: {first_line(error)}.") from error
    finally:
        logging.disable(before)
    target.replace(path)


def _reader(tool: Any, request: ExportRequest) -> Any:
    """The calibration images as the tool reads them."""

    class Reader(tool.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.samples: Iterator[Any] = iter(request.calibration or ())

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self.samples, None)
            if sample is None:
                return None
            return {name: tensor.numpy() for name, tensor in zip(request.call.names, sample, strict=True)}

    return Reader()


def _with_metadata(onnx: Any, path: Path, request: ExportRequest) -> None:
    model = onnx.load(str(path))
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {**request.metadata, "precision": "int8"})
    onnx.save(model, str(path))
