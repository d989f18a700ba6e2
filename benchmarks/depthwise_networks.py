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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import timm
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


def inference(name: str, batch: int) -> dict[str, Any]:
    """Milliseconds by the compiler and by `optimize`, and the form that this chose."""
    network: Any = built(name).cuda().bfloat16().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    x = images(batch).bfloat16()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):  # type: ignore[attr-defined]
        compiled = torch.compile(network)
        ours = lr.optimize(network, x, cache=False, budget=90)
        graph = captured(lambda: compiled(x))
        rows = {"torch": milliseconds(graph.replay), "ours": milliseconds(lambda: ours(x))}
    return {**rows, "form": ours.report.choice}


def training_by_torch(name: str) -> float:
    network: Any = built(name).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    x, labels = images(BATCH), torch.randint(CLASSES, (BATCH,), device="cuda")
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
    row: dict[str, Any] = {"network": name}
    ways = {
        "inference": lambda: inference(name, BATCH),
        "one image": lambda: inference(name, 1),
        "step": lambda: {"torch": training_by_torch(name), "ours": training_by_us(name)},
    }
    for what, way in ways.items():
        try:
            row[what] = way()
        except Exception as error:  # one way that fails leaves the others
            row[what] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(name, what, row[what], flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return row


def alone(name: str, limit: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.depthwise_networks", "--one", name, "--out", str(path)]
        try:
            subprocess.run(command, timeout=limit, check=True)
        except subprocess.SubprocessError as error:
            return {"network": name, "error": str(error)[-200:]}
        return json.loads(path.read_text())


def main() -> None:
    arguments = parser(__doc__, "depthwise_networks.json")
    arguments.add_argument("--only", default=",".join(NETWORKS))
    arguments.add_argument("--one", help="measure this network in this process")
    arguments.add_argument("--warm", action="store_true")
    arguments.add_argument("--limit", type=int, default=300, help="seconds of a network")
    options = arguments.parse_args()
    if options.one:
        options.out.write_text(json.dumps(measured(options.one)))
        return
    names = options.only.split(",")
    with ThreadPoolExecutor(len(names) if options.warm else 1) as pool:
        rows = list(pool.map(lambda name: alone(name, options.limit), names))
    if not options.warm:
        write_record(options.out, "depthwise-networks", by_line="networks", batch=BATCH, networks=rows)


if __name__ == "__main__":
    run_command(main)
