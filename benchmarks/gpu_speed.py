"""Whole networks on a GPU: ours against the fastest dense twin, with the MAC ratio and the floor.

    python -m benchmarks.gpu_speed --out benchmarks/results/gpu_speed.json [--networks vgg11-gmp-lr] [--budget 500]

Inference runs in bf16, a training step (forward, backward, SGD) under bf16 autocast; channels_last; every way is a
captured CUDA graph. The fastest dense twin is the best of torch.compile, max-autotune and cuDNN with bias and ReLU
inside (with and without padding the input channels) and the rest compiled. The dense network with our own kernels
has a column of its own. Child processes first compile in parallel, into the compilers' caches on disk; then this
process measures alone. `--only-compile` stops after compiling, which other work on the machine does not disturb.
Only max-autotune measures while it compiles: run `--compile autotune` on an idle GPU. Results are written after
each measurement; the file keeps its earlier runs, oldest first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common import parser
from benchmarks.gpu_book import TWINS, Book, Setting, compare, show
from benchmarks.gpu_floor import layers, limits
from benchmarks.gpu_ways import OURS, RIVALS, TRICKS, network, step_of
from lowrank_cnn.kernels.autotune.trial import times
from lowrank_cnn.kernels.autotune.tuned import Request

NETWORKS = [name for name in TWINS if name not in ("vgg11", "vgg11-gmp") and "/" not in name]
FIRST = ("vgg11-gmp-lr", "vgg11-gmp-lr-2x", "vgg11-gmp-lr-join")


def settings(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """The requested settings, the large batch first: networks within modes within batches."""
    for batch in options.batches:
        for mode in options.modes:
            for name in sorted(options.networks, key=lambda name: name not in FIRST):
                yield name, mode, batch


def dense_settings(options: argparse.Namespace) -> list[Setting]:
    """The rivals, each once: the longest to compile of every twin come last."""
    asked = list(settings(options))
    found = [
        Setting(TWINS[name], mode, batch, ways[mode][rank])
        for ways, ranks in ((RIVALS, (0, 1, 2)), (TRICKS, (0,)), (RIVALS, (3,)))
        for rank in ranks
        for name, mode, batch in asked
        if rank < len(ways[mode])
    ]
    return list(dict.fromkeys(found))


def tiles(options: argparse.Namespace) -> list[tuple[Any, bool]]:
    """Every conv that occurs, and whether it is trained; those of the networks asked for first."""
    asked = list(settings(options))
    names = [(name, mode, batch) for name, mode, batch in asked]
    names += [(TWINS[name], mode, batch) for name, mode, batch in asked]
    found = [(problem, mode == "training") for name, mode, batch in names for problem in layers(name, batch)[0]]
    return list(dict.fromkeys(found))


def compile_tiles(options: argparse.Namespace, shard: int, shards: int) -> None:
    """Child: run every plan of a share of the convs, as tuning will, only to fill Triton's cache."""
    from lowrank_cnn.kernels.conv.plans import plans

    capability = torch.cuda.get_device_capability()
    for problem, training in tiles(options)[shard::shards]:
        # Trained in float32 under autocast, run in bf16: so are the biases that kernels are compiled for.
        bias = torch.float32 if training else torch.bfloat16
        for plan in plans(problem, capability=capability):
            for purpose in (False, True)[: 1 + training]:
                times(Request(problem, torch.device("cuda"), purpose, bias=bias), plan, repeats=1)
        torch.cuda.empty_cache()


def compile_way(setting: Setting) -> None:
    """Child: take one step, only to fill the compiler's cache."""
    net = network(setting.network, setting.mode)
    step = step_of(net, setting.way, setting.mode, setting.batch)
    for _ in range(2):
        step()
    torch.cuda.synchronize()


def jobs(options: argparse.Namespace) -> list[str]:
    """The tasks of child processes, the longest first: max-autotune, then our kernels and the other rivals."""
    compiled = [setting for setting in dense_settings(options) if setting.way not in ("ours", "graph")]
    kinds = {
        "autotune": [str(setting) for setting in compiled if setting.way == "max-autotune"],
        "tiles": [f"tiles|{i}" for i in range(options.jobs)],
        "rivals": [str(setting) for setting in compiled if setting.way != "max-autotune"],
    }
    return [job for kind, found in kinds.items() if kind in options.compile for job in found]


def compile_all(options: argparse.Namespace, deadline: float) -> list[str]:
    """Run the children, this many at a time; stop those that miss the deadline, and name them."""
    waiting = jobs(options)
    running: dict[str, subprocess.Popen[bytes]] = {}
    undone = []
    with tempfile.TemporaryDirectory() as scratch:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < options.jobs:
                job = waiting.pop(0)
                running[job] = _child(options, job, scratch)
            time.sleep(0.2)
            for name, child in list(running.items()):
                if child.poll() is not None:
                    undone += [name] if running.pop(name).returncode else []
        for child in running.values():
            child.kill()
        for child in running.values():
            child.wait()
    return [*undone, *running, *waiting]


def _child(options: argparse.Namespace, job: str, scratch: str) -> subprocess.Popen[bytes]:
    """Start a child. Its disturbed measurements go to a scratch folder, its errors to a log."""
    command = [sys.executable, "-m", "benchmarks.gpu_speed", "--child", job, "--jobs", str(options.jobs)]
    for name in ("networks", "modes", "batches"):
        command += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    log = options.out.with_suffix(".log").open("ab")
    threads = max(2, (os.cpu_count() or 1) // options.jobs)
    extra = {"LOWRANK_CACHE": scratch, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **extra})


def parsed() -> argparse.Namespace:
    made = parser(__doc__, "gpu_speed.json")
    made.add_argument("--networks", default=",".join(NETWORKS), help="comma-separated names")
    made.add_argument("--modes", default="inference,training")
    made.add_argument("--batches", default="256,1")
    made.add_argument("--ways", default=",".join(OURS), help="our own ways to try")
    made.add_argument("--budget", type=float, default=500, help="seconds in all")
    made.add_argument("--repeats", type=int, default=21)
    made.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    made.add_argument("--compile", default="autotune,tiles,rivals", help="what children compile first")
    made.add_argument("--compile-budget", type=float, help="seconds of it for that; half if not given")
    made.add_argument("--only-compile", action="store_true", help="fill the compilers' caches, measure nothing")
    made.add_argument("--verbose", action="store_true", help="print every measurement")
    made.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.compile_budget is None:
        options.compile_budget = options.budget * (1 if options.only_compile else 0.5)
    for name in ("networks", "modes", "ways", "compile"):
        setattr(options, name, getattr(options, name).split(","))
    options.batches = [int(batch) for batch in options.batches.split(",")]
    if unknown := [name for name in options.networks if name not in TWINS]:
        made.error(f"no such network: {', '.join(unknown)}; known are {', '.join(TWINS)}")
    return options


def main() -> None:
    start, options = time.monotonic(), parsed()
    torch.backends.cudnn.benchmark = True
    if options.child.startswith("tiles|"):
        return compile_tiles(options, int(options.child.partition("|")[2]), options.jobs)
    if options.child:
        name, mode, batch, how = options.child.split("|")
        return compile_way(Setting(name, mode, int(batch), how))
    undone = compile_all(options, start + options.compile_budget)
    print(f"compiled in {time.monotonic() - start:.0f} s; undone: {undone}", flush=True)
    if options.only_compile:
        return None
    book = Book(options, start)
    book.found["undone"] = undone
    limit = limits()
    book.found["limits"] = asdict(limit)
    for name, mode, batch in settings(options):
        if row := compare(book, limit, name, mode, batch):
            book.found["rows"].append(row)
            book.write()
    show(book.found["rows"])
    print(f"{time.monotonic() - start:.0f} s in all")
    return None


if __name__ == "__main__":
    main()
