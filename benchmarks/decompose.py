"""Train low-rank networks from scratch, or decompose a trained dense one and fine-tune it: accuracy at equal MACs.

    python -m benchmarks.decompose --data FOLDER                         both seeds, one after the other
    python -m benchmarks.decompose --data FOLDER --seed 0 &              one process each, a file each
    python -m benchmarks.decompose --data FOLDER --seed 1 &
    python -m benchmarks.decompose --merge benchmarks/results/decompose-seed*.json
    python -m benchmarks.decompose --data digits --recipe digits --width 0.1 --limit 100 --epochs 1 --tune 1

A dense network is trained for E epochs (`--epochs`) on all training images but 5,000. For each scheme and share of
the MACs it is decomposed to that share, and three networks of those shapes are compared:

- `decomposed`: the fitted filters, without training;
- `fine-tuned`: the same, trained for F epochs (`--tune`) at a lower rate (`--tune-lr`);
- `from scratch`: fresh filters by the composite initialisation, trained for E epochs, and, as a run of its own,
  for the E + F that dense network and fine-tuning take together.

No scheme changes the 1x1 convs, which are 31% of the MACs of `nin`: shares much below a half leave its other
layers next to nothing. The number of filters of a layer depends on the dense network's weights and differs between
seeds; MACs and parameters in the table are means. With two schemes and two shares a seed takes 13 runs, 350 epochs
at E = 30 and F = 10. All figures are on held-out images; `--test` uses the test set once, after all training. To
continue a stopped process, repeat the command: runs are kept in `--runs`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from benchmarks.common import RESULTS, parser, write_record
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.method.count import count
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.rewrite import Conversion
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import rebuild
from lowrank_cnn.train import Recipe, Record, fit, get_recipe, load_record
from lowrank_cnn.train.evaluate import evaluate, load_checkpoint
from lowrank_cnn.train.inputs import input_size
from lowrank_cnn.train.trained import Trained

HELD_OUT = 5000
DENSE, AT_ONCE, TUNED, SCRATCH = "dense", "decomposed", "fine-tuned", "from scratch"


@dataclass(frozen=True)
class DecomposeLine:
    """A network of the table: how it was made, its scheme, and its share of the MACs."""

    way: str
    scheme: str = ""
    share: float = 1.0
    epochs: int = 0

    @property
    def folder(self) -> str:
        words = [
            self.way.replace(" ", "-"),
            self.scheme,
            f"{self.share:g}" if self.scheme else "",
            f"{self.epochs}",
        ]
        return "-".join(filter(None, words))


@dataclass
class DecomposeBench:
    """One seed: its images, its runs, and the rows so far."""

    data: Data
    seed: int
    options: argparse.Namespace
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def recipe(self, epochs: int, *, tune: bool = False) -> Recipe:
        rate = {"lr": self.options.tune_lr, "warmup": 1.0} if tune else {}
        return get_recipe(self.options.recipe, epochs=epochs, holdout=0, levels=0, evaluate_every=10, **rate)

    def fresh(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return create_model(
            self.options.network,
            num_classes=len(self.data.classes),
            in_channels=self.data.train.channels,
            width=self.options.width,
            **self.recipe(1).network(),
        )

    def decomposed(self, line: DecomposeLine) -> Trained:
        """The trained dense network, decomposed: evaluated without training, and the start of fine-tuning."""
        dense = load_checkpoint(self.place(DecomposeLine(DENSE, epochs=self.options.epochs)))
        size = input_size(self.data.train, dense.augment)
        return replace(dense, network=decompose(dense.network, line.scheme, macs=line.share, input_size=size))

    def fitted(self, line: DecomposeLine) -> nn.Module:
        return self.decomposed(line).network.train()

    def at_once(self, line: DecomposeLine) -> dict[str, Any]:
        """The figures of the decomposed network without any training."""
        began, trained = time.monotonic(), self.decomposed(line)
        found = evaluate(trained, self.data, device=self.options.device, progress=False)
        cost = count(trained.network, input_size(self.data.train, trained.augment))
        return {"macs": cost.macs, "params": cost.params, "top1": found.top1, "seconds": time.monotonic() - began}

    def scratch(self, line: DecomposeLine) -> nn.Module:
        """A network of the same shapes, with fresh weights."""
        shapes = notes(self.fitted(line)).conversion or Conversion()
        return rebuild({"conversion": shapes.to_dict()}, into=self.fresh())

    def place(self, line: DecomposeLine) -> Path:
        return self.options.runs / f"seed{self.seed}" / line.folder

    def finished(self, line: DecomposeLine) -> Record | None:
        with contextlib.suppress(LowRankError):
            record = load_record(self.place(line))
            return record if record.status == "finished" else None

    def run(self, line: DecomposeLine, make: Callable[[], nn.Module]) -> None:
        """Train a line of the table, continue it, or read its result if it is finished."""
        result = self.at_once(line) if line.way == AT_ONCE else self.trained(line, make).result
        figures = {key: result[key] for key in ("macs", "params", "top1", "seconds")}
        self.rows.append({"seed": self.seed, **vars(line), **figures})
        print(f"seed {self.seed}: {line.folder:32} {result['top1']:.2%}", flush=True)

    def trained(self, line: DecomposeLine, make: Callable[[], nn.Module]) -> Record:
        if (record := self.finished(line)) is not None:
            return record
        how = {"device": self.options.device, "compile": self.options.compile, "progress": False}
        recipe = self.recipe(line.epochs, tune=line.way == TUNED)
        return fit(make(), self.data, recipe, seed=self.seed, out=self.place(line), resume=True, **how)

    def all(self) -> Iterator[bool]:
        """Train every line, the cheap ones first, until time is up; True once all are finished."""
        plan = list(lines(self))
        for line, make in plan:
            if time.monotonic() > self.deadline:
                return
            self.run(line, make)
            yield len(self.rows) == len(plan)


def lines(bench: DecomposeBench) -> Iterator[tuple[DecomposeLine, Callable[[], nn.Module]]]:
    """The lines of one seed, and how the network of each begins."""
    whole, tune = bench.options.epochs, bench.options.tune
    yield DecomposeLine(DENSE, epochs=whole), bench.fresh
    kinds = ((AT_ONCE, 0, bench.fitted), (TUNED, tune, bench.fitted))
    for way, epochs, make in (*kinds, (SCRATCH, whole, bench.scratch), (SCRATCH, whole + tune, bench.scratch)):
        for share in bench.options.shares:
            for scheme in bench.options.schemes:
                line = DecomposeLine(way, scheme, share, epochs)
                yield line, lambda line=line, make=make: make(line)


def look_at_test(bench: DecomposeBench, data: Data) -> None:
    """The accuracy on the test set, after all training."""
    for row in bench.rows:
        line = DecomposeLine(row["way"], row["scheme"], row["share"], row["epochs"])
        trained = bench.decomposed(line) if line.way == AT_ONCE else load_checkpoint(bench.place(line))
        row["test"] = evaluate(trained, data, device=bench.options.device).top1


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per network, over its seeds: means, and the standard deviation of the accuracy."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in ("scheme", "share", "way", "epochs")), []).append(row)
    table = []
    for (scheme, share, way, epochs), group in found.items():
        line = {"scheme": scheme, "share": share, "way": way, "epochs": epochs, "n": len(group)}
        line |= {key: mean(row[key] for row in group) for key in ("macs", "params", "top1")}
        line["stdev"] = stdev(row["top1"] for row in group) if len(group) > 1 else None
        if all("test" in row for row in group):
            tests = [row["test"] for row in group]
            line |= {"test": mean(tests), "test_stdev": stdev(tests) if len(tests) > 1 else None}
        table.append(line)
    return table


def show(table: list[dict[str, Any]]) -> None:
    dense = next((line["macs"] for line in table if line["way"] == DENSE), None)
    for line in table:
        ratio = f"{line['macs'] / dense:.3f}" if dense else ""
        spread = "" if line["stdev"] is None else f" +- {line['stdev']:.2%}"
        test = f"  test {line['test']:.2%}" if "test" in line else ""
        made = f"{line['scheme']:10} {line['share']:4g} {line['way']:12} {line['epochs']:3} epochs"
        print(
            f"{made}  {ratio:5} of the MACs  {line['params']:9,.0f} parameters  {line['top1']:.2%}{spread}{test}"
        )


def write(path: Path, setting: dict[str, Any], rows: list[dict[str, Any]], where: dict[str, Any]) -> None:
    write_record(path, "decompose", setting=setting, table=summary(rows), rows=rows, environment=where)


def merge(paths: list[Path], out: Path) -> None:
    """Combine the records of several seeds; their settings must be the same."""
    records = [json.loads(path.read_text()) for path in paths]
    if any(record["setting"] != records[0]["setting"] for record in records):
        sys.exit("these records are of different settings, and are not one table.")
    key = ("seed", "scheme", "share", "way", "epochs")
    rows = {tuple(row[k] for k in key): row for record in records for row in record["rows"]}
    write(out, records[0]["setting"], list(rows.values()), records[0]["environment"])
    show(summary(list(rows.values())))


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "decompose.json")
    made.add_argument("--data", help="CIFAR-10 as parquet, or any other set")
    made.add_argument("--network", default="nin")
    made.add_argument("--width", type=float, default=1.0, help="scale all filters, to try it on a small machine")
    made.add_argument("--recipe", default="nin-modern")
    made.add_argument("--schemes", nargs="+", default=["separable", "lr-join"])
    made.add_argument("--shares", nargs="+", type=float, default=[0.65, 0.5], help="of the dense network's MACs")
    made.add_argument("--epochs", type=int, default=30, help="E")
    made.add_argument("--tune", type=int, default=10, help="F")
    made.add_argument("--tune-lr", type=float, default=0.02)
    made.add_argument("--seed", type=int, action="append", help="repeatable; 0 and 1 if not given")
    made.add_argument("--limit", type=int, help="images of each split")
    made.add_argument("--device", default="auto")
    made.add_argument("--compile", action="store_true")
    made.add_argument("--budget", type=float, default=1e9, help="start nothing new after this many seconds")
    made.add_argument("--test", action="store_true", help="look at the test set when all is trained")
    made.add_argument("--runs", type=Path, default=Path("runs/decompose"), help="where the runs live")
    made.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="combine records into one")
    return made.parse_args()


def _setting(options: argparse.Namespace, held_out: int) -> dict[str, Any]:
    named = ("network", "width", "recipe", "schemes", "shares", "epochs", "tune", "tune_lr", "limit", "compile")
    return {name: getattr(options, name) for name in named} | {"held_out": held_out}


def _check_runs(folder: Path, setting: dict[str, Any]) -> None:
    """Refuse a folder that holds runs of other settings."""
    path, text = folder / "setting.json", json.dumps(setting, indent=1) + "\n"
    if path.exists() and path.read_text() != text:
        sys.exit(f"{folder} holds runs of another setting: choose another --runs.")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main() -> None:
    options = _arguments()
    out: Path = options.out
    if options.seed and len(options.seed) == 1 and out == RESULTS / "decompose.json":
        out = RESULTS / f"decompose-seed{options.seed[0]}.json"
    if options.merge:
        return merge(options.merge, out)
    if not options.data:
        sys.exit("give the images with --data, or records to combine with --merge.")
    deadline = time.monotonic() + options.budget
    images = open_data(options.data, limit=options.limit)
    held_out = min(HELD_OUT, len(images.train) // 5)
    setting, where = _setting(options, held_out), environment()
    _check_runs(options.runs, setting)
    done: list[dict[str, Any]] = []
    for seed in options.seed or [0, 1]:
        bench = DecomposeBench(images.holdout(held_out, 0), seed, options, deadline)
        for complete in bench.all():
            write(out, setting, done + bench.rows, where)
            if complete and options.test:
                look_at_test(bench, images)
        done += bench.rows
        write(out, setting, done, where)
    show(summary(done))
    return None


if __name__ == "__main__":
    main()
