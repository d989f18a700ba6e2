"""Per-layer times of the fused kernels on a GPU, over a short list of tiles, against cuDNN's dense twin.

    python -m benchmarks.gpu_kernels --out results.json --budget 300

Every (layer, tile) first runs once in a process of its own, several at a time: that compiles it into Triton's
cache, and a tile that fails or hangs costs its process only. Those that ran are checked against float64 on
four images and timed. Results are written after each layer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import parser, write_record
from benchmarks.gpu_backward import measure_backward, run_backward, show_backward
from benchmarks.gpu_clock import milliseconds
from benchmarks.gpu_floor import limits
from benchmarks.gpu_trials import try_all
from lowrank_cnn.core.environment import environment
from lowrank_cnn.kernels.conv.forward import run_plan
from lowrank_cnn.kernels.conv.plans import KernelPlan, plans, shape_of
from lowrank_cnn.kernels.conv.tiled import Tile
from lowrank_cnn.kernels.problem import Problem, describe
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
    stride: int = 1

    @property
    def filters(self) -> int:
        return sum(filters for *_, filters in self.groups)


def low_rank(name: str, channels: int, filters: int, size: int, pool: str | None = None) -> Layer:
    return Layer(name, channels, size, ((3, 1, filters // 2), (1, 3, filters // 2)), pool)


def dense(
    name: str, channels: int, filters: int, size: int, pool: str | None = None, kernel: int = 3, stride: int = 1
) -> Layer:
    return Layer(name, channels, size, ((kernel, kernel, filters),), pool, kernel, stride=stride)


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
    # Few channels at full resolution: `--layers stem` measures these alone.
    dense("stem-dla34-1", 3, 16, 224, kernel=7),
    dense("stem-dla34-2", 16, 16, 224),
    dense("stem-dla34-3", 16, 32, 224, stride=2),
    Layer("stem-dla34-lr-1", 3, 224, ((7, 1, 8), (1, 7, 8)), kernel=7),
    low_rank("stem-dla34-lr-2", 16, 16, 224),
    Layer("stem-dla34-lr-3", 16, 224, ((3, 1, 16), (1, 3, 16)), stride=2),
    dense("stem-vgg16", 3, 64, 224),
    dense("stem-resnet", 3, 64, 224, kernel=7, stride=2),
    dense("stem-nin", 3, 192, 32, kernel=5),
    Layer("stem-nin-lr", 3, 32, ((5, 1, 96), (1, 5, 96)), kernel=5),
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
    options = {"stride": (layer.stride,) * 2, "padding": padding, "relu": layer.relu, "pool": layer.pool}
    return x, [weight.bfloat16() for weight in weights], bias, options


def tiles_of(problem: Problem) -> dict[str, KernelPlan]:
    """The plans worth trying, by name."""
    capability = torch.cuda.get_device_capability()
    return {str(plan): plan for plan in plans(problem, capability=capability)}


def runner(
    problem: Problem, x: Tensor, weights: list[Tensor], bias: Tensor, plan: KernelPlan
) -> Callable[[], Tensor]:
    """The launch of one plan; its weights are packed at the first."""
    return lambda: run_plan(plan, problem, x, weights, bias)


def relative_error(y: Tensor, x: Tensor, weights: list[Tensor], bias: Tensor, options: dict[str, Any]) -> float:
    """Against float64, on the first and last two images."""
    some = torch.tensor([0, 1, -2, -1], device=x.device) % x.shape[0]
    exact = composite_reference(x[some].double(), [w.double() for w in weights], bias.double(), **options)
    return float(torch.linalg.vector_norm(y[some] - exact) / torch.linalg.vector_norm(exact))


def rivals(layer: Layer, x: Tensor, moved: int) -> dict[str, Any]:
    """cuDNN's dense layer of the same shape, bias and ReLU fused, and the max-pool as its own pass.

    Also a pass over memory that moves as many bytes as the layer must, read plus written.
    """
    k, stride = layer.kernel, (layer.stride, layer.stride)
    weight = torch.randn((layer.filters, layer.channels, k, k), device="cuda", dtype=torch.bfloat16)
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(layer.filters, device="cuda", dtype=torch.bfloat16)

    def conv() -> Tensor:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, (k // 2, k // 2), (1, 1), 1)

    source = torch.ones(moved // 8, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    found = {"copy": milliseconds(lambda: torch.neg(source, out=target))}
    found["dense conv+bias+relu"] = milliseconds(conv)
    if missing := -layer.channels % 8:  # cuDNN has faster kernels for eight channels
        pad = (0, 0, 0, 0, 0, missing)
        wide = F.pad(weight, pad).contiguous(memory_format=torch.channels_last)

        def padded() -> Tensor:
            more = F.pad(x, pad).contiguous(memory_format=torch.channels_last)
            return torch.cudnn_convolution_relu(more, wide, bias, stride, (k // 2, k // 2), (1, 1), 1)

        found["dense conv+bias+relu, padded"] = milliseconds(padded)
    found["dense conv"] = milliseconds(lambda: F.conv2d(x, weight, None, stride, k // 2))
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
            row["tiles"][name] = {**milliseconds(run), "error": error, "right": error < 1e-2, "plan": str(tile)}
        except Exception as failure:  # a tile that fails says so and the rest go on
            row["tiles"][name] = {"failed": repr(failure)[:300]}
    try:
        row["rivals"] = rivals(layer, x, problem.bytes)
    except Exception as failure:
        row["rivals"] = {"failed": repr(failure)[:300]}
    return row


def try_alone(names: list[str], batch: int) -> None:
    """Child process: run each `layer/tile` once, and report it."""
    for name in names:
        layer, tile_name = name.split("/")
        print("trying", name, flush=True)
        x, weights, bias, options = make(BY_NAME[layer], batch)
        problem = describe(x, weights, **options)
        try:
            if tile_name == "backward":
                run_backward(x, weights, options)
            else:
                runner(problem, x, weights, bias, tiles_of(problem)[tile_name])()
            torch.cuda.synchronize()
            print("ran", name, flush=True)
        except Exception as failure:
            print("failed", name, repr(failure)[:300], flush=True)
            if "CUDA error" in repr(failure) or "illegal" in repr(failure):
                return


def planned(layers: list[Layer], batch: int, backward: bool) -> list[str]:
    names = [f"{layer.name}/backward" for layer in layers] if backward else []
    for layer in layers:
        x, weights, _, options = make(layer, 1)
        problem = describe(x.expand(batch, -1, -1, -1), weights, **options)
        names += [f"{layer.name}/{tile}" for tile in tiles_of(problem)]
    return names


def add_backward(row: dict[str, Any], layer: Layer, batch: int) -> None:
    """Measure the gradients with the best forward plan, into the row, and print their times."""
    try:
        x, weights, bias, options = make(layer, batch)
        plan = best_plan(row) or next(iter(tiles_of(describe(x, weights, **options)).values()))
        row["backward"] = measure_backward(plan, x, weights, bias, options, layer.kernel)
    except Exception as failure:
        row["backward"] = {"failed": repr(failure)[:300]}
    show_backward(row["backward"])


def best_plan(row: dict[str, Any]) -> KernelPlan | None:
    right = [tile for tile in row["tiles"].values() if tile.get("right")]
    return KernelPlan.parse(min(right, key=lambda tile: tile["ms"])["plan"]) if right else None


def write_presets(results: dict[str, Any], path: Path, batch: int) -> None:
    """Put the fastest plan of every layer, and the fastest tiles of its gradients, into the package's table."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    major, minor = torch.cuda.get_device_capability()
    shapes = stored.setdefault(f"{major}.{minor}", {})
    for name, row in results["layers"].items():
        x, weights, _, options = make(BY_NAME[name], 1)
        shape = shape_of(describe(x.expand(batch, -1, -1, -1), weights, **options))
        plan, back = best_plan(row), row.get("backward", {})
        found = {"forward": str(plan)} if plan else {}
        found |= (
            {"input": str(KernelPlan("tiled", Tile(**back["input, plain"]["tile"])))}
            if "input, plain" in back
            else {}
        )
        shapes[shape] = {**shapes.get(shape, {}), **found}
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def show(layer: Layer, row: dict[str, Any]) -> None:
    """One line per layer for its best tile, the rival and the floor, then every tile."""
    times = {name: t["ms"] for name, t in row["tiles"].items() if "ms" in t and t["right"]}
    rival = row["rivals"].get("dense conv+bias+relu", {}).get("ms", float("nan"))
    pool = row["rivals"].get("max-pool", {}).get("ms", 0.0)
    best = min(times, key=times.__getitem__, default=None)
    ours = times[best] if best else float("nan")
    rate = 2 * row["macs"] / ours / 1e9
    print(f"{layer.name:16} {ours:7.3f} ms {rate:5.0f} TFLOP/s  floor {row['floor_ms']:.3f}", end="  ")
    copy = row["rivals"].get("copy", {}).get("ms", float("nan"))
    print(f"copy {copy:.3f}  dense {rival:.3f}+{pool:.3f}  {best}")
    for name, tile in row["tiles"].items():
        wrong = "" if tile.get("right", False) else f"  WRONG {tile.get('error', tile.get('failed'))}"
        print(f"    {name:36} {tile.get('ms', float('nan')):7.3f}{wrong}")


def main() -> None:
    made = parser(__doc__, "gpu_kernels.json")
    made.add_argument("--layers", default="", help="comma-separated beginnings of layer names; all if empty")
    made.add_argument("--batch", type=int, default=256)
    made.add_argument("--budget", type=float, default=300, help="seconds in all")
    made.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    made.add_argument("--backward", action="store_true", help="time the gradients as well")
    made.add_argument("--presets", type=Path, help="the package's table of fastest plans, to bring up to date")
    made.add_argument("--try", dest="alone", default="", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.alone:
        try_alone(options.alone.split(","), options.batch)
        return
    start = time.monotonic()
    wanted = tuple(options.layers.split(",")) if options.layers else ("",)
    layers = [layer for layer in LAYERS if layer.name.startswith(wanted)]
    names = planned(layers, options.batch, options.backward)
    ran, failed = try_all(
        "benchmarks.gpu_kernels", names, options.batch, options.jobs, start + 0.6 * options.budget
    )
    spent = time.monotonic() - start
    print(f"{len(ran)} tiles ran, {len(failed)} failed, {spent:.0f} s", *failed.items(), sep="\n  ")
    results: dict[str, Any] = {"environment": environment(), "ceilings": asdict(limits())}
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
            add_backward(row, layer, options.batch)
        write_record(options.out, "gpu-kernels", **results)
    if options.presets:
        write_presets(results, options.presets, options.batch)


if __name__ == "__main__":
    main()
