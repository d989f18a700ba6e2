"""ncnn: write .param files (and weights as .bin) with pnnx, and run them on the CPU.

ncnn has no batch axis: a file holds the network for one image.
"""

from __future__ import annotations

import copy
import subprocess
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.files import is_regular
from lowrank_cnn.deploy.blocks import groups_apart
from lowrank_cnn.deploy.engines.request import ExportRequest
from lowrank_cnn.deploy.engines.runner import Arrays, Engine, Runner, write_beside
from lowrank_cnn.deploy.engines.torch import script_bytes, trace
from lowrank_cnn.method.rewrite import copy_with


class NcnnRunner(Runner):
    """A .param file in ncnn, in the precision that it was written for."""

    engine = "ncnn"
    one_image = True

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self.ncnn = require("ncnn", extra="engines", purpose="running a .param file")
        self._read_beside(path)
        self.net = self.ncnn.Net()
        options = self.net.opt
        half = self.metadata.get("precision") == "fp16"
        options.use_fp16_packed = options.use_fp16_storage = options.use_fp16_arithmetic = half
        options.use_bf16_storage = False
        options.num_threads = threads or torch.get_num_threads()
        weights = path.with_suffix(".ncnn.bin")
        if not is_regular(weights) or self.net.load_param(str(path)) or self.net.load_model(str(weights)):
            raise LowRankError(f"ncnn cannot read {path}, or {weights.name} beside it.")

    def _run(self, arrays: Arrays) -> Arrays:
        extractor = self.net.create_extractor()
        for place, array in enumerate(arrays):
            extractor.input(f"in{place}", self.ncnn.Mat(array[0]).clone())
        results = []
        for place, port in enumerate(self.outputs):
            failed, result = extractor.extract(f"out{place}")
            if failed:
                raise LowRankError(f"ncnn gives no output {port.name}: it lacks an operation of this network.")
            results.append(result.numpy().copy()[None])
        return results


class _CeilAvgPool(nn.Module):
    """An average pool whose last windows cross the border, by operations on which ncnn and torch agree.

    ncnn divides such a window by its whole size. Zeros are appended here, every window is divided by its whole
    size, and a constant corrects the windows at the border.
    """

    def __init__(self, pool: nn.AvgPool2d) -> None:
        super().__init__()
        self.pool = pool
        self.whole = copy.copy(pool)
        self.whole.ceil_mode, self.whole.count_include_pad, self.whole.padding = False, True, 0

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(1, 1, *x.shape[-2:], dtype=x.dtype)
        with torch.no_grad():
            wanted, sides = self.pool(ones), []
            for axis in (1, 0):
                kernel, stride, before = (
                    value if isinstance(value, int) else value[axis]
                    for value in (self.pool.kernel_size, self.pool.stride, self.pool.padding)
                )
                end = (wanted.shape[2 + axis] - 1) * stride + kernel - before
                sides += [before, max(0, end - x.shape[2 + axis])]
            correction = wanted / self.whole(F.pad(ones, sides))
        return self.whole(F.pad(x, sides)) * correction


def write_ncnn(path: Path, request: ExportRequest) -> None:
    """Write a .param and a .bin file; in fp16 the weights are stored in half precision."""
    pnnx = require("pnnx", extra="engines", purpose="writing ncnn's files")
    example = tuple(request.one_image("ncnn").tensors.values())
    folder, script = path.parent, path.with_name("traced.pt")
    apart = groups_apart(request.network)
    pools = {m: _CeilAvgPool(m) for m in apart.modules() if type(m) is nn.AvgPool2d and m.ceil_mode}
    network = replace(request, network=copy_with(apart, pools)).positional()
    script.write_bytes(script_bytes(trace(network, example, request.name)))
    shapes = ",".join(f"[{','.join(map(str, tensor.shape))}]" for tensor in example)
    command = [pnnx.EXEC_PATH, script.name, f"inputshape={shapes}", f"fp16={int(request.precision == 'fp16')}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found, weights = folder / "traced.ncnn.param", folder / "traced.ncnn.bin"
    ignored = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("ignore ")]
    if done.returncode or not found.is_file() or ignored:
        why = f"{ignored[0]} is not in ncnn" if ignored else f"pnnx fails on it (exit code {done.returncode})"
        raise LowRankError(f"the network cannot be written for ncnn: {why}.")
    found.replace(path)
    weights.replace(path.with_suffix(".ncnn.bin"))
    for rest in folder.glob("traced*"):
        rest.unlink()
    write_beside(path, request)


_USAGE = """import numpy, ncnn; {made}; net = ncnn.Net(){mode}
net.load_param({file}); net.load_model({weights})
run = net.create_extractor(); {fed}; logits = run.extract("out0")[1]"""
_IN_SINGLE = "; net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False"
"""By default ncnn computes in half precision wherever it can."""
NCNN = Engine(".param", NcnnRunner, write_ncnn, _USAGE, "ncnn", modes=(_IN_SINGLE, ""), lowers=True)
