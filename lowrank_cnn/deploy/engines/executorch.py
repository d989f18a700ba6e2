"""ExecuTorch: write .pte files whose convs run in XNNPACK, and run them on the CPU.

A file holds the network for one image, and the runner feeds it images one by one. int8 is quantised by torchao's
pt2e with XNNPACK's own quantiser.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError, first_line, require
from lowrank_cnn.core.files import regular
from lowrank_cnn.deploy.block_forms import groups_apart
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import PerImageRunner, first_image, silent_process, write_beside

if TYPE_CHECKING:
    from numpy import ndarray


class ExecuTorchRunner(PerImageRunner):
    """A .pte file in ExecuTorch's runtime. Its threads are those of the process, shared by all files."""

    engine = "executorch"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        with _quiet():
            library: Any = require(
                "executorch.extension.pybindings.portable_lib", extra="engines", purpose="running a .pte file"
            )
            runtime: Any = require("executorch.runtime", extra="engines", purpose="running a .pte file")
            self._read_ports(path)
            if threads:
                library._unsafe_reset_threadpool(threads)
            try:
                self.program = runtime.Runtime.get().load_program(str(regular(path)))
                self.method = self.program.load_method("forward")
            except Exception as error:  # the runtime gives numbers of its own errors
                raise LowRankError(f"executorch cannot read {path}: {first_line(error)}.") from error

    def _run_image(self, inputs: list[ndarray]) -> list[ndarray]:
        given = [torch.from_numpy(array[None]) for array in inputs]
        try:
            return [result[0].numpy() for result in self.method.execute(given)]
        except RuntimeError as error:
            if "does not have a device" not in str(error):
                raise
            # The runtime misreads tensors of another torch than its own, which its package does not name.
            raise LowRankError(
                f"the installed executorch {version('executorch')} was built for another torch than "
                f"{torch.__version__}: install versions of the two that belong together."
            ) from error


def write_executorch(folder: Path, stem: str, request: ExportRequest) -> Path:
    """Write a .pte file for one image; convs, pools and products go to XNNPACK."""
    if request.ranges:
        raise LowRankError("ranges found in training go to .onnx, .xml and .tflite, but ExecuTorch sets its own.")
    path, call = folder / f"{stem}.pte", first_image(request, "executorch")
    apart = replace(request, network=groups_apart(request.network)).positional()
    for parameter in apart.parameters():  # of a network trained in channels_last, which XNNPACK's passes refuse
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    example = tuple(call.tensors.values())
    with _quiet():
        exir: Any = require("executorch.exir", extra="engines", purpose="writing a .pte file")
        xnnpack: Any = require("executorch.backends.xnnpack.partition.xnnpack_partitioner", extra="engines")
        try:
            program = _program(apart, example, request)
            lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
            content = lowered.to_executorch().buffer
        except LowRankError:
            raise
        except Exception as error:  # an operation without a kernel, or a pass that fails
            why = first_line(error).rstrip(":")
            raise LowRankError(f"{request.name} cannot be written for ExecuTorch: {why}.") from error
    path.write_bytes(content)
    write_beside(path, {**request.metadata, "precision": request.precision})
    return path


def _program(
    network: nn.Module, example: tuple[Tensor, ...], request: ExportRequest
) -> torch.export.ExportedProgram:
    program = torch.export.export(network, example)
    return _quantized(program, example, request) if request.precision == "int8" else program


def _quantized(
    program: torch.export.ExportedProgram, example: tuple[Tensor, ...], request: ExportRequest
) -> torch.export.ExportedProgram:
    name = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
    quantizer: Any = require(name, extra="engines", purpose="int8 in ExecuTorch")
    pt2e: Any = require("torchao.quantization.pt2e.quantize_pt2e", extra="engines", purpose="int8 in ExecuTorch")
    config = quantizer.get_symmetric_quantization_config(is_per_channel=True)
    chosen = quantizer.XNNPACKQuantizer().set_global(config)
    chosen.set_filter_function(lambda node: not _layers_of(node, request.in_float))
    observed = pt2e.prepare_pt2e(program.module(), chosen)
    with torch.no_grad():
        for sample in request.calibration or ():
            for images in zip(*(tensor.split(1) for tensor in sample), strict=True):
                observed(*images)
    return torch.export.export(pt2e.convert_pt2e(observed), example)


def _layers_of(node: torch.fx.Node, layers: Iterable[str]) -> list[str]:
    """Those of the layers to which a node belongs."""
    paths = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return [layer for layer in layers if any(f".{path}.".find(f".{layer}.") >= 0 for path in paths)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of the exporter, and what the runtime prints about the processor."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with silent_process(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
