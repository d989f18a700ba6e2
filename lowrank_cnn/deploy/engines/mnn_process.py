"""Convert an ONNX file for MNN and run it once, in a process of its own, which need not import torch.

What MNN lacks may end the process without a word: a batch norm without statistics of its own does so in the
converter, a local response norm when it runs on a batch of another size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.processes import apart

if TYPE_CHECKING:
    from numpy import ndarray

_TYPES = {"uint8": "uint8", "int32": "int"}
"""What MNN calls types; any other array is one of float32."""


def write_converted(
    onnx: Path, path: Path, runs: Sequence[Mapping[str, ndarray]], outputs: Sequence[str], *, half: bool
) -> str:
    """Write `path` and run it on inputs of the shapes of each of these `runs`; why that fails, or empty."""
    shapes = [{name: [array.shape, str(array.dtype)] for name, array in inputs.items()} for inputs in runs]
    try:
        apart(__file__, "_convert_and_run", str(onnx), str(path), shapes, list(outputs), half)
    except LowRankError:
        return "MNN cannot run what its converter wrote" if path.is_file() else "its converter lacks an operation"
    return ""


def variable(expr: Any, array: ndarray) -> Any:
    """An array as an input of MNN's."""
    if str(array.dtype) == "int64":  # MNN computes with 32 bits, and its arrays cannot be written with more
        array = array.astype("int32")
    made = expr.placeholder(list(array.shape), expr.NCHW, getattr(expr, _TYPES.get(str(array.dtype), "float")))
    made.write(array)
    return made


def _convert_and_run(
    onnx: str, path: str, runs: Sequence[Mapping[str, Any]], outputs: Sequence[str], half: bool
) -> None:
    _convert(onnx, path, half)
    _run(path, runs, outputs)


def _convert(onnx: str, path: str, half: bool) -> None:
    """Call the converter as a function: its command installs a package to report what was converted."""
    import _tools  # type: ignore[import-not-found]

    options = ["-f", "ONNX", "--modelFile", onnx, "--MNNModel", path, "--bizCode", "lowrank"]
    _tools.mnnconvert(["mnnconvert", *options, *(["--fp16"] if half else [])])


def _run(path: str, runs: Sequence[Mapping[str, Any]], outputs: Sequence[str]) -> None:
    import MNN  # type: ignore[import-not-found]
    import numpy

    expr: Any = MNN.expr
    module = MNN.nn.load_module_from_file(path, list(runs[0]), list(outputs))
    for shapes in runs:
        given = [variable(expr, numpy.zeros(shape, dtype)) for shape, dtype in shapes.values()]
        for result in module.forward(given):
            expr.convert(result, expr.NCHW).read()
