"""MNN: write .mnn files from ONNX, and run them on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.processes import apart
from lowrank_cnn.deploy.engines import mnn_process
from lowrank_cnn.deploy.engines.onnx import write_onnx
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Runner, as_array, silent_process, write_beside


class MnnRunner(Runner):
    """An .mnn file in MNN, in the precision that it was written for."""

    engine = "mnn"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        with silent_process():
            self.mnn: Any = require("MNN", extra="engines", purpose="running an .mnn file")
        self._read_beside(path)
        precision = "low" if self.metadata.get("precision") == "fp16" else "high"
        config = {"backend": "CPU", "numThread": threads or torch.get_num_threads(), "precision": precision}
        names = [[port.name for port in ports] for ports in (self.inputs, self.outputs)]
        with silent_process():
            runtime = self.mnn.nn.create_runtime_manager((config,))
            self.loaded = self.mnn.nn.load_module_from_file(str(path), *names, runtime_manager=runtime)

    def _run(self, arrays: Arrays) -> Arrays:
        expr = self.mnn.expr
        results = self.loaded.forward([mnn_process.variable(expr, array) for array in arrays])
        kept = [expr.convert(result, expr.NCHW) for result in results]  # an array is a view of MNN's memory
        return [one.read().copy() for one in kept]


def write_mnn(path: Path, request: ExportRequest) -> None:
    """Write an .mnn file; in fp16 the weights are stored in half precision."""
    with silent_process():
        require("MNN", extra="engines", purpose="writing MNN's files")
    onnx, half = path.with_suffix(".onnx"), request.precision == "fp16"
    write_onnx(onnx, replace(request, precision="fp32"))
    calls = [request.call.sized(request.axes, sizes).tensors for sizes in request.tried_sizes]
    shapes = [{name: [x.shape, str(as_array(x).dtype)] for name, x in tensors.items()} for tensors in calls]
    try:
        apart(mnn_process.__file__, "convert_and_run", str(onnx), str(path), shapes, list(request.outputs), half)
    except LowRankError as error:
        lacks = "MNN cannot run what its converter wrote" if path.is_file() else "its converter lacks an operation"
        raise LowRankError(f"the network cannot be written for MNN: {lacks}.") from error
    onnx.unlink()
    write_beside(path, request)


_USAGE = """import numpy, MNN.nn, MNN.expr as F; {made}
run = MNN.nn.create_runtime_manager(({{"precision": "{mode}"}},)); \
network = MNN.nn.load_module_from_file({file}, [{names}], [{output}], runtime_manager=run)
result = F.convert(network.forward([F.const(x, x.shape, F.NCHW) for x in [{given}]])[0], F.NCHW)
logits = result.read().copy()  # an array shows memory of the result"""
MNN = Engine(".mnn", MnnRunner, write_mnn, _USAGE, "MNN", modes=("high", "low"), lowers=True)
