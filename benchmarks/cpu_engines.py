"""Dense, thin dense and low-rank networks in the engines that people deploy with, on the CPU, batch 1.

    python -m benchmarks.cpu_engines prepare                            # writes the files of all engines, once
    python -m benchmarks.cpu_engines time --threads 2 --family vgg11-gmp # times them in turns, adds to the record
    python -m benchmarks.cpu_engines time --threads 2 --missing          # times what the record lacks
    python -m benchmarks.cpu_engines show                               # the fastest of each, and the ratios

`prepare` exports every network to every engine in fp32, fp16 and int8 through `lr.export` and `lr.quantize`, which
compare each file with the network. A file holds a network for one image of one size. int8 is calibrated on a
random image, which does not affect times. `onnx-strips` is ONNX Runtime with the compiled strips of native/, only
in float. `time` opens the files by `open_engine`, and also times torch: eager, compiled, and after `lr.optimize`.
Each engine has a process of its own, because idle threads of one engine spin and slow the next; its networks run
in turns. The record holds medians and quartiles. A row is rejected, independently of its times, only if other
processes used the CPU meanwhile, or if the engine used more threads than it was given. The thin dense network has
the MACs of the low-rank one (`lr.thin`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.clock import measure, torch_threads
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import write_json
from lowrank_cnn.deploy.engines.targets import open_engine

RESULTS = Path(__file__).parent / "results" / "cpu_engines.json"
FAMILIES = {
    "vgg11-gmp": "vgg11-gmp-lr",
    "nin": "nin-c3-lr",
    "resnet18": "resnet18-lr",
    "convnext": "convnext-bands",
}
"""Dense networks and their low-rank twins."""
WAYS = ("dense", "thin", "low-rank")
STRIPS = "onnx-strips"
"""ONNX Runtime with the compiled strips of native/, which low-rank networks have."""
ENGINES = {
    "onnxruntime": ".onnx",
    "openvino": ".xml",
    "ncnn": ".param",
    "mnn": ".mnn",
    "litert": ".tflite",
    "executorch": ".pte",
    STRIPS: ".onnx",
}
TORCH = ("torch", "torch.compile", "lr.optimize")
"""Timed in fp32, from the network itself."""
PACKAGES = (
    "onnxruntime",
    "openvino",
    "nncf",
    "ncnn",
    "pnnx",
    "MNN",
    "ai-edge-litert",
    "executorch",
    "torchao",
    "torch",
)
PRECISIONS = ("fp32", "fp16", "int8")
REST, WARM, FEWEST_WARM = 0.05, 0.03, 2
"""Before each timed run: seconds for threads to fall asleep, then seconds and least number of runs not timed.

Threads that wake up share a core for some milliseconds, until the system moves one of them to another.
"""
MOST_OTHERS = 0.05
"""Cores that other processes may use while networks are timed, and that an engine may use beyond its threads."""


def network(family: str, way: str) -> nn.Module:
    """One of the three networks of a family, batch norms folded, with fresh weights."""
    torch.manual_seed(0)
    dense = lr.create_model(family).eval()
    low_rank = lr.create_model(FAMILIES[family]).eval()
    if way == "low-rank":
        return lr.merge(low_rank)
    if way == "dense":
        return lr.merge(dense)
    size = dense.input_size
    share = lr.count(low_rank, size).macs / lr.count(dense, size).macs
    return lr.merge(lr.thin(dense, macs=share, input_size=size).eval())


def size_of(family: str) -> tuple[int, ...]:
    return tuple(lr.create_model(family).input_size)


def place(folder: Path, family: str, way: str, engine: str, precision: str) -> Path:
    return folder / f"{family}.{way}.{engine}.{precision}{ENGINES[engine]}"


def prepare(options: argparse.Namespace) -> None:
    """Write every missing file; if an engine refuses, note the reason."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for family in options.family:
        for way in options.ways:
            net = network(family, way)
            for engine in (engine for engine in options.engines if engine in ENGINES):
                for precision in options.precisions:
                    path = place(options.folder, family, way, engine, precision)
                    if not path.exists() and not path.with_suffix(".refused").exists():
                        write(net, size_of(family), path, precision)


def write(net: nn.Module, size: tuple[int, ...], path: Path, precision: Any) -> None:
    start = time.perf_counter()
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"dynamic": (), "overwrite": True}
    try:
        if precision == "int8" and f".{STRIPS}." not in path.name:
            error = lr.quantize(net, image, path, **how).error
        else:
            how |= {"precision": precision, "strips": f".{STRIPS}." in path.name}
            error = lr.export(net, path, example_input=image, **how).error
        print(f"{path.name}: off by {error:.1e}, {time.perf_counter() - start:.0f} s", flush=True)
    except LowRankError as why:
        path.with_suffix(".refused").write_text(str(why))
        print(f"{path.name}: {why}", flush=True)


def runs_of(family: str, precision: str, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Every way to run a family in a precision, by "network|engine"; with --missing, those without a row."""
    image = torch.randn(1, *size_of(family), generator=torch.Generator().manual_seed(1))
    pixels = image.numpy()
    where = {"family": family, "precision": precision, "threads": options.threads}
    rows = recorded(options.out) if options.missing else []
    found: dict[str, Callable[[], object]] = {}
    for way, engine in ((way, engine) for way in options.ways for engine in options.engines):
        if best(rows, network=way, engine=engine, **where):
            continue
        if engine in TORCH and precision == "fp32":
            found[f"{way}|{engine}"] = torch_run(network(family, way), image, engine)
        elif engine in ENGINES and (path := place(options.folder, family, way, engine, precision)).exists():
            runner = open_engine(path, threads=options.threads)
            found[f"{way}|{engine}"] = lambda r=runner: r(pixels)
    return found


def torch_run(net: nn.Module, image: torch.Tensor, how: str) -> Callable[[], object]:
    """A call of the network after `lr.optimize`, or in channels_last, eager or compiled."""
    if how == "lr.optimize":
        fast = lr.optimize(net, image, compile=False, cache=False)
        return lambda: fast(image)
    last = torch.channels_last
    net, image = net.to(memory_format=last), image.contiguous(memory_format=last)  # type: ignore[call-overload]
    run: Any = torch.compile(net, options={"freezing": True}, dynamic=False) if how == "torch.compile" else net
    return lambda: run(image)


def time_engines(options: argparse.Namespace) -> None:
    """Time every engine in a process of its own.

    The number of threads is in its environment: torch's convs on Arm ignore `torch.set_num_threads`.
    """
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    for engine in options.engines:
        own = argparse.Namespace(**{**vars(options), "engines": [engine]})
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            process.submit(time_families, own).result()


@torch.no_grad()
def time_families(options: argparse.Namespace) -> None:
    """Add rows to the record, in place of earlier ones of the same way to run."""
    for family in options.family:
        macs = {way: lr.count(network(family, way), size_of(family)).macs for way in options.ways}
        for precision in options.precisions:
            with torch_threads(options.threads):
                runs = runs_of(family, precision, options)
                if not runs:
                    continue
                how = {"repeats": options.repeats, "budget": options.budget, "rest": REST, "warm": warm_runs(runs)}
                samples, own, others = cores_used(partial(measure, runs, **how))
            if why := refusal(options.threads, own, others):
                print(f"not recorded: {family} {precision}, {why}", flush=True)
                continue
            where = {"family": family, "precision": precision, "threads": options.threads}
            rows = []
            for key, sample in samples.items():
                way, engine = key.split("|")
                rows.append({**where, "network": way, "engine": engine, "macs": macs[way]})
                rows[-1] |= {**asdict(sample), "cores": round(own, 3), "others": round(others, 3)}
            add(options.out, rows)
            for row in sorted(rows, key=lambda row: row["ms"]):
                told = f"{row['ms']:8.2f} ({row['low']:.2f}-{row['high']:.2f})"
                print(f"{family:10} {precision} {row['network']:9} {row['engine']:14} {told}", flush=True)


def warm_runs(runs: Mapping[str, Callable[[], object]]) -> int:
    """How many runs warm up even the fastest of these."""
    fastest = min(sample.ms for sample in measure(runs, repeats=3).values())
    return max(FEWEST_WARM, math.ceil(1000 * WARM / fastest))


def cores_used(work: Callable[[], Any], *, patience: float = 30.0) -> tuple[Any, float, float]:
    """The result of `work`, and how many cores this process and all others used meanwhile.

    Processes that this one has started may end first, for this many seconds: OpenVINO starts one that reports use.
    """
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=patience)
    start, own, before = time.perf_counter(), time.process_time(), busy_seconds()
    found = work()
    taken, own = time.perf_counter() - start, time.process_time() - own
    return found, own / taken, max(0.0, busy_seconds() - before - own) / taken


def refusal(threads: int, own: float, others: float) -> str:
    """Why times are rejected, by the cores that were used meanwhile; empty if they are recorded."""
    if others > MOST_OTHERS:
        return f"others used {others:.2f} cores"
    return f"it used {own:.2f} cores for {threads} threads" if own > threads + MOST_OTHERS else ""


def busy_seconds() -> float:
    """Seconds that all cores worked so far, for processes that have ended too."""
    times = psutil.cpu_times()._asdict()
    return sum(times[kind] for kind in ("user", "nice", "system", "irq", "softirq", "steal") if kind in times)


def recorded(path: Path) -> list[dict[str, Any]]:
    """The rows of the record so far."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def add(path: Path, rows: list[dict[str, Any]]) -> None:
    kept = recorded(path)
    names = ("family", "precision", "threads", "network", "engine")
    new = {tuple(row[name] for name in names) for row in rows}
    kept = [row for row in kept if tuple(row[name] for name in names) not in new]
    write_json(path, {"environment": environment(), "versions": versions(), "batch": 1, "rows": [*kept, *rows]})


def versions() -> dict[str, str]:
    """The versions of the engines and their converters."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def best(rows: list[dict[str, Any]], **where: Any) -> dict[str, Any] | None:
    """The fastest row of those that have these values."""
    chosen = [row for row in rows if all(row[key] == value for key, value in where.items())]
    return min(chosen, key=lambda row: row["ms"], default=None)


def show(options: argparse.Namespace) -> None:
    """The fastest engine of each network, and the low-rank network's ratio to the fastest dense and thin ones."""
    rows = recorded(options.out)
    for family in options.family:
        for threads in sorted({row["threads"] for row in rows}):
            for precision in PRECISIONS:
                where = {"family": family, "threads": threads, "precision": precision}
                found = {way: best(rows, network=way, **where) for way in WAYS}
                if any(row is None for row in found.values()):
                    continue
                ms = {way: row["ms"] for way, row in found.items() if row}
                told = ", ".join(f"{way} {row['ms']:.2f} ({row['engine']})" for way, row in found.items() if row)
                ratios = f"of dense {ms['low-rank'] / ms['dense']:.2f}, of thin {ms['low-rank'] / ms['thin']:.2f}"
                print(f"{family:10} {threads} threads {precision}: {told}; {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "time", "show"])
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--engines", nargs="+", default=[*ENGINES, *TORCH], choices=[*ENGINES, *TORCH])
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--budget", type=float, default=60, help="seconds for one family and precision")
    parser.add_argument("--missing", action="store_true", help="time only what the record has no row for")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "lowrank-cnn" / "engines")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    {"prepare": prepare, "time": time_engines, "show": show}[options.action](options)


if __name__ == "__main__":
    main()
