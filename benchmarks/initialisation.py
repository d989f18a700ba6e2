"""Initialisations, each at its best learning rate: accuracy of longer runs, and how often they diverge.

    python -m benchmarks.initialisation --data FOLDER --network nin-c3-lr --recipe nin-paper --out RECORD
    python -m benchmarks.initialisation --data FOLDER --network vgg11-gmp-lr --recipe tiny-vgg --out RECORD

The paper's initialisation (composite) is compared with He's by fan-out and by fan-in for each filter group,
torch's, and N(0, 0.05). Each tries the same factors of the recipe's learning rate, with the same seeds, on
held-out training images, in runs of a sixth of the epochs, or of `--try-epochs`. Then each trains in full at its
own best rate. A run counts as diverged if its loss is not finite, or if it ends no better than chance. The margins
are in `lowrank_cnn/choose/questions.json`.

The record is written after every run; started again, the command trains what is missing. `--budget 300` begins no
run that would not end within 300 seconds. `--epochs` shortens full runs and tries alike. `--processes 4` trains
four networks at a time on the device.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.common import run_command, training_parser
from benchmarks.run_book import (
    FULL,
    TRY,
    Key,
    Row,
    RunBook,
    answer_table,
    best_rate,
    finite,
    kept_answers,
    make_tuned,
    paired_answers,
    split_for_tries,
    timed,
)
from lowrank_cnn.choose.runs import WorkerPool, release_memory
from lowrank_cnn.choose.trace import BudgetSpent
from lowrank_cnn.choose.verdict import read_questions
from lowrank_cnn.core.text import text_table
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.method.init import INITIALISATIONS
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.inputs import augmentation, input_size
from lowrank_cnn.train.recipe import parse_settings

KIND = "initialisation"
SHORT = 1 / 6
"""The share of the epochs that a try has by default."""
CHANCE = 1.5
"""A run up to this multiple of chance accuracy has learned nothing."""


@dataclass(frozen=True)
class InitBench:
    """Trains one network from each initialisation, on images to try rates on and on all of them."""

    network: str
    recipe: Recipe
    data: Data
    held_out: Data
    device: str
    width: float = 1.0
    try_epochs: int = 1

    def __call__(self, key: Key) -> Row:
        """The row of one run, in values that JSON can hold."""
        full = key["phase"] == FULL
        return timed(lambda: finite(lambda: self.run(key["init"], key["rate"], key["seed"], full=full)))

    def run(self, init: str, rate: float, seed: int, *, full: bool) -> Row:
        """The accuracy of one run, and whether it diverged."""
        data = self.data if full else self.held_out
        recipe = self.recipe if full else shortened(self.recipe, self.try_epochs)
        recipe = replace(recipe, lr=rate * recipe.lr, evaluate_every=recipe.epochs)
        channels, side, _ = input_size(data.test, augmentation(recipe))
        torch.manual_seed(seed)
        made = {"num_classes": len(data.classes), "in_channels": channels, "image_size": side, "init": init}
        network = create_model(self.network, **made, width=self.width, **recipe.network())
        record = fit(network, data, recipe, seed=seed, device=self.device, progress=False, compile=False)
        assert record.right is not None
        row = kept_answers(record.right)
        release_memory()
        return {**row, "diverged": row["top1"] <= CHANCE / len(data.classes)}


def shortened(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe with other epochs, its drops of the rate at the same shares of the run."""
    drops = tuple(round(at * epochs / recipe.epochs) for at in recipe.drop_epochs)
    return replace(recipe, epochs=epochs, drop_epochs=drops, warmup=recipe.warmup * epochs / recipe.epochs)


def train_all(bench: InitBench, book: RunBook, options: argparse.Namespace) -> None:
    """All tries, then the first seed of all initialisations, then the second."""
    try:
        with WorkerPool(bench, options.processes) as pool:
            seeds = range(1, options.seeds + 1)
            make_tuned(book, pool, "init", options.inits, rates=options.rates, tries=options.tries, seeds=seeds)
    except BudgetSpent:
        print(f"The budget of {options.budget:.0f} s is spent: the same command continues.")


def judged(book: RunBook) -> list[dict[str, Any]]:
    """The questions that were written down before the runs: is composite better than each, or worse?"""
    asked = read_questions()["initialisation"]
    runs = {init: [row for row in book.of(FULL, init=init) if row["top1"] is not None] for init in INITIALISATIONS}
    others = [init for init in INITIALISATIONS if init != "composite"]
    pairs = [pair for init in others for pair in (("composite", init), (init, "composite"))]
    how = {"margin": asked["margin"], "alpha": asked["alpha"], "least_runs": asked["seeds"]}
    return paired_answers(pairs, runs, **how)


def summary(book: RunBook) -> list[dict[str, Any]]:
    """For each initialisation: its best rate, its accuracies, and how many runs diverged of how many."""
    found = []
    for init in dict.fromkeys(row["init"] for row in book.rows):
        tries, full = book.of(TRY, init=init), book.of(FULL, init=init)
        shares = [100 * row["top1"] for row in full if not row["diverged"]]
        values = {"init": init, "rate": best_rate(tries) if tries else None, "runs": len(full)}
        values |= {"mean": fmean(shares) if shares else None, "sd": stdev(shares) if len(shares) > 1 else None}
        lost = {
            f"diverged_{name}": sum(row["diverged"] for row in part) for name, part in ((TRY, tries), (FULL, full))
        }
        found.append(values | {"tries": len(tries)} | lost)
    return found


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    recipe = get_recipe(options.recipe, **parse_settings(options.settings))
    recipe = shortened(recipe, options.epochs) if options.epochs else recipe
    data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    data, held_out = split_for_tries(data, share=read_questions()["initialisation"]["held_out"])
    about = {name: getattr(options, name) for name in ("network", "width", "limit")}
    about |= {"recipe": recipe.to_dict(), "data": data.name}
    about["try_epochs"] = options.try_epochs or max(1, round(SHORT * recipe.epochs))
    book = RunBook(options.out, KIND, about, options.budget)
    how = {name: about[name] for name in ("width", "try_epochs")}
    bench = InitBench(options.network, recipe, data, held_out, options.device, **how)
    train_all(bench, book, options)
    rows, answers = summary(book), judged(book)
    book.save(summary=rows, answers=answers)
    print(text_table(("init", ">rate x", ">top-1 %", ">runs", ">diverged", ">in tries"), [_line(r) for r in rows]))
    print(answer_table(answers))


def _line(row: dict[str, Any]) -> tuple[object, ...]:
    mean = "" if row["mean"] is None else f"{row['mean']:.2f}"
    mean += "" if row["sd"] is None else f" ± {row['sd']:.2f}"
    tries = f"{row['diverged_try']} of {row['tries']}"
    return row["init"], row["rate"], mean, row["runs"], row["diverged_full"], tries


def _options(arguments: list[str] | None) -> argparse.Namespace:
    asked = read_questions()["initialisation"]
    names = {"network": "nin-c3-lr", "recipe": "nin-paper"}
    made = training_parser(__doc__, "initialisation.json", **names, seeds=asked["seeds"])
    made.add_argument("--inits", nargs="+", choices=list(INITIALISATIONS), default=list(INITIALISATIONS))
    made.add_argument("--rates", type=float, nargs="+", default=asked["rates"], help="factors of the recipe's")
    made.add_argument("--tries", type=int, default=asked["tries"], help="seeds of each rate")
    made.add_argument("--epochs", type=int, help="of a full run")
    made.add_argument("--try-epochs", type=int, help="of a try; a sixth of --epochs")
    return made.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
