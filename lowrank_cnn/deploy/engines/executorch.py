"""ExecuTorch: write .pte files whose convs run in XNNPACK, and run them on the CPU.

A file holds the network for one image. int8 is quantised by torchao's pt2e with XNNPACK's own quantiser.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, explained, require
from lowrank_cnn.deploy.blocks import groups_apart
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Runner, quiet, silent_process, write_beside


class ExecuTorchRunner(Runner):
    """A .pte file in ExecuTorch's runtime, with threads that all files of the process share."""

    engine = "executorch"
    one_image = True

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        with quiet(), silent_process():  # it prints details of the processor
            library: Any = _package("extension.pybindings.portable_lib", "running a .pte file")
            runtime: Any = _package("runtime", "running a .pte file")
            self._read_beside(path)
            if threads:
                library._unsafe_reset_threadpool(threads)
            self.program = runtime.Runtime.get().load_program(str(path))
            self.method = self.program.load_method("forward")

    def _run(self, arrays: Arrays) -> Arrays:
        try:
            return [result.numpy() for result in self.method.execute([torch.from_numpy(each) for each in arrays])]
        except RuntimeError as error:
            if "does not have a device" not in str(error):
                raise
            # The runtime misreads tensors of a torch version other than its own, and its package does not name
            # that version.
            raise LowRankError(
                f"the installed executorch {version('executorch')} was built for another torch than "
                f"{torch.__version__}: install matching versions of the two."
            ) from error


def write_executorch(path: Path, request: ExportRequest) -> None:
    """Write a .pte file for one image; convs, pools and products go to XNNPACK."""
    if request.ranges:
        raise LowRankError("ranges found in training go to .onnx, .xml and .tflite, but ExecuTorch sets its own.")
    example = tuple(request.one_image("executorch").tensors.values())
    apart = replace(request, network=groups_apart(request.network)).positional()
    for parameter in apart.parameters():  # XNNPACK's passes refuse the channels_last weights of a trained network
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    with quiet(), silent_process():
        exir: Any = _package("exir", "writing a .pte file")
        xnnpack: Any = _package("backends.xnnpack.partition.xnnpack_partitioner", "writing a .pte file")
        with explained(f"{request.name} cannot be written for ExecuTorch"):
            program = torch.export.export(apart, example)
            if request.precision == "int8":
                program = _quantized(program, example, request)
            lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
            content = lowered.to_executorch().buffer
    path.write_bytes(content)
    write_beside(path, request)


def _quantized(
    program: torch.export.ExportedProgram, example: tuple[Tensor, ...], request: ExportRequest
) -> torch.export.ExportedProgram:
    quantizer: Any = _package("backends.xnnpack.quantizer.xnnpack_quantizer", "int8 in ExecuTorch")
    pt2e: Any = require("torchao.quantization.pt2e.quantize_pt2e", extra="engines", purpose="int8 in ExecuTorch")

    def in_int8(node: torch.fx.Node) -> bool:
        paths = [f".{path}." for path, _ in node.meta.get("nn_module_stack", {}).values()]
        return not any(f".{layer}." in path for layer in request.in_float for path in paths)

    config = quantizer.get_symmetric_quantization_config(is_per_channel=True)
    chosen = quantizer.XNNPACKQuantizer().set_global(config)
    chosen.set_filter_function(in_int8)
    observed = pt2e.prepare_pt2e(program.module(), chosen)
    with torch.no_grad():
        for sample in request.calibration:
            for images in zip(*(tensor.split(1) for tensor in sample), strict=True):
                observed(*images)
    return torch.export.export(pt2e.convert_pt2e(observed), example)


def _package(name: str, purpose: str) -> Any:
    return require(f"executorch.{name}", extra="engines", purpose=purpose)


_USAGE = """import torch; from executorch.runtime import Runtime; {made}
method = Runtime.get().load_program({file}).load_method("forward")
logits = method.execute([{given}])[0]"""
EXECUTORCH = Engine(".pte", ExecuTorchRunner, write_executorch, _USAGE, "executorch", int8=True)
