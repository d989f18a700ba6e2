"""Low-rank networks on the CPU against the fastest dense twin: time ratio beside MAC ratio.

    python -m benchmarks.cpu_speed --batch 1     # all networks, all cores, eight minutes at most
    python -m benchmarks.cpu_speed --batch 8     # adds to the same file
    python -m benchmarks.cpu_speed --batch 1 --networks vgg11-gmp-lr --budget 120 --out /tmp/quick.json

Every network, dense or not, may run in any of the same ways: torch with batch norms folded, contiguous and
channels_last; planned layer by layer in both (`lowrank_cnn.deploy.plan`); compiled; and ONNX Runtime. A first
round, on two images at most, finds the fastest few of each network. A second round runs those of all networks in
turns, and compares medians: each network at its best against its dense twin at its best. float32, the same threads
for all.

Neither runtime has minimal filtering here. It saves multiplications in dense networks too, so there are three
ratios: without it, with it on both sides, and with it only on ours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import parser, write_record
from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.deploy.block_forms import CANDIDATES
from lowrank_cnn.deploy.export import export
from lowrank_cnn.deploy.optimize import FORMATS as LAYOUTS
from lowrank_cnn.deploy.parity import OnnxModel
from lowrank_cnn.deploy.plan import plan
from lowrank_cnn.graph.merge import merge
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import baseline_of

NETWORKS = {
    "vgg11-gmp-lr": 0.345,
    "vgg11-gmp-lr-2x": 0.43,
    "vgg11-gmp-lr-join": 0.53,
    "vgg11-gmp-lr-join-wfull": 0.87,
    "nin-c3-lr": 0.56,
}
"""The networks, and the target share of the dense twin's time."""

Way = Callable[[Tensor], object]

REST = 0.05
"""Seconds before each run, for the threads of the runtime before it to fall asleep."""
KEPT = 2
"""Ways of each network that enter the second round, besides the best with minimal filtering."""
FILTERED = "minimal filtering"


def ways(network: nn.Module, image: Tensor, folder: Path, threads: int, compiled: bool) -> dict[str, Way]:
    """Every way to run a network, planned for this image."""
    found: dict[str, Way] = {}
    for label, layout in LAYOUTS.items():
        laid_out = merge(network, chains=False).to(memory_format=layout)  # type: ignore[call-overload]
        example = image.contiguous(memory_format=layout)
        others = {name: candidate for name, candidate in CANDIDATES.items() if FILTERED not in name}
        found[f"torch, {label}"] = _in_layout(laid_out, layout)
        for name, candidates in (("planned", others), (f"planned with {FILTERED}", CANDIDATES)):
            planned = plan(laid_out, example, cache=False, candidates=candidates, repeats=5)
            found[f"torch, {name}, {label}"] = _in_layout(planned, layout)
    if compiled:
        last = merge(network, chains=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fast: Any = torch.compile(last, options={"freezing": True}, dynamic=False)
        found["torch, compiled"] = _in_layout(fast, torch.channels_last)
    path = folder / f"{len(list(folder.iterdir()))}.onnx"
    export(network, path)
    found["onnxruntime"] = OnnxModel(path, threads=threads)
    return found


def _in_layout(network: nn.Module, layout: torch.memory_format) -> Way:
    return lambda x: network(x.contiguous(memory_format=layout))


def first_round(name: str, run: dict[str, Way], image: Tensor) -> tuple[dict[str, Way], dict[str, Any]]:
    """Time the ways of one network in turns; those that fail are named and left out."""
    working, row = {}, {}
    for way, call in run.items():
        try:
            call(image)
            working[way] = call
        except Exception as failure:  # a compiler that is missing, say
            row[way] = {"failed": repr(failure)[:200]}
    times = measure(
        {way: lambda c=call: c(image) for way, call in working.items()}, repeats=5, budget=10, rest=REST
    )
    row |= {way: asdict(sample) for way, sample in times.items()}
    order = sorted(times, key=lambda way: times[way].ms)
    print(f"  {name:26}", ", ".join(f"{way} {times[way].ms:.1f}" for way in order), flush=True)
    plain, filtered = ([way for way in order if (FILTERED in way) is asked] for asked in (False, True))
    return {way: working[way] for way in (*plain[:KEPT], *filtered[:1])}, row


def compare(name: str, samples: dict[str, Sample], macs: dict[str, int]) -> dict[str, Any]:
    """A network at its best against its twin at its best: as runtimes are, and with minimal filtering."""
    dense = baseline_of(name)
    plain = {key: sample for key, sample in samples.items() if FILTERED not in key}
    ours, theirs = _best(name, plain), _best(dense, plain)
    our_best, their_best = _best(name, samples), _best(dense, samples)
    return {
        "network": name,
        "twin": dense,
        "way": ours.partition("|")[2],
        "twin_way": theirs.partition("|")[2],
        "ms": asdict(samples[ours]),
        "twin_ms": asdict(samples[theirs]),
        "ratio": samples[ours].ms / samples[theirs].ms,
        "best_way": our_best.partition("|")[2],
        "best_ms": asdict(samples[our_best]),
        "twin_best_ms": asdict(samples[their_best]),
        "ratio_of_bests": samples[our_best].ms / samples[their_best].ms,
        "ratio_to_runtimes": samples[our_best].ms / samples[theirs].ms,
        "mac_ratio": macs[name] / macs[dense],
        "goal": NETWORKS[name],
    }


def _best(net: str, samples: dict[str, Sample]) -> str:
    own = [key for key in samples if key.startswith(f"{net}|")]
    return min(own, key=lambda key: samples[key].ms)


def run_batch(names: list[str], batch: int, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Both rounds for one batch size."""
    torch.manual_seed(0)
    everything = list(dict.fromkeys([*map(baseline_of, names), *names]))
    finalists: dict[str, Callable[[], object]] = {}
    macs, first = {}, {}
    half = deadline - options.budget / len(options.batch) / 2
    with tempfile.TemporaryDirectory() as folder:
        for name in everything:
            network = create_model(name).eval()
            macs[name] = count(network, network.input_size).macs
            image = torch.randn(batch, *network.input_size)
            run = ways(
                network, image[:2], Path(folder), options.threads, options.compile and time.monotonic() < half
            )
            best, first[name] = first_round(name, run, image[:2])
            finalists |= {f"{name}|{way}": lambda c=call, x=image: c(x) for way, call in best.items()}
        left = max(30.0, deadline - time.monotonic())
        samples = measure(finalists, repeats=options.repeats, budget=left, rest=REST)
    rows = [compare(name, samples, macs) for name in names]
    finals = {key: asdict(sample) for key, sample in samples.items()}
    return {"batch": batch, "rows": rows, "first_round": first, "second_round": finals}


def show(result: dict[str, Any]) -> None:
    print(f"batch {result['batch']}")
    for row in result["rows"]:
        spread = f"{row['ms']['low']:.1f}-{row['ms']['high']:.1f}"
        print(f"  {row['network']:26} {row['ms']['ms']:8.1f} ms ({spread}, {row['way']})", end="  ")
        print(f"twin {row['twin_ms']['ms']:.1f} ({row['twin_way']})", end="  ")
        print(f"ratio {row['ratio']:.3f}  MACs {row['mac_ratio']:.3f}  goal {row['goal']}", end="  ")
        print(
            f"best {row['best_ms']['ms']:.1f} ({row['best_way']})  twin's {row['twin_best_ms']['ms']:.1f}",
            end="  ",
        )
        print(f"ratio {row['ratio_of_bests']:.3f}, to runtimes {row['ratio_to_runtimes']:.3f}")


def earlier(path: Path, batches: list[int]) -> list[dict[str, Any]]:
    """The results of other batch sizes that the file holds already."""
    found = json.loads(path.read_text())["batches"] if path.exists() else []
    return [result for result in found if result["batch"] not in batches]


def main() -> None:
    made = parser(__doc__, "cpu_speed.json")
    made.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    made.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    made.add_argument("--repeats", type=int, default=21, help="runs of each finalist in the second round")
    made.add_argument("--budget", type=float, default=480, help="seconds in all, shared between the batches")
    made.add_argument("--no-compile", dest="compile", action="store_false")
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    batches = earlier(options.out, options.batch)
    share = options.budget / len(options.batch)
    with torch.no_grad():
        for batch in options.batch:
            result = run_batch(options.networks, batch, options, time.monotonic() + share)
            batches.append(result)
            write_record(options.out, "cpu-speed", batches=batches)
            show(result)


if __name__ == "__main__":
    main()
