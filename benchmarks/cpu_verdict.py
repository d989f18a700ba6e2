"""Low-rank and thinner NiNs on one thread of a CPU, in int8: is `lr` above the line through the thin networks?

    python -m benchmarks.cpu_verdict train --data cifar10 --seeds 1 2 3 --out runs/cpu   # on a GPU, minutes
    python -m benchmarks.cpu_verdict accuracies --data cifar10 --out runs/cpu
    python -m benchmarks.cpu_verdict times --out runs/cpu                                # on two idle cores

`train` keeps a run folder of every network. `accuracies` quantises each to every engine with 256 training images
and tests the very file on all test images. `times` times the files of the first seed: the networks of an engine
run in turns in one process, three processes one after the other. "cpu" in choose/questions.json has the question.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose.candidates import Builder, Design, find_design, find_family
from lowrank_cnn.choose.runs import WorkerPool
from lowrank_cnn.core.clock import measure
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.files import read_json, write_json
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.deploy.engines.targets import open_engine
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.recipes import get_recipe
from lowrank_cnn.train.trained import load_checkpoint

RESULTS = Path(__file__).parent / "results" / "cpu_verdict.json"
SQUARES = Design("dense-3x3", "mixture(3x3)")
DESIGNS = ("lr@0.75", "lr", "lr@1.25", "dense-3x3@0.75", "dense-3x3@0.875", "dense-3x3", "dense@0.6875", "dense")
SUFFIXES = {"onnxruntime": ".onnx", "litert": ".tflite", "executorch": ".pte"}
SIZE = (3, 32, 32)
PROCESSES = 3


def design_of(name: str) -> Design:
    base, _, width = name.partition("@")
    if base != SQUARES.name:
        return find_design(name)
    return replace(SQUARES, name=name, width=float(width or 1))


def built(name: str) -> nn.Module:
    return Builder.of_family(find_family("nin"), SIZE, 10)(design_of(name))


@dataclass(frozen=True)
class Trainer:
    """Trains one design with one seed, in a run folder of its own."""

    data: Data
    recipe: Recipe
    out: Path

    def __call__(self, job: tuple[str, int]) -> float:
        name, seed = job
        torch.manual_seed(seed)
        how: dict[str, Any] = {"out": self.out / f"{name}-{seed}", "resume": True, "seed": seed}
        run = lr.fit(built(name), self.data, self.recipe, compile=False, progress=False, **how)
        return run.result["top1"]


def train(options: argparse.Namespace) -> None:
    recipe = get_recipe("nin-modern", epochs=options.epochs, warmup=2.0, ema=0.99, evaluate_every=options.epochs)
    jobs = [(name, seed) for seed in options.seeds for name in options.designs]
    data = open_data(options.data, progress=False, limit=options.limit)
    with WorkerPool(Trainer(data, recipe, options.out), options.processes) as pool:
        for job, found in pool.results(jobs):
            print(*job, found, flush=True)


def accuracies(options: argparse.Namespace) -> None:
    """Add a row for each file and engine that the record lacks: the accuracy after training, and in int8."""
    from benchmarks.cpu_engines import recorded  # these need psutil and the engines, which `train` does not
    from benchmarks.int8_accuracy import BATCH, correct

    data = open_data(options.data, progress=False, limit=options.limit)
    for run in (options.out / f"{name}-{seed}" for seed in options.seeds for name in options.designs):
        name, _, seed = run.name.rpartition("-")
        trained = load_checkpoint(run, best=True, network=built(name))  # the last weights: tested once, at the end
        for engine in options.engines:
            key = {"design": name, "seed": int(seed), "engine": engine}
            if any(key.items() <= row.items() for row in recorded(options.results)):
                continue
            file = options.out / engine / f"{run.name}{SUFFIXES[engine]}"
            file.parent.mkdir(exist_ok=True)
            lr.quantize(trained, data, file, test=BATCH, overwrite=True)
            right = correct(lr.load(file), trained, data)
            counted = lr.count(trained.network, SIZE)
            share = [read_json(run / "record.json")["result"]["top1"], right.double().mean().item()]
            costs = {"macs": counted.macs, "params": counted.params}
            row = {**key, **costs, "float": share[0], "int8": share[1], "images": len(right)}
            add(options.results, row)
            print(row, flush=True)


def timed(folder: Path, engine: str, seed: int, designs: list[str]) -> dict[str, Any]:
    """Milliseconds of one image by one thread, of every network of an engine in turns."""
    x = torch.randn(1, *SIZE).numpy()
    files = {name: folder / engine / f"{name}-{seed}{SUFFIXES[engine]}" for name in designs}
    runners = {name: open_engine(path, threads=1) for name, path in files.items()}
    found = measure({name: partial(runner, x) for name, runner in runners.items()}, repeats=51)
    return {name: asdict(time) for name, time in found.items()}


def times(options: argparse.Namespace) -> None:
    for engine in options.engines:
        for number in range(PROCESSES):
            with get_context("spawn").Pool(1) as pool:
                rows = pool.apply(timed, (options.out, engine, options.seeds[0], options.designs))
            add(options.results, {"engine": engine, "process": number, "ms": rows})
            print(engine, number, {name: round(row["ms"], 3) for name, row in rows.items()}, flush=True)


def add(path: Path, row: dict[str, Any]) -> None:
    from benchmarks.cpu_engines import recorded, versions

    write_json(path, {"environment": environment(), "versions": versions(), "rows": [*recorded(path), row]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "accuracies", "times"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--out", type=Path, default=Path("runs/cpu"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--designs", nargs="+", default=list(DESIGNS))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=list(SUFFIXES), choices=list(SUFFIXES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"train": train, "accuracies": accuracies, "times": times}[options.what](options)


if __name__ == "__main__":
    main()
