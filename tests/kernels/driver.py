"""Compile the kernels for a GPU that is not here, and say what each takes: registers, spills, shared memory.

    python -m tests.kernels.driver 90

Every launch is made as ever, on small tensors in host memory; Triton compiles it for the compute capability given,
and does not run it. Results are a line of JSON per compiled kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import nn
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lowrank_cnn.graph.fused_between import MOST_CHANNELS
from lowrank_cnn.kernels import device as gpu
from lowrank_cnn.kernels.autotune.choice import compile_kernels
from lowrank_cnn.kernels.autotune.trial import KernelTrial
from lowrank_cnn.kernels.autotune.tuned import Request
from lowrank_cnn.kernels.between import batch_statistics, normalise, normalise_pool, pool, response_norm
from lowrank_cnn.kernels.conv import forward, gradients
from lowrank_cnn.kernels.conv.plans import KERNELS, KernelPlan, plans
from lowrank_cnn.kernels.depthwise import ops as depthwise
from lowrank_cnn.kernels.depthwise.dispatch import DepthwiseCall
from lowrank_cnn.kernels.depthwise.plan import Band
from lowrank_cnn.kernels.problem import ConvTensors, Problem, describe, empty_codes
from tests.kernels.helpers import same

LAYERS = {
    "lr": ((256, 64, 16, 16), [(3, 1, 64), (1, 3, 64)], "floor"),
    "wide": ((256, 256, 14, 14), [(3, 1, 256), (1, 3, 256)], None),
    "wfull": ((256, 128, 14, 14), [(3, 1, 64), (1, 3, 64), (3, 3, 128)], "ceil"),
    "join": ((256, 128, 16, 16), [(1, 1, 128)], "floor"),
    "dense": ((256, 128, 16, 16), [(3, 3, 128)], "floor"),
    "nin": ((128, 192, 30, 30), [(5, 1, 96), (1, 5, 96)], None),
    "half": ((256, 128, 14, 14), [(3, 3, 64), (1, 1, 64)], None),
    "narrow": ((128, 96, 15, 15), [(3, 1, 24), (1, 3, 24)], None),
}
FIRST = {
    "lr": ((64, 3, 32, 32), [(3, 1, 32), (1, 3, 32)], "floor"),
    "dense": ((64, 3, 32, 32), [(3, 3, 64)], "floor"),
    "nin": ((128, 3, 32, 32), [(3, 1, 96), (1, 3, 96)], None),
    "crowded": ((128, 3, 33, 33), [(3, 1, 80), (1, 3, 80)], "ceil"),
}
STEMS = {
    "lr": ((64, 3, 224, 224), [(7, 1, 32), (1, 7, 32)], None),
    "lr, pooled": ((64, 3, 224, 224), [(7, 1, 32), (1, 7, 32)], "3x3/2"),
    "dense": ((64, 3, 224, 224), [(7, 7, 64)], None),
    "dense, pooled": ((64, 3, 224, 224), [(7, 7, 64)], "3x3/2"),
}
FEW = {
    "dla's first": ((16, 3, 224, 224), [(7, 7, 16)], None),
    "dla's second": ((4, 16, 224, 224), [(3, 3, 16)], None),
    "32 channels": ((4, 32, 112, 112), [(3, 3, 32)], None),
}
"""Few channels on large maps."""
EPILOGUES = [("lr", (2, 2), "relu"), ("wide", (1, 1), "relu"), ("dense", (2, 2), "silu"), ("join", (1, 1), "gelu")]
"""Layers with a residual, their stride and their activation."""


class Absent:
    """What Triton asks of a GPU while it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(found: dict[str, Any]) -> None:
    """From here on a launch compiles; what it compiled goes into `found`, by kernel and constants."""
    run = JITFunction.run

    def compiled(self, *arguments, warmup, **options):
        kernel: Any = run(self, *arguments, warmup=True, **options)
        found[f"{self.fn.__name__} {kernel.hash}"] = kernel
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]


def usage(kernel) -> dict[str, int]:
    """Registers of a thread, its bytes of local memory, and a program's shared memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    sizes = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": sizes["REG"],
        "spilled": max(sizes["STACK"], sizes["LOCAL"]),
        "shared": kernel.metadata.shared,
        "overtaken": overtaken(kernel.asm["ptx"]),
    }


def overtaken(ptx: str) -> bool:
    """Whether products whose first factor lies in registers are left under way: the next may overwrite it."""
    from_registers = re.search(r"wgmma\.mma_async\S* \{[^}]*\}, *\{", ptx) is not None
    return from_registers and re.search(r"wgmma\.wait_group\S* [1-9]", ptx) is not None


def posed(layer, dtype, *, stride=(1, 1), activation="relu") -> tuple[Problem, torch.Tensor, list[torch.Tensor]]:
    size, groups, rounding = layer
    x = torch.zeros(size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weights = [torch.zeros(f, size[1], h, w, dtype=dtype) for h, w, f in groups]
    padding = [same(h, w) for h, w, _ in groups]
    return describe(x, weights, stride=stride, padding=padding, activation=activation, pool=rounding), x, weights


def one_of_each_kernel(problem: Problem, capability: tuple[int, int]) -> list[KernelPlan]:
    """The plan of each kernel that takes most registers: the largest tile."""
    found = {plan.kernel: plan for plan in sorted(plans(problem, capability=capability), key=_values)}
    return list(found.values())


def _values(plan: KernelPlan) -> int:
    return getattr(plan.tile, "pixels", 1) * getattr(plan.tile, "filters", 1)


def forwards(capability: tuple[int, int]) -> None:
    for layer in (*LAYERS.values(), *FIRST.values(), *FEW.values()):
        problem, x, weights = posed(layer, torch.bfloat16)
        bias = torch.zeros(problem.filters)
        for plan in plans(problem, capability=capability):
            forward.run_plan(plan, problem, x, weights, bias, empty_codes(problem, x))
    problem, x, weights = posed(LAYERS["lr"], torch.float32)
    forward.run_plan(plans(problem, capability=capability)[0], problem, x, weights, None)
    for layer in STEMS.values():
        problem, x, weights = posed(layer, torch.bfloat16, stride=(2, 2))
        for plan in one_of_each_kernel(problem, capability):
            forward.run_plan(plan, problem, x, weights, torch.zeros(problem.filters))
    for name, stride, activation in EPILOGUES:
        size, groups, _ = LAYERS[name]
        problem, x, weights = posed((size, groups, None), torch.float16, stride=stride, activation=activation)
        problem = replace(problem, residual=True)
        added = torch.zeros(problem.batch, problem.filters, *problem.result_size, dtype=torch.float16)
        for plan in one_of_each_kernel(problem, capability):
            for order in (False, True):
                forward.run_plan(plan, replace(problem, add_last=order), x, weights, None, None, added)


def forwards_with_statistics(capability: tuple[int, int]) -> None:
    """Forwards that leave mean and variance for a batch norm."""
    for name, stride in (("narrow", (1, 1)), ("wide", (1, 1)), ("lr", (2, 2))):
        size, groups, _ = LAYERS[name]
        problem, x, weights = posed((size, groups, None), torch.bfloat16, stride=stride, activation=None)
        for plan in one_of_each_kernel(problem, capability):
            packed = KERNELS[plan.kernel].layout.pack(weights, problem, x.dtype)
            forward.run_with_statistics(plan, problem, ConvTensors(x, packed))


def backwards(capability: tuple[int, int]) -> None:
    for layer in (*LAYERS.values(), *FIRST.values()):
        problem, x, weights = posed(layer, torch.bfloat16)
        y = torch.zeros(problem.batch, problem.filters, *problem.result_size, dtype=x.dtype)
        codes = empty_codes(problem, x)
        seen = codes if codes is not None else y.permute(0, 2, 3, 1)
        gradients.compute_gradients(problem, y, x, weights, seen, need_input=x.shape[1] > 3)
    for layer, stride in ((FEW["dla's first"], (1, 1)), (STEMS["dense"], (2, 2))):
        problem, x, weights = posed(layer, torch.bfloat16, stride=stride)
        y = torch.zeros(problem.batch, problem.filters, *problem.result_size, dtype=x.dtype)
        gradients.compute_gradients(problem, y, x, weights, y.permute(0, 2, 3, 1), need_input=False)
    for dtype, stride in ((torch.float16, (2, 2)), (torch.float32, (1, 1))):
        problem, x, weights = posed((*LAYERS["lr"][:2], None), dtype, stride=stride)
        y = torch.zeros(problem.batch, problem.filters, *problem.result_size, dtype=dtype)
        gradients.compute_gradients(problem, y, x, weights, y.permute(0, 2, 3, 1), need_input=stride == (1, 1))


def neighbours() -> None:
    """Batch norm, max-pool and local response norm, which train beside the composites."""
    x = torch.zeros(128, 192, 16, 16, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    numbers = torch.zeros(192)
    running = (numbers, numbers, torch.zeros((), dtype=torch.int64))
    mean, rstd = batch_statistics.batch_norm_statistics(x, *running, 0.1, 1e-5)
    batch_statistics.batch_norm_track(mean, rstd, *running, 1024, 0.1, 1e-5)
    scales = (mean, rstd, numbers, numbers)
    normalise.batch_norm_activation(x, *scales, x, "silu", 0.0, True)
    for residual, activation in ((None, "relu"), (x, "relu"), (x, "silu")):
        normalise.batch_norm_activation(x, *scales, residual, activation, 0.0, False)
        normalise.batch_norm_activation_backward(x, residual, x, *scales, residual, activation, 0.0)
    window = ((3, 3), (2, 2), (1, 1), False)
    y, codes, won = normalise_pool.batch_norm_relu_pool(x, *scales, *window, True)
    normalise_pool.batch_norm_relu_pool_backward(y, codes, won, x, *scales[:3], *window[:3])
    window = ((3, 3), (2, 2), (0, 0), True)
    y, codes = pool.max_pool2d(x, *window, True)
    pool.max_pool2d_backward(y, codes, (16, 16), *window[:3])
    kinds = ((64, torch.bfloat16), (192, torch.bfloat16), (100, torch.float16), (64, torch.float32))
    for channels, dtype in kinds:
        x = torch.zeros(16, channels, 16, 16, dtype=dtype).contiguous(memory_format=torch.channels_last)
        y = response_norm.local_response_norm(x, 5, 1e-4, 0.75, 1.0)
        response_norm.local_response_norm_backward(y, x, 5, 1e-4, 0.75, 1.0)
    response_norm.local_response_norm_backward(x, x, MOST_CHANNELS, 1.0, 0.6, 0.0)
    response_norm.local_response_norm(x, MOST_CHANNELS, 1.0, 0.6, 0.0)


def bands() -> None:
    """Depthwise composites, forward and backward: InceptionNeXt's bands, and one square."""
    for groups in ([(60, 0, 0, 0, 0), (12, 3, 3, 1, 1), (12, 1, 11, 0, 5), (12, 11, 1, 5, 0)], [(96, 7, 7, 3, 3)]):
        x = torch.zeros(4, 96, 56, 56, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        filters = [torch.zeros(own, 1, height, width) for own, height, width, *_ in groups if height]
        layer = ([value for group in groups for value in group], [1, 1], [1, 1])
        depthwise.depthwise_conv2d(x, filters, torch.zeros(96), *layer, [56, 56], None, None, "", 0.0)
        depthwise.depthwise_conv2d_backward(x, x, filters, *layer, True, True)


def ahead() -> None:
    """A layer's kernels compiled ahead, then met in training: how many had been compiled after each."""
    compiled: list[str] = []
    knobs.compilation.listener = lambda **about: compiled.append(about["metadata"]["name"])
    problem = posed(LAYERS["lr"], torch.bfloat16)[0]
    band = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
    call = DepthwiseCall.of(
        torch.zeros(4, 16, 9, 9), [band.weight], None, [Band(16, 3, 3, 1, 1)], *[(1, 1)] * 2, (9, 9)
    )
    compile_kernels([Request(problem, torch.device("cpu"), training=True), call])
    counts = [len(compiled)]
    compile_only({})
    KernelTrial.random(Request(problem, torch.device("cpu"), training=True)).run(
        plans(problem, capability=(9, 0))[0]
    )
    call._replace(x=(torch.Size((5, 16, 9, 9)), *call.x[1:])).compile()  # a batch of any size
    print(json.dumps([*counts, len(compiled)]))


def main(capability: int, what: str = "all") -> None:
    driver.set_active(Absent(capability))  # type: ignore[arg-type]
    gpu.multiprocessors = lambda device: 132  # type: ignore[assignment]
    gpu.capability_of = lambda device: divmod(capability, 10)  # type: ignore[assignment]
    if what == "ahead":
        return ahead()
    found: dict[str, Any] = {}
    compile_only(found)
    forwards(divmod(capability, 10))
    forwards_with_statistics(divmod(capability, 10))
    backwards(divmod(capability, 10))
    neighbours()
    bands()
    for name, kernel in found.items():
        print(json.dumps({"kernel": name.split()[0], **usage(kernel)}))
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
