"""Per-layer times of the fused kernels on a GPU, over a short list of tiles, beside cuDNN's dense twin.

    python benchmarks/gpu_kernels.py --out results.json --budget 300

Every (layer, tile) first runs once in a process of its own, several at a time: that compiles it into Triton's
cache, and a tile that fails or hangs costs its process only. Those that ran are checked against float64 on
four images and timed. Results are written after each layer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

from lowrank_cnn.environment import environment
from lowrank_cnn.kernels import backward
from lowrank_cnn.kernels.launch import Plan, forward, gradients, plans
from lowrank_cnn.kernels.problem import Problem, describe, empty_codes, pixels_last
from lowrank_cnn.kernels.reference import composite_reference


@dataclass(frozen=True)
class Layer:
    """A layer of a network: channels, size, its groups as (height, width, filters), and a pool or none."""

    name: str
    channels: int
    size: int
    groups: tuple[tuple[int, int, int], ...]
    pool: str | None = None
    kernel: int = 3
    relu: bool = True

    @property
    def filters(self) -> int:
        return sum(filters for *_, filters in self.groups)


def low_rank(name: str, channels: int, filters: int, size: int, pool: str | None = None) -> Layer:
    return Layer(name, channels, size, ((3, 1, filters // 2), (1, 3, filters // 2)), pool)


def dense(name: str, channels: int, filters: int, size: int, pool: str | None = None, kernel: int = 3) -> Layer:
    return Layer(name, channels, size, ((kernel, kernel, filters),), pool, kernel)


def mixture(name: str, channels: int, filters: int, size: int) -> Layer:
    part = filters // 8
    groups = ((3, 1, 3 * part), (1, 3, 3 * part), (3, 3, 2 * part))
    return Layer(name, channels, size, groups, relu=False)


LAYERS = [
    low_rank("lr-conv1", 3, 64, 224, "floor"),
    low_rank("lr-conv2", 64, 128, 112, "floor"),
    low_rank("lr-conv3_1", 128, 256, 56),
    low_rank("lr-conv3_2", 256, 256, 56, "floor"),
    low_rank("lr-conv4_1", 256, 512, 28),
    low_rank("lr-conv4_2", 512, 512, 28, "floor"),
    low_rank("lr-conv5", 512, 512, 14),
    low_rank("lr-conv5-wide", 1024, 1024, 14),
    dense("join-conv2", 128, 128, 112, "floor", 1),
    dense("join-conv3", 256, 256, 56, None, 1),
    dense("join-conv4", 512, 512, 28, "floor", 1),
    mixture("wfull-conv3", 256, 256, 56),
    Layer("sf-conv3-1x3", 256, 56, ((1, 3, 256),), relu=False),
    dense("dense-conv1", 3, 64, 224, "floor"),
    dense("dense-conv3_2", 256, 256, 56, "floor"),
    dense("dense-conv4_2", 512, 512, 28, "floor"),
]
BY_NAME = {layer.name: layer for layer in LAYERS}


def make(layer: Layer, batch: int) -> tuple[Tensor, list[Tensor], Tensor, dict[str, Any]]:
    """Random inputs of a layer, and the options that `describe` and the reference take."""
    generator = torch.Generator("cuda").manual_seed(time.time_ns() % (1 << 31))
    shape = (batch, layer.channels, layer.size, layer.size)
    x = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    scale = (2 / sum(h * w * f for h, w, f in layer.groups)) ** 0.5
    weights = [
        scale * torch.randn((f, layer.channels, h, w), device="cuda", generator=generator)
        for h, w, f in layer.groups
    ]
    bias = torch.randn(layer.filters, device="cuda", generator=generator)
    padding = [((h // 2, h // 2), (w // 2, w // 2)) for h, w, _ in layer.groups]
    options = {"stride": (1, 1), "padding": padding, "relu": layer.relu, "pool": layer.pool}
    return x, [weight.bfloat16() for weight in weights], bias, options


def tiles_of(problem: Problem) -> dict[str, Plan]:
    """The plans worth trying, by name."""
    return {str(plan): plan for plan in plans(problem, hopper=torch.cuda.get_device_capability()[0] == 9)}


def runner(problem: Problem, x: Tensor, weights: list[Tensor], bias: Tensor, plan: Plan) -> Callable[[], Tensor]:
    """The launch of one plan; its weights are packed at the first."""
    return lambda: forward(plan, problem, x, weights, bias)


def milliseconds(run: Callable[[], Any], repeats: int = 15) -> dict[str, float]:
    """Median and spread by device events, the L2 cache flushed before each run."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return {"ms": median(times), "least": min(times), "most": max(times)}


def ceilings() -> dict[str, float]:
    """The device's own limits: matrix products in TFLOP/s, and bytes read plus written in TB/s."""
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds(lambda: a @ b)["ms"]
    source = torch.randint(0, 127, (1 << 32,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = milliseconds(lambda: target.copy_(source))["ms"]
    return {"tflops": 2 * 8192**3 / product / 1e9, "tb_per_s": 2 * source.numel() / copy / 1e9}


def relative_error(y: Tensor, x: Tensor, weights: list[Tensor], bias: Tensor, options: dict[str, Any]) -> float:
    """Against float64, on the first and last two images."""
    some = torch.tensor([0, 1, -2, -1], device=x.device) % x.shape[0]
    exact = composite_reference(x[some].double(), [w.double() for w in weights], bias.double(), **options)
    return float(torch.linalg.vector_norm(y[some] - exact) / torch.linalg.vector_norm(exact))


def rivals(layer: Layer, x: Tensor) -> dict[str, Any]:
    """cuDNN's dense layer of the same shape, bias and ReLU fused, and the max-pool as its own pass."""
    k = layer.kernel
    weight = torch.randn((layer.filters, layer.channels, k, k), device="cuda", dtype=torch.bfloat16)
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(layer.filters, device="cuda", dtype=torch.bfloat16)

    def conv() -> Tensor:
        return torch.cudnn_convolution_relu(x, weight, bias, (1, 1), (k // 2, k // 2), (1, 1), 1)

    found = {"dense conv+bias+relu": milliseconds(conv)}
    found["dense conv"] = milliseconds(lambda: F.conv2d(x, weight, None, 1, k // 2))
    if layer.pool:
        y = conv()
        found["max-pool"] = milliseconds(lambda: F.max_pool2d(y, 2, 2))
    return found


def measure(layer: Layer, batch: int, peak: dict[str, float], good: set[str], deadline: float) -> dict[str, Any]:
    """Everything about one layer: its counts and floor, every tile, the rivals."""
    x, weights, bias, options = make(layer, batch)
    problem = describe(x, weights, **options)
    floor = max(2 * problem.macs / peak["tflops"] / 1e9, problem.bytes / peak["tb_per_s"] / 1e9)
    row: dict[str, Any] = {"problem": str(problem), "macs": problem.macs, "bytes": problem.bytes}
    row |= {"floor_ms": floor, "tiles": {}}
    for name, tile in tiles_of(problem).items():
        if name not in good or time.monotonic() > deadline:
            continue
        try:
            run = runner(problem, x, weights, bias, tile)
            error = relative_error(run(), x, weights, bias, options)
            row["tiles"][name] = {**milliseconds(run), "error": error, "right": error < 1e-2, **tile.to_dict()}
        except Exception as failure:  # a tile that fails says so and the rest go on
            row["tiles"][name] = {"failed": repr(failure)[:300]}
    try:
        row["rivals"] = rivals(layer, x)
    except Exception as failure:
        row["rivals"] = {"failed": repr(failure)[:300]}
    return row


def measure_backward(layer: Layer, batch: int) -> dict[str, Any]:
    """The parts of the fused backward, each checked loosely, and cuDNN's dense gradients."""
    x, weights, bias, options = make(layer, batch)
    problem = describe(x, weights, **options)
    codes = empty_codes(problem, x)
    y = forward(plans(problem, hopper=True)[0], problem, x, weights, bias, codes)
    seen = codes if codes is not None else y.permute(0, 2, 3, 1)
    grad = torch.randn_like(y)
    need_input = layer.channels > 4
    row = {"all": milliseconds(lambda: gradients(problem, grad, x, weights, seen, need_input=need_input))}
    row["error"] = _gradient_error(
        gradients(problem, grad, x, weights, seen, need_input=need_input), x, weights, bias, grad, options
    )
    if need_input:
        last = pixels_last(grad)
        g, _ = backward.launch_undo(problem, last, seen)
        row["undo"] = milliseconds(lambda: backward.launch_undo(problem, last, seen))
        row["input"] = milliseconds(lambda: backward.launch_input_gradient(problem, g, weights))
        row["weights"] = milliseconds(lambda: backward.launch_weight_gradient(problem, g, pixels_last(x), 264))
    k = layer.kernel
    dense = torch.randn((layer.filters, layer.channels, k, k), device="cuda", dtype=x.dtype)
    dense = dense.contiguous(memory_format=torch.channels_last)
    full = torch.randn((batch, layer.filters, layer.size, layer.size), device="cuda", dtype=x.dtype)
    full = full.contiguous(memory_format=torch.channels_last)
    for name, mask in (("dense input", [True, False, False]), ("dense weights", [False, True, False])):
        row[name] = milliseconds(
            lambda mask=mask: torch.ops.aten.convolution_backward(
                full, x, dense, None, [1, 1], [k // 2, k // 2], [1, 1], False, [0, 0], 1, mask
            )
        )
    return row


def _gradient_error(
    ours: tuple[Tensor | None, list[Tensor], Tensor],
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor,
    grad: Tensor,
    options: dict[str, Any],
) -> dict[str, float]:
    """Relative error against torch's own gradients in float32 (the whole batch in float64 would take long)."""
    leaves = [t.float().requires_grad_() for t in (x, *weights, bias)]
    with torch.backends.cudnn.flags(allow_tf32=False):
        y = composite_reference(leaves[0], leaves[1:-1], leaves[-1], **options)
        exact = torch.autograd.grad(y, leaves, grad.float())
    names = ["input", *(f"weights{i}" for i in range(len(weights))), "bias"]
    pairs = zip(names, [ours[0], *ours[1], ours[2]], exact, strict=True)
    return {name: float((a - b).norm() / b.norm()) for name, a, b in pairs if a is not None}


def try_alone(names: list[str], batch: int) -> None:
    """Child process: run each `layer/tile` once, and say so."""
    for name in names:
        layer, tile_name = name.split("/")
        print("trying", name, flush=True)
        x, weights, bias, options = make(BY_NAME[layer], batch)
        problem = describe(x, weights, **options)
        try:
            runner(problem, x, weights, bias, tiles_of(problem)[tile_name])()
            torch.cuda.synchronize()
            print("ran", name, flush=True)
        except Exception as failure:
            print("failed", name, repr(failure)[:300], flush=True)
            if "CUDA error" in repr(failure) or "illegal" in repr(failure):
                return


def try_all(names: list[str], batch: int, jobs: int, deadline: float) -> tuple[set[str], dict[str, str]]:
    """Run every `layer/tile` once in child processes; those that end a process are named, the rest retried."""
    ran: set[str] = set()
    failed: dict[str, str] = {}
    waiting = [names[i::jobs] for i in range(jobs)]
    while any(waiting) and time.monotonic() < deadline:
        children = [(share, _child(share, batch)) for share in waiting if share]
        waiting = []
        for share, child in children:
            left = max(5.0, min(150.0, deadline - time.monotonic()))
            try:
                text, _ = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                child.kill()
                text, _ = child.communicate()
            waiting.append(_read(share, text, ran, failed))
    return ran, failed


def _child(share: list[str], batch: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--batch", str(batch), "--try", ",".join(share)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _read(share: list[str], text: str, ran: set[str], failed: dict[str, str]) -> list[str]:
    """Sort a child's report; what it was trying when it ended failed, what it never reached is returned."""
    tried = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        name, _, reason = rest.partition(" ")
        if word == "trying":
            tried.append(name)
        elif word == "ran":
            ran.add(name)
        elif word == "failed":
            failed[name] = reason
    for name in tried:
        if name not in ran:
            failed.setdefault(name, "ended or stopped its process: " + text[-300:])
    return [name for name in share if name not in tried] if tried else []


def planned(layers: list[Layer], batch: int) -> list[str]:
    names = []
    for layer in layers:
        x, weights, _, options = make(layer, 1)
        problem = describe(x.expand(batch, -1, -1, -1), weights, **options)
        names += [f"{layer.name}/{tile}" for tile in tiles_of(problem)]
    return names


def show(layer: Layer, row: dict[str, Any]) -> None:
    """One line per layer for its best tile, the rival and the floor, then every tile."""
    times = {name: t["ms"] for name, t in row["tiles"].items() if "ms" in t and t["right"]}
    rival = row["rivals"].get("dense conv+bias+relu", {}).get("ms", float("nan"))
    pool = row["rivals"].get("max-pool", {}).get("ms", 0.0)
    best = min(times, key=times.__getitem__, default=None)
    ours = times[best] if best else float("nan")
    rate = 2 * row["macs"] / ours / 1e9
    print(f"{layer.name:16} {ours:7.3f} ms {rate:5.0f} TFLOP/s  floor {row['floor_ms']:.3f}", end="  ")
    print(f"dense {rival:.3f}+{pool:.3f}  {best}")
    for name, tile in row["tiles"].items():
        wrong = "" if tile.get("right", False) else f"  WRONG {tile.get('error', tile.get('failed'))}"
        print(f"    {name:36} {tile.get('ms', float('nan')):7.3f}{wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="", help="comma-separated beginnings of layer names; all if empty")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--budget", type=float, default=300, help="seconds in all")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("gpu_kernels.json"))
    parser.add_argument("--backward", action="store_true", help="time the gradients as well")
    parser.add_argument("--try", dest="alone", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        try_alone(options.alone.split(","), options.batch)
        return
    start = time.monotonic()
    wanted = tuple(options.layers.split(",")) if options.layers else ("",)
    layers = [layer for layer in LAYERS if layer.name.startswith(wanted)]
    names = planned(layers, options.batch)
    ran, failed = try_all(names, options.batch, options.jobs, start + 0.6 * options.budget)
    spent = time.monotonic() - start
    print(f"{len(ran)} tiles ran, {len(failed)} failed, {spent:.0f} s", *failed.items(), sep="\n  ")
    results: dict[str, Any] = {"environment": environment(), "ceilings": ceilings()}
    results |= {"failed": failed, "layers": {}}
    print({name: round(value, 2) for name, value in results["ceilings"].items()})
    for layer in layers:
        if time.monotonic() - start > options.budget:
            break
        good = {name.split("/")[1] for name in ran if name.startswith(layer.name + "/")}
        row = measure(layer, options.batch, results["ceilings"], good, start + options.budget)
        results["layers"][layer.name] = row
        show(layer, row)
        if options.backward:
            try:
                row["backward"] = measure_backward(layer, options.batch)
                print(
                    "    backward", {k: round(v["ms"], 3) if "ms" in v else v for k, v in row["backward"].items()}
                )
            except Exception as failure:
                row["backward"] = {"failed": repr(failure)[:300]}
                print("    backward", row["backward"])
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
