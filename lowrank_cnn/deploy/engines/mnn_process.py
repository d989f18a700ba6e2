"""Convert an ONNX file with MNN and run it once, in a separate process.

MNN may end the process without an error. Its converter does so at a batch norm without running statistics, its
runtime at a local response norm on another batch size. mnn.py loads this file by its path, because importing torch
would take that process seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy import ndarray

_TYPES = {"uint8": "uint8", "int32": "int"}
"""MNN's names of types; any other array becomes float32."""


def variable(expr: Any, array: ndarray) -> Any:
    """An array as an input for MNN."""
    if str(array.dtype) == "int64":  # MNN computes with 32 bits, and its arrays cannot be written with more
        array = array.astype("int32")
    made = expr.placeholder(list(array.shape), expr.NCHW, getattr(expr, _TYPES.get(str(array.dtype), "float")))
    made.write(array)
    return made


def convert_and_run(
    onnx: str, path: str, runs: Sequence[Mapping[str, Any]], outputs: Sequence[str], half: bool
) -> None:
    """Write `path`, and run it once on zeros of the shape and type of each input, for each of these `runs`."""
    import _tools  # type: ignore[import-not-found]
    import MNN  # type: ignore[import-not-found]
    import numpy

    # The converter is called as a function: its command installs a package to report what was converted.
    options = ["-f", "ONNX", "--modelFile", onnx, "--MNNModel", path, "--bizCode", "lowrank"]
    _tools.mnnconvert(["mnnconvert", *options, *(["--fp16"] if half else [])])
    expr: Any = MNN.expr
    module = MNN.nn.load_module_from_file(path, list(runs[0]), list(outputs))
    for shapes in runs:
        given = [variable(expr, numpy.zeros(shape, dtype)) for shape, dtype in shapes.values()]
        for result in module.forward(given):
            expr.convert(result, expr.NCHW).read()
