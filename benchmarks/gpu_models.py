"""Today's networks on a GPU: low rank against the fastest dense network and the thinner one of equal MACs.

    python -m benchmarks.gpu_models --out benchmarks/results/gpu_models.json [--only resnet18/lr]

Everything of ours is measured through the public calls: `lr.optimize` for inference and `lr.fit` for training.
The rivals are dense: torch.compile with freezing, replayed as a CUDA graph, and `fit` with the compiler and
without our kernels. The thinner dense network goes through `optimize` and `fit` as well, which give it the faster
of our kernels and the compiler's. Its channels are rounded to multiples of 16, nearest to equal MACs, and of 64,
which kernels prefer. Images are 224 x 224 in bf16, channels_last. All ways of one row are timed in
turns in one process, and each call pays for copying its input, as a user's would.

Each row is measured by a process of its own, alone on the device. The record is written after each way, so that a
run that is killed keeps what it has measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from benchmarks.common import earlier_runs, parser, write_runs
from lowrank_cnn.core.clock import measure
from lowrank_cnn.core.environment import environment
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.kernels.cuda_graph import recorded
from lowrank_cnn.kernels.device import forced

KIND = "gpu-models"
ROWS = (
    "lowrank:vgg11-gmp/lr",
    "torchvision:resnet18/lr",
    "torchvision:resnet18/lr-join",
    "torchvision:resnet34/lr",
    "torchvision:resnet50/lr",
    "torchvision:wide_resnet50_2/lr",
    "timm:repvgg_b1/lr",
    "timm:darknet53/lr",
)
SIZE = (3, 224, 224)
CLASSES = 1000
TRAIN_IMAGES, TRAIN_BATCH, EPOCHS = 4096, 256, 4

Found = dict[str, Any]


def main() -> None:
    options = _arguments()
    if options.child:
        _measure_row(options.child, options, lambda found: print(json.dumps(found), flush=True))
        return
    began = time.monotonic()
    rows = [row for row in ROWS if any(fnmatch(row, f"*{asked}") for asked in options.only.split(","))]
    run: dict[str, Any] = {"environment": environment(), "rows": []}
    before = earlier_runs(options.out, KIND)
    for row in rows:
        run["rows"].append({"row": row})
        for found in _measured(row, options):
            run["rows"][-1] = found
            write_runs(options.out, KIND, [*before, run])
        print(_line(run["rows"][-1]), flush=True)
    print(f"{time.monotonic() - began:.0f} s in all")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "gpu_models.json")
    made.add_argument("--only", default="", help="how names of rows end, comma-separated: resnet18/lr")
    made.add_argument("--modes", default="inference,batch1,training")
    made.add_argument("--repeats", type=int, default=21)
    made.add_argument("--limit", type=float, default=240, help="seconds for one row")
    made.add_argument("--thin", default="16,64", help="multiples of the thin networks' channels")
    made.add_argument("--child", default="", help=argparse.SUPPRESS)
    return made.parse_args()


def _started(row: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_models", "--child", row, "--modes", options.modes]
    command += ["--repeats", str(options.repeats), "--thin", options.thin]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _measured(row: str, options: argparse.Namespace) -> Iterator[Found]:
    """The measurements of a child process so far, after each way; at the end also why it stopped early."""
    child = _started(row, options)
    began, timer = time.monotonic(), threading.Timer(options.limit, child.kill)
    timer.start()
    found: Found = {"row": row}
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            found = json.loads(line)
            yield found
    timer.cancel()
    if child.wait():
        late = time.monotonic() - began >= options.limit
        why = f"took more than {options.limit:.0f} s" if late else f"exit code {child.returncode}"
        yield {**found, "failed": why}


def _measure_row(row: str, options: argparse.Namespace, tell: Callable[[Found], None]) -> None:
    """Measure one network and scheme, and report after each measurement."""
    name, scheme = row.split("/")
    torch.manual_seed(0)
    dense = created(name)
    low = lr.convert(dense, scheme)
    macs = {"dense": lr.count(dense, SIZE).macs, "low-rank": lr.count(low, SIZE).macs}
    networks = {"dense": dense, "low-rank": low}
    share = macs["low-rank"] / macs["dense"]
    for multiple in map(int, filter(None, options.thin.split(","))):
        try:
            thin = lr.thin(dense, macs=share, input_size=SIZE, multiple=multiple)
        except lr.LowRankError as error:
            print(f"no thin rival: {error}", file=sys.stderr)
            continue
        kind = "thin" if multiple == 16 else f"thin in {multiple}s"
        networks[kind], macs[kind] = thin, lr.count(thin, SIZE).macs
    found: Found = {"row": row, "macs": macs}
    parts: dict[str, Callable[[], Iterator[Found]]] = {
        "inference": lambda: _inference(networks, 256, options.repeats),
        "batch1": lambda: _inference(networks, 1, options.repeats),
        "training": lambda: _training(networks),
    }
    for mode in options.modes.split(","):
        try:
            for part in parts[mode]():
                found[mode] = part
                tell(found)
        except Exception as error:  # one mode that fails leaves the others
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            found[mode] = {**found.get(mode, {}), "failed": why}
            tell(found)


def created(name: str) -> nn.Module:
    """A network of ours, torchvision or timm; RepVGG as it is deployed, its branches merged."""
    library, _, model = name.partition(":")
    if library == "lowrank":
        return lr.create_model(model, norm="batch")
    if library == "torchvision":
        return import_module("torchvision.models").get_model(model)
    reparameterize = import_module("timm.utils.model").reparameterize_model
    return reparameterize(import_module("timm").create_model(model))


def _inference(networks: dict[str, nn.Module], batch: int, repeats: int) -> Iterator[Found]:
    """How each network was optimised, and its error; last, the time of a batch by every way, in turns."""
    x = torch.randn((batch, *SIZE), device="cuda", dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    ways: dict[str, Callable[[Tensor], Tensor]] = {}
    report: Found = {"tuning_seconds": {}, "choice": {}, "error": {}, "refused": {}, "variants": {}}
    for kind, network in networks.items():
        ready = _deployed(network)
        if kind == "dense":
            ways["dense, torch.compile"] = _compiled(ready, x)
        report["tuning_seconds"][kind], fast = _timed(lambda net=ready: lr.optimize(net, x))
        if kind == "low-rank":
            report["cached_seconds"], _ = _timed(lambda net=ready: lr.optimize(net, x))
        report["choice"][kind] = fast.report.choice
        report["refused"][kind] = fast.report.failed
        report["variants"][kind] = {name: time.ms for name, time in fast.report.times.items()}
        report["error"][kind] = _error(fast, network, x)
        ways[f"{kind}, optimize"] = fast
        yield report
    with torch.no_grad():
        times = measure({way: lambda run=run: run(x) for way, run in ways.items()}, repeats=repeats, cuda=True)
    yield report | {"ms": {way: asdict(sample) for way, sample in times.items()}}


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def _deployed(network: nn.Module) -> nn.Module:
    network = network.cuda().eval().to(torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.requires_grad_(False)


def _compiled(network: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The rival: torch.compile with freezing, without our kernels, replayed as a CUDA graph.

    It compiles a copy: the weights become constants of the graph, and `_error` moves those of the network.
    """
    with _freezing(), forced("off"), torch.no_grad():
        run = torch.compile(copy.deepcopy(network), dynamic=False)
        run(x)
        return recorded(run, x.contiguous(memory_format=torch.channels_last))


@contextmanager
def _freezing() -> Iterator[None]:
    import torch._inductor.config as inductor

    before = inductor.freezing
    inductor.freezing = True
    try:
        yield
    finally:
        inductor.freezing = before


def _error(fast: nn.Module, network: nn.Module, x: Tensor) -> dict[str, float]:
    """Distance from float64, relative to it: of ours, and of torch's own layers in bf16 for comparison."""
    with torch.no_grad(), forced("off"):
        plain = network(x).double()
        exact = network.double()(x.double())
        network.to(torch.bfloat16)
    with torch.no_grad():
        ours = fast(x).double()
    return {kind: float((y - exact).norm() / exact.norm()) for kind, y in (("ours", ours), ("torch", plain))}


def _training(networks: dict[str, nn.Module]) -> Iterator[Found]:
    """Milliseconds of a step within `fit`, input included: the median epoch after the first.

    Only runs of ten minutes or more measure whether compiling pays; for these short ones it is set.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (TRAIN_IMAGES, *SIZE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (TRAIN_IMAGES,), generator=generator)
    names = tuple(map(str, range(CLASSES)))
    split = ResidentSplit.of(images, labels)
    data = Data("random", names, split, split.subset(torch.arange(256)))
    recipe = lr.get_recipe("modern", batch_size=TRAIN_BATCH, crop=SIZE[1], pad=0, cutout=0, ema=0.0)
    found: Found = {}
    for kind, network in networks.items():
        ways = {"fit": "auto", "torch.compile": "off"} if kind == "dense" else {"fit": "auto"}
        for way, kernels in ways.items():
            network.float().train().requires_grad_(True)
            compiled = way == "torch.compile"
            with forced(kernels):
                record = lr.fit(network, data, recipe, epochs=EPOCHS, progress=False, compile=compiled)
            rates = [row["images_per_second"] for row in record.history[1:]]
            ms = sorted(1e3 * TRAIN_BATCH / rate for rate in rates)
            found[f"{kind}, {way}"] = {"ms": median(ms), "low": ms[0], "high": ms[-1], "runs": len(ms)}
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            yield {"ms": found}


def _line(found: dict[str, Any]) -> str:
    """One row for people: each mode's times over the dense network by torch.compile."""
    text = found["row"] + (f" failed: {found['failed']}" if "failed" in found else "")
    for mode in ("inference", "batch1", "training"):
        times = found.get(mode, {}).get("ms")
        if not times:
            text += f"\n  {mode}: {found.get(mode, {}).get('failed', 'not measured')}"
            continue
        rival = times.get("dense, torch.compile", next(iter(times.values())))["ms"]
        ways = (f"{way} {time['ms']:.3f} ms ({time['ms'] / rival:.2f})" for way, time in times.items())
        text += f"\n  {mode}: " + "; ".join(ways)
        if "choice" in found[mode]:
            text += f"\n    chosen: {found[mode]['choice']}, tuning s: " + str(
                {kind: round(seconds) for kind, seconds in found[mode]["tuning_seconds"].items()}
            )
    return text


if __name__ == "__main__":
    main()
