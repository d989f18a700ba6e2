"""Networks with depthwise convs: torch.compile against `optimize` and `fit`, bf16, on one GPU.

    python -m benchmarks.depthwise_networks [--only convnext_tiny] [--warm]

Inference is timed with 256 images and with one, and a training step with 256. The rival is torch.compile with
frozen weights, and its training step, each recorded as a CUDA graph. Ours are `optimize` as it is, and the step of
`fit` with `compile=True`. Every network has a process of its own. `--warm` runs all of them at once and keeps
nothing: the compilers' caches are full after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import timm  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lowrank_cnn as lr
from benchmarks.common import parser, run_command, write_record
from benchmarks.train_speed import keeping_graphs, replay_seconds
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.train.recipe import Recipe

NETWORKS = (
    "inception_next_tiny", "convnext_tiny", "convnext_tiny bands", "mobilenetv4_conv_medium", "efficientnet_b0",
    "convnextv2_tiny",
)  # fmt: skip
BATCH, CLASSES = 256, 1000


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    name, _, scheme = name.partition(" ")
    network = timm.create_model(name)
    return lr.convert(network, scheme) if scheme else network


def milliseconds(run: Callable[[], Any], repeats: int = 21) -> float:
    times = []
    for repeat in range(-3, repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times += [start.elapsed_time(stop)] if repeat >= 0 else []
    return round(median(times), 3)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)


def inference(network: nn.Module, x: Tensor) -> dict[str, Any]:
    """Milliseconds by the compiler and by `optimize`, and the form that this chose."""
    return {"torch": compiled_inference(network, x), **optimized_inference(network, x)}


def compiled_inference(network: nn.Module, x: Tensor) -> float:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):  # type: ignore[attr-defined]
        compiled = torch.compile(network)
        return milliseconds(captured(lambda: compiled(x)).replay)


@torch.no_grad()
def optimized_inference(network: nn.Module, x: Tensor) -> dict[str, Any]:
    ours = lr.optimize(network, x, cache=False, budget=90)
    return {"ours": milliseconds(lambda: ours(x)), "form": ours.report.choice}


def ready(name: str) -> nn.Module:
    return built(name).cuda().bfloat16().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]


def training_by_torch(network: nn.Module, x: Tensor, classes: int = CLASSES) -> float:
    labels = torch.randint(classes, (len(x),), device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True, capturable=True)
    compiled = torch.compile(network)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(compiled(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return milliseconds(captured(step).replay)


def training_by_us(name: str) -> float:
    some = TensorDataset(torch.randn(2 * BATCH, 3, 224, 224), torch.randint(CLASSES, (2 * BATCH,)))
    recipe = Recipe(epochs=1, batch_size=BATCH, optimizer="adamw", lr=1e-4)
    with keeping_graphs() as kept:
        lr.fit(built(name), (some, some), recipe, compile=True, progress=False, workers=0)
    return round(1e3 * replay_seconds(kept[0], 30), 3)


def measured(name: str) -> dict[str, Any]:
    def step() -> dict[str, float]:
        network: Any = built(name).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        return {"torch": training_by_torch(network, images(BATCH)), "ours": training_by_us(name)}

    ways = {
        "inference": lambda: inference(ready(name), images(BATCH).bfloat16()),
        "one image": lambda: inference(ready(name), images(1).bfloat16()),
        "step": step,
    }
    return row_of(name, ways)


def row_of(name: str, ways: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """The row of a network: one way that fails leaves the others."""
    row: dict[str, Any] = {"network": name}
    for what, way in ways.items():
        try:
            row[what] = way()
        except Exception as error:
            row[what] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(name, what, row[what], flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return row


def alone(module: str, name: str, limit: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", "--one", name, "--out", str(path)]
        try:
            subprocess.run(command, timeout=limit, check=True)
        except subprocess.SubprocessError as error:
            return {"network": name, "error": str(error)[-200:]}
        return json.loads(path.read_text())


def measure_all(
    text: str | None, module: str, names: Sequence[str], measure: Callable[[str], dict[str, Any]], **about: Any
) -> None:
    """The command of a benchmark with a process for each network; `about` goes into the record."""
    arguments = parser(text, f"{module}.json")
    arguments.add_argument("--only", default=",".join(names))
    arguments.add_argument("--one", help="measure this network in this process")
    arguments.add_argument("--warm", action="store_true")
    arguments.add_argument("--limit", type=int, default=300, help="seconds of a network")
    options = arguments.parse_args()
    if options.one:
        options.out.write_text(json.dumps(measure(options.one)))
        return
    asked = options.only.split(",")
    with ThreadPoolExecutor(len(asked) if options.warm else 1) as pool:
        rows = list(pool.map(lambda name: alone(module, name, options.limit), asked))
    if not options.warm:
        kind = module.replace("_", "-")
        write_record(options.out, kind, by_line="networks", **about, networks=rows)


def main() -> None:
    measure_all(__doc__, "depthwise_networks", NETWORKS, measured, batch=BATCH)


if __name__ == "__main__":
    run_command(main)
