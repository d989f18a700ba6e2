"""The measurements of `gpu_speed.py` and their record: settings, times, and rows that compare ours with dense."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import earlier_runs, milliseconds, write_runs
from benchmarks.gpu_floor import Limits, floor_ms, layers
from benchmarks.gpu_ways import OURS, RIVALS, TRICKS, images, network, step_of, way
from lowrank_cnn.core.environment import environment
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.kernels import tune
from lowrank_cnn.kernels.cuda_graph import Captured, captured
from lowrank_cnn.models import vgg

KIND = "gpu-speed"
TWINS = {**dict.fromkeys(vgg.VARIANTS, "vgg11-gmp"), "nin-c3-lr": "nin", "googlenet-lr": "googlenet"}
TWINS["vgg11-gmp-lr/2"] = "vgg11-gmp/2"


@dataclass(frozen=True)
class Setting:
    """One thing to measure: a network, inference or training, a batch, and the way it is run."""

    network: str
    mode: str
    batch: int
    way: str

    def __str__(self) -> str:
        return f"{self.network}|{self.mode}|{self.batch}|{self.way}"


def measure(setting: Setting, repeats: int) -> dict[str, Any]:
    """Median, least and most of the replays of one step, and how long preparing and measuring took.

    cuDNN searches for its fastest algorithms where it is the rival; on our side it would search for minutes, layer
    by layer, only to lose to the kernels.
    """
    began = time.monotonic()
    torch.backends.cudnn.benchmark = setting.way not in (*OURS, "ours")
    try:
        net = network(setting.network, setting.mode)
        if setting.way in (*OURS, "ours"):
            x = images(net, setting.batch)
            whole = merge(net, chains=True, example_input=x[:1]) if setting.way == "planned" else net
            for each in dict.fromkeys([net, whole]):
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=setting.mode == "training"):
                    tune(way(each, "fused", x), x, training=setting.mode == "training")
        graph = captured(step_of(net, setting.way, setting.mode, setting.batch))
        times = _replayed(graph, repeats)
        row = {**milliseconds(times), "repeats": repeats}
        del graph, net
    except Exception as failure:  # a way that fails says so, the others go on
        row = {"failed": repr(failure)[:400]}
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _replayed(graph: Captured, repeats: int) -> list[float]:
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, stop in zip(marks[::2], marks[1::2], strict=True):
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in zip(marks[::2], marks[1::2], strict=True)]


class Book:
    """Measurements, each taken once; the record is written after each."""

    def __init__(self, options: argparse.Namespace, start: float) -> None:
        self.options, self.deadline = options, start + options.budget
        self.found: dict[str, Any] = {"environment": environment(), "undone": [], "limits": {}}
        self.found |= {"ways": {}, "rows": []}
        self.earlier = earlier_runs(options.out, KIND)

    def get(self, setting: Setting) -> dict[str, Any]:
        if str(setting) not in self.found["ways"]:
            late = time.monotonic() > self.deadline
            # Ways that no child process compiled are compiled here, except max-autotune, which would take minutes.
            unready = setting.way == "max-autotune" and str(setting) in self.found["undone"]
            skipped = {"skipped": "no time left" if late else "not compiled in time"}
            row = skipped if late or unready else measure(setting, self.options.repeats)
            self.found["ways"][str(setting)] = row
            if "ms" not in row or self.options.verbose:
                print("   ", setting, row, flush=True)
            self.write()
        return self.found["ways"][str(setting)]

    def write(self) -> None:
        """The record with this run last; skipped settings are only named."""
        ways = {name: row for name, row in self.found["ways"].items() if "skipped" not in row}
        undone = dict.fromkeys([*self.found["undone"], *(name for name in self.found["ways"] if name not in ways)])
        run = {**self.found, "undone": list(undone), "ways": ways}
        write_runs(self.options.out, KIND, [*self.earlier, run])

    def best(self, name: str, mode: str, batch: int, ways: tuple[str, ...]) -> tuple[str, dict[str, Any]] | None:
        rows = {how: self.get(Setting(name, mode, batch, how)) for how in ways}
        timed = {how: row for how, row in rows.items() if "ms" in row}
        return min(timed.items(), key=lambda item: item[1]["ms"], default=None)


def compare(book: Book, limit: Limits, name: str, mode: str, batch: int) -> dict[str, Any] | None:
    """One row: ours, the fastest dense twin, the dense twin with our kernels, MACs, rate and floor."""
    twin = TWINS[name]
    ways = [how for how in book.options.ways if how != "planned" or mode == "inference"]
    dense = book.best(twin, mode, batch, RIVALS[mode])
    ours = book.best(name, mode, batch, tuple(ways))
    tricks = book.best(twin, mode, batch, TRICKS[mode])
    strongest = book.get(Setting(twin, mode, batch, RIVALS[mode][0]))
    # If time ran out, write no row rather than one against a weaker rival.
    if ours is None or dense is None or "skipped" in strongest:
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
