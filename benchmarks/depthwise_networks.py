"""Networks with depthwise convs: torch.compile against `optimize` and `fit`, bf16, on one GPU.

    python -m benchmarks.depthwise_networks [--only convnext_tiny]

Inference is timed with 256 images and with one, and a training step with 256. The rival is torch.compile with
frozen weights and cuDNN's fastest convs, and its training step, each recorded as a CUDA graph. Ours are `optimize`
as it is, and the step of `fit` with `compile=True`. Each of the three has a process of its own: they compile at
once, and time in turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import timm  # pyright: ignore[reportMissingImports]
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lowrank_cnn as lr
from benchmarks.common import parser, run_command, write_record
from benchmarks.train_speed import keeping_graphs
from lowrank_cnn.core.environment import environment
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.train.recipe import Recipe

NETWORKS = (
    "inception_next_tiny", "convnext_tiny", "convnext_tiny bands", "mobilenetv4_conv_medium", "efficientnet_b0",
    "convnextv2_tiny",
)  # fmt: skip
BATCH, CLASSES = 256, 1000
READY, TOGETHER = "ready to be timed", 3
"""More networks at once would not fit into the memory of one GPU."""


class Ready(NamedTuple):
    """What is compiled and waits to be timed: by name, and what else the record says."""

    runs: dict[str, Callable[[], Any]]
    about: dict[str, Any]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    name, _, scheme = name.partition(" ")
    network = timm.create_model(name)
    return lr.convert(network, scheme) if scheme else network


def timed(runs: dict[str, Callable[[], Any]], repeats: int = 21) -> dict[str, float]:
    """Median milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-3, repeats):
        for name, run in runs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times[name] += [start.elapsed_time(stop)] if repeat >= 0 else []
    return {name: round(median(found), 3) for name, found in times.items()}


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)


def inference(network: nn.Module, x: Tensor) -> Ready:
    """The network by the compiler and by `optimize`, and the form that this chose."""
    ours, form = optimized_inference(network, x)
    return Ready({"torch": compiled_inference(network, x), "ours": ours}, {"form": form})


def compiled_inference(network: nn.Module, x: Tensor) -> Callable[[], Any]:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):  # type: ignore[attr-defined]
        compiled = torch.compile(network)
        return captured(lambda: compiled(x)).replay


def optimized_inference(network: nn.Module, x: Tensor) -> tuple[Callable[[], Any], str]:
    with torch.no_grad():
        ours = lr.optimize(network, x, cache=False, budget=90)

    def run() -> None:
        with torch.no_grad():
            ours(x)

    return run, ours.report.choice


def ready(name: str) -> nn.Module:
    return built(name).cuda().bfloat16().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]


def training_by_torch(network: nn.Module, x: Tensor, classes: int = CLASSES) -> Callable[[], Any]:
    labels = torch.randint(classes, (len(x),), device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True, capturable=True)
    compiled = torch.compile(network)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(compiled(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return captured(step).replay


def training_by_us(name: str) -> Callable[[], Any]:
    some = TensorDataset(torch.randn(2 * BATCH, 3, 224, 224), torch.randint(CLASSES, (2 * BATCH,)))
    recipe = Recipe(epochs=1, batch_size=BATCH, optimizer="adamw", lr=1e-4)
    with keeping_graphs() as kept:
        lr.fit(built(name), (some, some), recipe, compile=True, progress=False, workers=0)
    step = kept[0]  # the graph alone would not keep the weights
    return lambda: step.graph.replay()


def measured(name: str) -> dict[str, Callable[[], Ready]]:
    def step() -> Ready:
        network: Any = built(name).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        return Ready({"torch": training_by_torch(network, images(BATCH)), "ours": training_by_us(name)}, {})

    return {
        "inference": lambda: inference(ready(name), images(BATCH).bfloat16()),
        "one image": lambda: inference(ready(name), images(1).bfloat16()),
        "step": step,
    }


def times_of(way: Callable[[], Ready]) -> dict[str, Any]:
    """The times of one way to run a network: it is compiled, and timed when told to."""
    try:
        runs, about = way()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    print(READY, flush=True)
    sys.stdin.readline()
    return timed(runs) | about


class Measuring:
    """The process of one way to run a network. It compiles at once, and times when `times` is called."""

    def __init__(self, module: str, name: str, way: str, folder: Path) -> None:
        self.name, self.way, self.path = name, way, folder / f"{name} {way}.json".replace(" ", "-")
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            "--one",
            name,
            "--way",
            way,
            "--out",
            str(self.path),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.compiled = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if READY in line:
                self.compiled.set()
        self.compiled.set()  # it has ended

    def times(self) -> dict[str, Any]:
        """The times, if it is compiled; a process that is not is stopped."""
        if not self.compiled.is_set():
            self.process.kill()
            return {"error": "not compiled in time"}
        try:
            self.process.communicate("go\n", timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
        return json.loads(self.path.read_text()) if self.path.exists() else {"error": "failed"}


def measure_all(
    text: str | None,
    module: str,
    names: Sequence[str],
    ways: Callable[[str], dict[str, Callable[[], Ready]]],
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda times: times,
    **about: Any,
) -> None:
    """The command of a benchmark with a process for each way to run a network; `about` goes into the record."""
    arguments = parser(text, f"{module}.json")
    arguments.add_argument("--only", default=",".join(names))
    arguments.add_argument("--one", help="measure this network in this process")
    arguments.add_argument("--way", help="of the ways to run it, this one")
    arguments.add_argument("--limit", type=int, default=300, help="seconds to compile")
    options = arguments.parse_args()
    if options.one:
        torch.backends.cudnn.benchmark = True  # the rival gets torch's fastest convs
        options.out.write_text(json.dumps(finish(times_of(ways(options.one)[options.way]))))
        return
    rows, every, names = [], list(names), options.only.split(",")
    now, known = environment(), json.loads(options.out.read_text()) if options.out.exists() else {"networks": []}
    before = {row["network"]: row for row in known["networks"]}
    for first in range(0, len(names), TOGETHER):
        deadline = time.monotonic() + options.limit
        together = names[first : first + TOGETHER]
        with tempfile.TemporaryDirectory() as folder:
            started = [Measuring(module, name, way, Path(folder)) for name in together for way in ways(name)]
            for one in started:  # nothing is timed while another compiles
                one.compiled.wait(max(0.0, deadline - time.monotonic()))
            late = [one for one in started if not one.compiled.is_set()]
            times = {one: one.times() for one in (*late, *(one for one in started if one not in late))}
        for name in together:
            own = {one.way: times[one] | {"commit": now["commit"]} for one in started if one.name == name}
            print({"network": name, **own}, file=sys.stderr, flush=True)
            rows.append({"network": name, **kept_times(own, before.get(name, {}))})
    rows += [row for name, row in before.items() if name not in names]
    rows.sort(key=lambda row: every.index(row["network"]))
    used = {times.get("commit") for row in rows for times in row.values() if isinstance(times, dict)}
    earlier = [one for one in known.get("environments", []) if one["commit"] in used - {now["commit"]}]
    about |= {"environment": now, "environments": [*earlier, now]}
    write_record(options.out, module.replace("_", "-"), by_line="networks", **about, networks=rows)


def kept_times(own: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The times of one network. What was not ready keeps its earlier times and their commit, if there are any."""
    return {way: earlier[way] if "error" in times and way in earlier else times for way, times in own.items()}


def main() -> None:
    measure_all(__doc__, "depthwise_networks", NETWORKS, measured, batch=BATCH)


if __name__ == "__main__":
    run_command(main)
