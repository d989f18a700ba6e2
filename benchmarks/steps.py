"""Do strips gain from learning rates of their own (Qiu et al. 2024)? `lr` and a thin network, by three optimizers.

    python -m benchmarks.steps --network resnet18 --data FOLDER --out benchmarks/results/steps_resnet18.json \
        [--processes 8] [--budget 500]

By each optimizer three ways try the same factors on held-out images, and train with all seeds at their best:

- thin: the thin dense network of the time of `lr`, by factors of the learning rate;
- lr: by the same factors;
- strips: `lr` at the recipe's rate, with factors of `strip_rate`.

"steps" in `lowrank_cnn/choose/questions.json` is the question.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import run_command, training_parser
from benchmarks.run_book import (
    FULL,
    Key,
    Row,
    RunBook,
    compare_ways,
    finite,
    kept_answers,
    split_for_tries,
    timed,
)
from lowrank_cnn.choose.candidates import FAMILIES, Builder, find_design
from lowrank_cnn.choose.runs import train
from lowrank_cnn.choose.verdict import read_questions
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.train import Recipe, get_recipe
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import parse_settings

WAYS = THIN, ONE_RATE, STRIPS = "thin", "lr", "strips"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"lr": 0.002, "momentum": 0.9, "nesterov": False},
    "muon": {"lr": 0.02, "momentum": 0.9},
}
"""What each changes in the recipe, which is one of SGD."""


@dataclass(frozen=True)
class Steps:
    """Trains one network each way, on images to try on and on all of them."""

    family: str
    rival: str
    recipe: Recipe
    data: Data
    held_out: Data
    device: str
    width: float = 1.0

    def __call__(self, key: Key) -> Row:
        """The row of one run, in values that JSON can hold."""
        return timed(lambda: finite(lambda: self.run(key)))

    def run(self, key: Key) -> Row:
        optimizer, way = key["way"].split()
        recipe = replace(self.recipe, optimizer=optimizer, **OPTIMIZERS[optimizer])
        rate = key["rate"]
        if way == STRIPS:
            recipe, rate = replace(recipe, strip_rate=rate), 1.0
        data = self.data if key["phase"] == FULL else self.held_out
        size = image_size(data.test, augmentation(recipe))
        assert size is not None
        build = Builder.of_family(FAMILIES[self.family], size, len(data.classes), recipe.norm, self.width)
        torch.manual_seed(key["seed"])
        network = build(find_design(self.rival if way == THIN else "lr"))
        record = train(network, data, recipe, rate=rate, seed=key["seed"], device=self.device)
        assert record.right is not None
        return {**kept_answers(record.right), "diverged": False}


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    asked = read_questions()["steps"]
    rival = next(one["rival"] for one in asked["sets"] if one["family"] == options.network)
    recipe = get_recipe(options.recipe, **parse_settings(options.settings))
    data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    data, held_out = split_for_tries(data)
    about = {"network": options.network, "rival": rival, "width": options.width, "limit": options.limit}
    about |= {"recipe": recipe.to_dict(), "data": data.name}
    book = RunBook(options.out, "steps", about, options.budget)
    bench = Steps(options.network, rival, recipe, data, held_out, options.device, options.width)
    ways = [f"{optimizer} {way}" for optimizer in asked["optimizers"] for way in WAYS]
    pairs = [(f"{one} {STRIPS}", f"{one} {other}") for one in asked["optimizers"] for other in (ONE_RATE, THIN)]
    compare_ways(book, bench, ways, pairs, asked, options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    seeds = read_questions()["steps"]["seeds"]
    made = training_parser(__doc__, "steps.json", network="resnet18", recipe="tiny-fast", seeds=seeds)
    return made.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
