"""MNN: write .mnn files by way of ONNX, and run them on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import regular
from lowrank_cnn.core.processes import apart
from lowrank_cnn.deploy.engines import mnn_process
from lowrank_cnn.deploy.engines.onnx import write_onnx
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import (
    Runner,
    as_array,
    ports_from,
    read_beside,
    silent_process,
    write_beside,
)

if TYPE_CHECKING:
    from numpy import ndarray


class MnnRunner(Runner):
    """An .mnn file in MNN, in the precision that it was written for."""

    engine = "mnn"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        with silent_process():
            self.mnn: Any = require("MNN", extra="engines", purpose="running an .mnn file")
        self.metadata = read_beside(path)
        self.inputs, self.outputs = (ports_from(self.metadata.get(key)) for key in ("inputs", "outputs"))
        half = self.metadata.get("precision") == "fp16"
        config = {
            "backend": "CPU",
            "numThread": threads or torch.get_num_threads(),
            "precision": "low" if half else "high",
        }
        try:
            with silent_process():
                runtime = self.mnn.nn.create_runtime_manager((config,))
                names = [[port.name for port in ports] for ports in (self.inputs, self.outputs)]
                file = str(regular(path))
                self.loaded = self.mnn.nn.load_module_from_file(file, *names, runtime_manager=runtime)
        except Exception as error:  # MNN says nothing about what is wrong with a file
            raise LowRankError(f"mnn cannot read {path}, or {path.name}.json beside it.") from error
        if not self.inputs:
            raise LowRankError(f"{path.name}.json, which names the inputs of {path}, is missing or damaged.")

    def _run(self, inputs: dict[str, ndarray]) -> dict[str, ndarray]:
        expr = self.mnn.expr
        results = self.loaded.forward([mnn_process.variable(expr, inputs[port.name]) for port in self.inputs])
        kept = [expr.convert(result, expr.NCHW) for result in results]  # an array shows memory that is theirs
        return {port.name: one.read().copy() for port, one in zip(self.outputs, kept, strict=True)}


def write_mnn(folder: Path, stem: str, request: ExportRequest) -> Path:
    """Write an .mnn file; in fp16 the weights are stored in half precision."""
    if request.precision == "int8":
        raise LowRankError("int8 is not written for MNN: take fp16, or another engine for int8.")
    with silent_process():
        require("MNN", extra="engines", purpose="writing MNN's files")
    onnx, path = write_onnx(folder, stem, replace(request, precision="fp32")), folder / f"{stem}.mnn"
    calls = [request.call.sized(request.axes, sizes).tensors for sizes in request.tried_sizes]
    shapes = [{name: [x.shape, str(as_array(x).dtype)] for name, x in tensors.items()} for tensors in calls]
    half = request.precision == "fp16"
    try:
        apart(mnn_process.__file__, "convert_and_run", str(onnx), str(path), shapes, list(request.outputs), half)
    except LowRankError as error:
        lacks = "MNN cannot run what its converter wrote" if path.is_file() else "its converter lacks an operation"
        raise LowRankError(f"the network cannot be written for MNN: {lacks}.") from error
    finally:
        onnx.unlink()
    write_beside(path, {**request.metadata, "precision": request.precision})
    return path
