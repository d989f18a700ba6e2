"""Compiled convolutions with 1x3 and 3x1 filters, for `lowrank_cnn`.

`lowrank_cnn` imports this package if it is installed, and works without it.
`onnxruntime_library` is the shared library that adds the operator lowrank::Strips to a session of ONNX Runtime:

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(lowrank_strips.onnxruntime_library())
"""

from __future__ import annotations

from pathlib import Path

from lowrank_strips._strips import has_half, pack, packed_size, run, use_openmp

__all__ = ["has_half", "onnxruntime_library", "pack", "packed_size", "run", "use_openmp"]


def onnxruntime_library() -> str:
    """The path of the shared library for ONNX Runtime."""
    (path,) = Path(__file__).parent.glob("libonnxruntime_op.*")
    return str(path)
