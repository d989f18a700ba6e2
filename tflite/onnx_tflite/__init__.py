"""Write ONNX models as .tflite files for LiteRT (TensorFlow Lite), in float32, half precision or int8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx
from numpy import ndarray

from onnx_tflite.graph import ConversionError, Graph, Operation, Tensor, packed
from onnx_tflite.int8 import quantize
from onnx_tflite.operators import translate

__all__ = ["ConversionError", "write_tflite"]

_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED")
_COMPUTE_IN_HALF = {"reduced_precision_support": b"fp16accfp16"}
"""The metadata entry that allows XNNPACK to compute in half precision."""


def write_tflite(
    model: str | Path | onnx.ModelProto,
    path: str | Path,
    *,
    precision: str = "fp32",
    calibration: Iterable[Sequence[ndarray]] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    in_float: Sequence[str] = (),
    metadata: Mapping[str, bytes] | None = None,
    description: str = "",
) -> None:
    """Write an ONNX model of fixed sizes as a .tflite file.

    - `precision`: "fp32"; "fp16", with the weights of layers in half precision; or "int8".
    - `calibration`: for int8, batches of images, an array for each input; they set the range of each tensor.
    - `ranges`: for int8, known ranges of layers' inputs, instead of measured ones.
    - `in_float`: for int8, layers that stay in float, by the first part of their nodes' names.
    - `metadata`: entries to keep in the file, by name.

    A node that LiteRT cannot represent raises a ConversionError.

    >>> write_tflite("net.onnx", "net.tflite", precision="fp16")  # doctest: +SKIP
    """
    if precision not in ("fp32", "fp16", "int8"):
        raise ValueError(f"the precision is fp32, fp16 or int8, not {precision!r}.")
    graph = translate(model if isinstance(model, onnx.ModelProto) else onnx.load(str(model)))
    entries = dict(metadata or {})
    if precision == "fp16":
        _store_in_half(graph)
        entries |= _COMPUTE_IN_HALF
    elif precision == "int8":
        graph = quantize(graph, calibration, ranges or {}, in_float)
    Path(path).write_bytes(packed(graph, entries, description))


def _store_in_half(graph: Graph) -> None:
    """Store the weights of layers in half precision; an operation before each layer converts them to float32."""
    made: list[Operation] = []
    for operation in graph.operations:
        weight = operation.inputs[1] if operation.kind in _WEIGHTED else None
        if weight is not None and weight.data is not None:
            stored = Tensor("weight", weight.shape, "float16", weight.data.astype("float16"))
            whole = Tensor(f"{operation.layer}/weight", weight.shape)
            made.append(Operation("DEQUANTIZE", [stored], whole, {}, operation.layer))
            operation.inputs[1] = whole
        made.append(operation)
    graph.operations = made
