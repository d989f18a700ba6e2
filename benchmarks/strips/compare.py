"""One layer of vgg11-gmp-lr: compiled strips (strips.cpp) against the engines, on an Arm CPU with g++.

    python -m benchmarks.strips.compare --threads 2 --folder /tmp/strips     # files are written once

Both sides run the layer conv3_2 at 56x56, 128 filters of 1x3 and 128 of 3x1 over 256 channels, batch 1. The
engines get it as a network of one layer. The record gives the speedup of the compiled strips over the fastest
engine of the same precision. The compiled side omits the concatenation, and the transposition of one of the two
directions, which favours it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowrank_cnn as lr
from benchmarks.cpu_engines import ENGINES, PRECISIONS, REST, versions, warm_runs
from lowrank_cnn.core.clock import measure
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import write_json
from lowrank_cnn.deploy.engines.targets import open_engine

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "strips.json"
SIZE = (256, 56, 56)
NEEDED = 1.3
"""The speedup over the fastest engine at which compiled strips are worth shipping."""


def compiled(folder: Path, threads: int) -> dict[str, Any]:
    """Build strips.cpp and run it; its own JSON."""
    program = folder / "strips"
    flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp"]
    subprocess.run(["g++", *flags, str(HERE / "strips.cpp"), "-o", str(program)], check=True)
    there = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return json.loads(subprocess.run([program], check=True, capture_output=True, text=True, env=there).stdout)


def engines(folder: Path, threads: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """The layer in every engine that supports it, by "engine precision"; each engine in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found |= process.submit(engine, folder, threads, name).result()
    return found


def engine(folder: Path, threads: int, name: str) -> dict[str, dict[str, Any]]:
    """The layer in one engine, its precisions in turns."""
    torch.manual_seed(0)
    layer = nn.Sequential(lr.build_conv(256, 256, 3, "lr"), nn.ReLU()).eval()
    image = torch.randn(1, *SIZE)
    runs = {}
    for precision in PRECISIONS:
        path = folder / f"{name}-{precision}{ENGINES[name]}"
        try:
            if path.exists():
                pass
            elif precision == "int8":
                lr.quantize(layer, image, path, dynamic=())
            else:
                lr.export(layer, path, example_input=image, precision=precision, dynamic=())  # type: ignore[arg-type]
        except LowRankError as why:
            print(f"{path.name}: {why}", flush=True)
            continue
        runner = open_engine(path, threads=threads)
        runs[f"{name} {precision}"] = lambda r=runner, x=image: r(x.numpy())
    samples = measure(runs, repeats=25, budget=60, rest=REST, warm=warm_runs(runs))
    return {label: asdict(sample) for label, sample in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the engines' files are kept")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        theirs = engines(options.folder or Path(folder), options.threads, options.engines)
        ours = compiled(Path(folder), options.threads)
    gains = {}
    for precision in PRECISIONS:
        mine = min((row["ms"], name) for name, row in ours["ways"].items() if name.endswith(precision))
        best = min((row["ms"], name) for name, row in theirs.items() if name.endswith(precision))
        gains[precision] = {"strips": mine[1], "engine": best[1], "gain": best[0] / mine[0]}
        print(
            f"{precision}: {mine[1]} {mine[0]:.2f} ms, {best[1]} {best[0]:.2f} ms: {best[0] / mine[0]:.2f} times"
        )
    about = {"environment": environment(), "versions": versions(), "threads": options.threads, "needed": NEEDED}
    write_json(options.out, {**about, **ours, "engines": theirs, "gains": gains})


if __name__ == "__main__":
    main()
