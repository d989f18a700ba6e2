"""Low rank by an L1 penalty and truncation (Rigamonti et al. 2013), against low rank from scratch.

    python -m benchmarks.truncated --data FOLDER [--network nin] [--set epochs=15] [--processes 4]

Each way trains for the same epochs, and its network has the multiply-accumulates of `lr`:

- lr: from scratch;
- truncated: dense for two thirds of the epochs, then the nearest separable filters, trained on with a tenth of the
  learning rate;
- penalty: likewise, but after each dense epoch the singular values of the layers' filters move towards zero. That
  is the proximal step of an L1 penalty on them.

On held-out images lr and truncated try factors of the learning rate, and penalty as many strengths, the cubes of
these factors. Question and margin are in `lowrank_cnn/choose/questions.json`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import lowrank_cnn as lr
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
from lowrank_cnn.choose.runs import release_memory
from lowrank_cnn.choose.verdict import read_questions
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import parse_settings
from lowrank_cnn.train.run_folder import Epoch

WAYS = ("lr", "truncated", "penalty")
STRENGTH = 1e-3
"""Of the penalty on singular values, at a factor of 1: twice the weight decay in `nin-modern`."""
DENSE, AFTER = 2 / 3, 0.1
"""The share of the epochs before the truncation, and of the learning rate after it."""


@dataclass(frozen=True)
class Truncation:
    """Trains one network each way, on images to try on and on all of them."""

    family: str
    recipe: Recipe
    data: Data
    held_out: Data
    device: str
    width: float = 1.0

    def __call__(self, key: Key) -> Row:
        """The row of one run, in values that JSON can hold."""
        return timed(
            lambda: finite(lambda: self.run(key["way"], key["rate"], key["seed"], full=key["phase"] == FULL))
        )

    def run(self, way: str, factor: float, seed: int, *, full: bool) -> Row:
        """The accuracy of one run, and the share of the MACs that its network has."""
        data = self.data if full else self.held_out
        recipe = self.recipe if way == "penalty" else replace(self.recipe, lr=factor * self.recipe.lr)
        recipe = replace(recipe, evaluate_every=recipe.epochs)
        size = image_size(data.test, augmentation(recipe))
        assert size is not None
        build = Builder.of_family(FAMILIES[self.family], size, len(data.classes), recipe.norm, self.width)
        macs = {name: build.count(find_design(name)).macs for name in ("dense", "lr")}
        how = {"seed": seed, "device": self.device, "progress": False}
        torch.manual_seed(seed)
        network = build(find_design("lr" if way == "lr" else "dense"))
        if way != "lr":
            before = replace(recipe, epochs=max(1, round(DENSE * recipe.epochs)))
            steps = len(data.train) // recipe.batch_size
            shrink = Shrink(STRENGTH * factor**3 * steps) if way == "penalty" else None
            fit(network, data, before, callbacks=[shrink] if shrink else [], **how)
            network = lr.decompose(network.cpu(), "separable", macs=macs["lr"] / macs["dense"], input_size=size)
            left = recipe.epochs - before.epochs
            recipe = replace(
                recipe, epochs=max(1, left), lr=AFTER * recipe.lr, warmup=0.0, evaluate_every=recipe.epochs
            )
        record = fit(network, data, recipe, **how)
        assert record.right is not None
        cost = lr.count(network, size).macs / macs["dense"]
        release_memory()
        return {**kept_answers(record.right), "macs": cost, "diverged": False}


@dataclass(frozen=True)
class Shrink:
    """After an epoch, move the singular values of all spatial filters towards zero, by this times the rate."""

    strength: float

    @torch.no_grad()
    def __call__(self, row: Epoch, network: nn.Module) -> None:
        assert row.lr is not None
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d) and max(layer.kernel_size) > 1:
                layer.weight.copy_(shrunk(layer.weight, row.lr * self.strength))


def shrunk(weight: Tensor, by: float) -> Tensor:
    """Filters whose matrix [channels x columns, filters x rows] has smaller singular values; small ones are zero.

    Its rank is the number of filters that a separable pair with the same result has.
    """
    matrix = weight.permute(1, 3, 0, 2)
    left, values, right = torch.linalg.svd(matrix.flatten(2).flatten(0, 1).double(), full_matrices=False)
    smaller = (left * (values - by).clamp_min(0)) @ right
    return smaller.view(matrix.shape).permute(2, 0, 3, 1).to(weight.dtype)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    asked = read_questions()["paper"]["truncated"]
    recipe = get_recipe(options.recipe, **parse_settings(options.settings or ["epochs=15"]))
    data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    data, held_out = split_for_tries(data)
    about = {"network": options.network, "width": options.width, "limit": options.limit}
    about |= {"recipe": recipe.to_dict(), "data": data.name}
    book = RunBook(options.out, "truncated", about, options.budget)
    bench = Truncation(options.network, recipe, data, held_out, options.device, options.width)
    compare_ways(book, bench, WAYS, [("lr", "penalty"), ("penalty", "truncated")], asked, options)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    seeds = read_questions()["paper"]["truncated"]["seeds"]
    made = training_parser(__doc__, "truncated.json", network="nin", recipe="nin-modern", seeds=seeds)
    return made.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
