"""Whole networks on a GPU: ours against the fastest dense twin, beside the ratio of MACs and the floor.

    python benchmarks/gpu_speed.py --out benchmarks/results/gpu_speed.json [--networks vgg11-gmp-lr] [--budget 500]

Inference runs in bf16, a training step (forward, backward, SGD) under bf16 autocast; channels_last; every way is
a captured CUDA graph. The fastest dense twin is the best of torch.compile, max-autotune and cuDNN with bias and
ReLU inside (with and without padding the input channels) and the rest compiled. What our own kernels make of the
dense network stands in a column of its own. Child processes first compile what they can, side by side, into
the compilers' caches on disk; then this process measures alone. Results are written after each measurement: the
file keeps the runs that it holds, oldest first, and this one stands last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpu_floor import Limits, floor_ms, layers, limits
from gpu_ways import OURS, RIVALS, TRICKS, images, network, step_of, way

from lowrank_cnn.deploy.merge import merge
from lowrank_cnn.environment import environment
from lowrank_cnn.kernels import tune
from lowrank_cnn.kernels.measure import captured, times
from lowrank_cnn.models import vgg

TWINS = {**dict.fromkeys(vgg.VARIANTS, "vgg11-gmp"), "nin-c3-lr": "nin", "googlenet-lr": "googlenet"}
NETWORKS = [name for name in TWINS if name not in ("vgg11", "vgg11-gmp")]
FIRST = ("vgg11-gmp-lr", "vgg11-gmp-lr-2x", "vgg11-gmp-lr-join")
KIND = "gpu-speed"


@dataclass(frozen=True)
class Setting:
    """One thing to measure: a network, inference or training, a batch, and the way it is run."""

    network: str
    mode: str
    batch: int
    way: str

    def __str__(self) -> str:
        return f"{self.network}|{self.mode}|{self.batch}|{self.way}"


def settings(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """What is asked for, the large batch first: networks within modes within batches."""
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
    """Child: run every plan of a share of the convs, for the sake of Triton's cache alone."""
    from lowrank_cnn.kernels.plans import plans

    capability = torch.cuda.get_device_capability()
    for problem, training in tiles(options)[shard::shards]:
        found = plans(problem, capability=capability)
        for plan in found[:1] if training else found:
            times(problem, torch.device("cuda"), plan, training=training, repeats=1)
        torch.cuda.empty_cache()


def compile_way(setting: Setting) -> None:
    """Child: take one step, for the sake of the compiler's cache alone."""
    net = network(setting.network, setting.mode)
    step = step_of(net, setting.way, setting.mode, setting.batch)
    for _ in range(2):
        step()
    torch.cuda.synchronize()


def compile_all(options: argparse.Namespace, deadline: float) -> list[str]:
    """Run the children, so many at a time; what is not done by the deadline is stopped, and named."""
    waiting = [f"tiles|{i}" for i in range(options.jobs)]
    rivals = [str(s) for s in dense_settings(options) if s.way not in ("ours", "graph")]
    waiting = [*waiting[: options.jobs * 2 // 3], *rivals[:4], *waiting[options.jobs * 2 // 3 :], *rivals[4:]]
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
    """Its measurements, taken in a crowd, go to a scratch folder; its errors to a log beside the results."""
    command = [sys.executable, __file__, "--child", job, "--jobs", str(options.jobs)]
    for name in ("networks", "modes", "batches"):
        command += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    log = options.out.with_suffix(".log").open("ab")
    extra = {"LOWRANK_CACHE": scratch, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **extra})


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Median, least and most of the replays of one step, and how long it took to get there."""
    began = time.monotonic()
    try:
        net = network(setting.network, setting.mode)
        if setting.way in (*OURS, "ours"):
            x = images(net, setting.batch)
            whole = merge(net, example_input=x[:1]) if setting.way == "planned" else net
            for each in dict.fromkeys([net, whole]):
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=setting.mode == "training"):
                    tune(way(each, "fused", x), x, training=setting.mode == "training")
        graph = captured(step_of(net, setting.way, setting.mode, setting.batch))
        times = _replayed(graph, repeats)
        row = {"ms": median(times), "least": min(times), "most": max(times), "repeats": repeats}
        del graph, net
    except Exception as failure:  # a way that fails says so, the others go on
        row = {"failed": repr(failure)[:400]}
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _replayed(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, stop in zip(marks[::2], marks[1::2], strict=True):
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in zip(marks[::2], marks[1::2], strict=True)]


def earlier_runs(path: Path) -> list[dict[str, Any]]:
    """The runs that a record holds already, oldest first."""
    found = json.loads(path.read_text()) if path.exists() else {"kind": KIND, "runs": []}
    if found.get("kind") != KIND:
        sys.exit(f"{path} is no record of whole networks: name another file by --out.")
    return found["runs"]


class Book:
    """What was measured, once each, written as it grows."""

    def __init__(self, options: argparse.Namespace, start: float) -> None:
        self.options, self.deadline = options, start + options.budget
        self.found: dict[str, Any] = {"environment": environment(), "undone": [], "limits": {}}
        self.found |= {"ways": {}, "rows": []}
        self.earlier = earlier_runs(options.out)

    def get(self, setting: Setting) -> dict[str, Any]:
        if str(setting) not in self.found["ways"]:
            late = time.monotonic() > self.deadline
            # Without the children's work, the rest compile here; max-autotune would take minutes.
            unready = setting.way == "max-autotune" and str(setting) in self.found["undone"]
            skipped = {"skipped": "no time left" if late else "not compiled in time"}
            row = skipped if late or unready else measure(setting, self.options.repeats)
            self.found["ways"][str(setting)] = row
            if "ms" not in row or self.options.verbose:
                print("   ", setting, row, flush=True)
            self.write()
        return self.found["ways"][str(setting)]

    def write(self) -> None:
        """The record with this run last; of what it skipped the names alone. The file is whole at every moment."""
        ways = {name: row for name, row in self.found["ways"].items() if "skipped" not in row}
        undone = dict.fromkeys([*self.found["undone"], *(name for name in self.found["ways"] if name not in ways)])
        run = {**self.found, "undone": list(undone), "ways": ways}
        whole = {"kind": KIND, "runs": [*self.earlier, run]}
        scratch = self.options.out.with_suffix(".part")
        scratch.write_text(json.dumps(whole, indent=1) + "\n")
        scratch.replace(self.options.out)

    def best(self, name: str, mode: str, batch: int, ways: tuple[str, ...]) -> tuple[str, dict[str, Any]] | None:
        rows = {how: self.get(Setting(name, mode, batch, how)) for how in ways}
        timed = {how: row for how, row in rows.items() if "ms" in row}
        return min(timed.items(), key=lambda item: item[1]["ms"], default=None)


def compare(book: Book, limit: Limits, name: str, mode: str, batch: int) -> dict[str, Any] | None:
    """One row: ours, the fastest dense twin, what tricks make of it, MACs, rate and floor."""
    twin = TWINS[name]
    ways = [how for how in book.options.ways if how != "planned" or mode == "inference"]
    dense = book.best(twin, mode, batch, RIVALS[mode])
    ours = book.best(name, mode, batch, tuple(ways))
    tricks = book.best(twin, mode, batch, TRICKS[mode])
    strongest = book.get(Setting(twin, mode, batch, RIVALS[mode][0]))
    if (
        ours is None or dense is None or "skipped" in strongest
    ):  # where time ran out, no row against a weaker rival
        return None
    (_, work), (_, twin_work) = layers(name, batch), layers(twin, batch)
    macs = sum(layer.macs + (layer.back_macs if mode == "training" else 0) for layer in work)
    ms = ours[1]["ms"]
    row = {"network": name, "mode": mode, "batch": batch, "way": ours[0], "ms": ms, "dense": twin}
    row |= {"dense_way": dense[0], "dense_ms": dense[1]["ms"], "ratio": ms / dense[1]["ms"]}
    if tricks:
        row |= {"tricks_way": tricks[0], "tricks_ms": tricks[1]["ms"], "tricks_ratio": ms / tricks[1]["ms"]}
    row["mac_ratio"] = sum(layer.macs for layer in work) / sum(layer.macs for layer in twin_work)
    return row | {"tflops": 2 * macs / ms / 1e9, "floor_ms": floor_ms(work, limit, mode)}


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'network':24} {'mode':9} {'batch':>5} {'ours ms':>8} {'dense ms':>8} {'ratio':>6} {'MACs':>6} "
        f"{'tricks ms':>9} {'ratio':>6} {'TFLOP/s':>7} {'floor':>7}  ways"
    )
    for row in rows:
        ways = f"{row['way']} / {row['dense_way']} / {row.get('tricks_way', '-')}"
        print(
            f"{row['network']:24} {row['mode']:9} {row['batch']:5} {row['ms']:8.3f} {row['dense_ms']:8.3f} "
            f"{row['ratio']:6.3f} {row['mac_ratio']:6.3f} {row.get('tricks_ms', float('nan')):9.3f} "
            f"{row.get('tricks_ratio', float('nan')):6.3f} {row['tflops']:7.1f} {row['floor_ms']:7.3f}  {ways}"
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="comma-separated names")
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--batches", default="256,1")
    parser.add_argument("--ways", default=",".join(OURS), help="our own ways to try")
    parser.add_argument("--budget", type=float, default=500, help="seconds in all")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("gpu_speed.json"))
    parser.add_argument("--verbose", action="store_true", help="print every measurement")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("networks", "modes", "ways"):
        setattr(options, name, getattr(options, name).split(","))
    options.batches = [int(batch) for batch in options.batches.split(",")]
    if unknown := [name for name in options.networks if name not in TWINS]:
        parser.error(f"no such network: {', '.join(unknown)}; known are {', '.join(TWINS)}")
    return options


def main() -> None:
    start, options = time.monotonic(), parsed()
    torch.backends.cudnn.benchmark = True
    if options.child.startswith("tiles|"):
        return compile_tiles(options, int(options.child.partition("|")[2]), options.jobs)
    if options.child:
        name, mode, batch, how = options.child.split("|")
        return compile_way(Setting(name, mode, int(batch), how))
    book = Book(options, start)
    book.found["undone"] = compile_all(options, start + 0.5 * options.budget)
    print(f"compiled in {time.monotonic() - start:.0f} s; undone: {book.found['undone']}", flush=True)
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
