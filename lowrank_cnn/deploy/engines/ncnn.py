"""ncnn: write .param files through pnnx (the weights in a .bin beside), and run them on the CPU.

ncnn has no axis for a batch. A file holds the network for one image, and the runner feeds it images one by one.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lowrank_cnn.deploy.candidates import groups_apart
from lowrank_cnn.deploy.engines.per_image import PerImageRunner, first_image, trace
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import write_beside
from lowrank_cnn.system.errors import LowRankError, require

if TYPE_CHECKING:
    from numpy import ndarray


class NcnnRunner(PerImageRunner):
    """A .param file in ncnn, in the precision that it was written for."""

    engine = "ncnn"

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self.ncnn = require("ncnn", extra="engines", purpose="running a .param file")
        self._read_ports(path)
        self.net = self.ncnn.Net()
        options = self.net.opt
        half = self.metadata.get("precision") == "fp16"
        options.use_fp16_packed = options.use_fp16_storage = options.use_fp16_arithmetic = half
        options.use_bf16_storage = False
        options.num_threads = threads or torch.get_num_threads()
        weights = path.with_suffix(".ncnn.bin")
        if self.net.load_param(str(path)) or not weights.is_file() or self.net.load_model(str(weights)):
            raise LowRankError(f"ncnn cannot read {path}, or {weights.name} beside it.")

    def _run_image(self, inputs: list[ndarray]) -> list[ndarray]:
        extractor = self.net.create_extractor()
        for place, array in enumerate(inputs):
            extractor.input(f"in{place}", self.ncnn.Mat(array).clone())
        results = []
        for place, port in enumerate(self.outputs):
            failed, result = extractor.extract(f"out{place}")
            if failed:
                raise LowRankError(
                    f"ncnn gives no output {port.name}: an operation of this network is not in ncnn."
                )
            results.append(result.numpy().copy())
        return results


def write_ncnn(folder: Path, stem: str, request: ExportRequest) -> Path:
    """Write a .param and a .bin file; in fp16 the weights are stored in half precision."""
    pnnx = require("pnnx", extra="engines", purpose="writing ncnn's files")
    if request.precision == "int8":
        raise LowRankError("ncnn's Python packages have no tool for int8: take fp16, or another engine for int8.")
    call = first_image(request, "ncnn")
    script, path = folder / "traced.pt", folder / f"{stem}.param"
    trace(replace(request, network=groups_apart(request.network)).positional(), call).save(str(script))
    shapes = ",".join(f"[{','.join(map(str, tensor.shape))}]" for tensor in call.tensors.values())
    command = [pnnx.EXEC_PATH, script.name, f"inputshape={shapes}", f"fp16={int(request.precision == 'fp16')}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found, weights = folder / "traced.ncnn.param", folder / "traced.ncnn.bin"
    ignored = [line for line in done.stderr.splitlines() if line.startswith("ignore ")]
    if done.returncode or not found.is_file() or ignored:
        why = ignored[0].split()[1] + " is not in ncnn" if ignored else f"pnnx ends with {done.returncode}"
        raise LowRankError(f"the network cannot be written for ncnn: {why}.")
    found.replace(path)
    weights.replace(path.with_suffix(".ncnn.bin"))
    for rest in folder.glob("traced*"):
        rest.unlink()
    write_beside(path, {**request.metadata, "precision": request.precision})
    return path
