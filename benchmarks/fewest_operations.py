"""The fewest operations, and seconds, in which training reaches an accuracy: low-rank against dense.

    python -m benchmarks.fewest_operations --data CIFAR10 --ways "dense 12" "dense 10" "mixture 12" "mixture 14"

A way is a design of `lowrank frontier`, a number of epochs, and changes to the recipe: `"dense 8 optimizer=muon
lr=0.24"`. Dense and low-rank ways get the same number of tries on held-out training images. On each side, the way
with the fewest operations whose tries reach the target is then trained on all images, and tested; if none reaches
it, the most accurate one. Tries train on fewer images than full runs, so their target is lower: by as much as the
tries of the first way are below `--known`, its accuracy on test images in earlier runs.

Training counts as three times the operations of the network on each image: forward, and two gradients. Seconds are
taken only from runs that had the device to themselves (`--processes 1`); `--seeds 3 --processes 1`, then `--seeds
100 --processes 4`, gives both. The record is written after every run; started again, the command trains what is
missing. The target is that of `lowrank_cnn/choose/questions.json`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import run_command, training_parser
from benchmarks.initialisation import shortened
from benchmarks.run_book import (
    FULL,
    TRY,
    TUNING_SEED,
    Key,
    Row,
    RunBook,
    finite,
    kept_answers,
    split_for_tries,
    timed,
)
from lowrank_cnn.choose.candidates import Builder, Design, find_design, find_family
from lowrank_cnn.choose.runs import WorkerPool, release_memory
from lowrank_cnn.choose.trace import BudgetSpent
from lowrank_cnn.choose.verdict import read_questions
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import mean_interval
from lowrank_cnn.core.text import text_table
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import changed, parse_settings

KIND = "fewest-operations"
FLOP, PASSES = 2, 3
"""Floating-point operations of a multiply-accumulate, and passes of a training step: forward, two gradients."""


@dataclass(frozen=True)
class Way:
    """A design and the recipe that it is trained by."""

    design: Design
    recipe: Recipe


def parse_way(text: str, recipe: Recipe) -> Way:
    """`"mixture 10 lr=2"`: a design, its epochs, and settings that differ from the recipe's.

    Drops and warm-up of the learning rate stay at the same share of the run.
    """
    name, epochs, *settings = text.split() if len(text.split()) > 1 else (text, "")
    if not epochs.isdecimal() or not int(epochs):
        raise LowRankError(f'a way is a design and a number of epochs, as in "mixture 10", not {text!r}.')
    return Way(find_design(name), changed(shortened(recipe, int(epochs)), parse_settings(settings)))


@dataclass(frozen=True)
class OperationBench:
    """Trains designs of one family, on images to choose a way by and on all of them."""

    builder: Builder
    recipe: Recipe
    data: Data
    held_out: Data
    device: str
    alone: bool

    def __call__(self, key: Key) -> Row:
        """The row of one run, in values that JSON can hold."""
        return timed(lambda: finite(lambda: self.run(key)))

    def run(self, key: Key) -> Row:
        """The accuracy of one run, and its seconds if nothing else used the device."""
        way, seed = parse_way(key["way"], self.recipe), key["seed"]
        data = self.data if key["phase"] == FULL else self.held_out
        recipe = replace(way.recipe, evaluate_every=way.recipe.epochs)  # the test images are used once
        torch.manual_seed(seed)
        network = self.builder(way.design)
        record = fit(network, data, recipe, seed=seed, device=self.device, progress=False, compile=False)
        assert record.right is not None
        row = kept_answers(record.right)
        seconds = recipe.epochs * len(data.train) / record.result["images_per_second"] if self.alone else None
        release_memory()
        return {**row, "seconds": seconds}

    def petaflop(self, text: str) -> float:
        """The operations of a full run, in 10^15."""
        way = parse_way(text, self.recipe)
        macs = self.builder.count(way.design).macs
        return FLOP * PASSES * macs * len(self.data.train) * way.recipe.epochs / 1e15


def train_all(bench: OperationBench, book: RunBook, options: argparse.Namespace) -> None:
    """Tries of all ways, then full runs of the cheapest way of each side that reaches the target."""
    places = range(TUNING_SEED, TUNING_SEED + options.tries)
    try:
        with WorkerPool(bench, options.processes) as pool:
            book.make(pool, [{"way": way, "phase": TRY, "seed": s} for s in places for way in options.ways])
            chosen = chosen_ways(bench, book, options)
            seeds = range(1, options.seeds + 1)
            book.make(pool, [{"way": way, "phase": FULL, "seed": s} for s in seeds for way in chosen])
    except BudgetSpent:
        print(f"The budget of {options.budget:.0f} s is spent: the same command continues.")


def chosen_ways(bench: OperationBench, book: RunBook, options: argparse.Namespace) -> list[str]:
    """The way of each side, dense and low-rank, that is trained on all images."""
    found = {way: _mean(book.of(TRY, way=way)) for way in options.ways}
    gap = 0.0 if options.known is None else options.known - found[options.ways[0]]
    target = options.target - gap
    chosen = []
    for dense in (True, False):
        side = [way for way in options.ways if parse_way(way, bench.recipe).design.dense is dense]
        reached = [way for way in side if found[way] >= target]
        if reached:
            chosen.append(min(reached, key=bench.petaflop))
        elif side:
            chosen.append(max(side, key=found.__getitem__))
    return chosen


def _mean(rows: list[Row]) -> float:
    """Accuracy in percent; a run that diverged got nothing right."""
    return 100 * fmean(row["top1"] or 0.0 for row in rows) if rows else 0.0


def summary(bench: OperationBench, book: RunBook) -> list[dict[str, Any]]:
    """For each way: its operations, its accuracies and its seconds."""
    found = []
    for way in dict.fromkeys(row["way"] for row in book.rows):
        tries, full = book.of(TRY, way=way), book.of(FULL, way=way)
        seconds = [row["seconds"] for row in full if row["seconds"]]
        scores = [100 * (row["top1"] or 0.0) for row in full]
        design = parse_way(way, bench.recipe).design
        found.append(
            {
                "way": way,
                "dense": design.dense,
                "petaflop": bench.petaflop(way),
                "held_out": _mean(tries),
                "tries": len(tries),
                "interval": mean_interval(scores) if scores else None,
                "runs": len(full),
                # Kernels are chosen and compiled in the first run.
                "seconds": fmean(seconds[1:]) if len(seconds) > 1 else None,
            }
        )
    return sorted(found, key=lambda row: row["petaflop"])


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    recipe = get_recipe(options.recipe, **parse_settings(options.settings))
    data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    data, held_out = split_for_tries(data)
    names = ("network", "width", "limit", "target", "known")
    about = {name: getattr(options, name) for name in names} | {"recipe": recipe.to_dict(), "data": data.name}
    book = RunBook(options.out, KIND, about, options.budget)
    size = image_size(data.test, augmentation(recipe))
    builder = Builder.of_family(find_family(options.network), size, len(data.classes), recipe.norm, options.width)
    bench = OperationBench(builder, recipe, data, held_out, options.device, options.processes == 1)
    train_all(bench, book, options)
    rows = summary(bench, book)
    book.save(summary=rows)
    columns = ("way", ">PFLOP", ">held out %", ">tries", ">top-1 %", ">runs", ">s a run")
    print(text_table(columns, [_line(row) for row in rows]))


def _line(row: dict[str, Any]) -> tuple[object, ...]:
    score = "{:.2f} ({:.2f} to {:.2f})".format(*row["interval"]) if row["interval"] else ""
    seconds = f"{row['seconds']:.2f}" if row["seconds"] else ""
    return (
        row["way"],
        f"{row['petaflop']:.3f}",
        f"{row['held_out']:.2f}",
        row["tries"],
        score,
        row["runs"],
        seconds,
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    asked = read_questions()["record"]
    names = {"network": asked["family"], "recipe": find_family(asked["family"]).recipe}
    made = training_parser(__doc__, "fewest_operations.json", **names, seeds=asked["runs"])
    made.add_argument("--ways", nargs="+", required=True)
    made.add_argument("--tries", type=int, default=2, help="runs of each way on held-out images")
    made.add_argument("--target", type=float, default=asked["accuracy"], help="percent")
    made.add_argument("--known", type=float, help="percent of the first way on test images")
    return made.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
