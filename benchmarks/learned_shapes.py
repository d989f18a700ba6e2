"""Learned shapes against hand-made shares and thinner networks, all with the same share of the dense MACs.

    python -m benchmarks.learned_shapes --data FOLDER --network nin --recipe nin-modern --macs 0.55 --seeds 4

Every way is trained by the same recipe, with the same seeds:

- dense: the network as it is;
- thin: the dense network with fewer filters in every layer;
- strips: a fixed share of kx1, 1xk and kxk filters in every layer; points: of 1x1 and kxk filters;
- proximal: shapes learned by `learn_shapes`, the taps outside them shrunk after every epoch; again: those shapes,
  trained from scratch;
- loss: masks from the first epoch on, the damage of shapes measured on batches;
- regrowth: as `loss`, and masked taps go on learning; energy: as `loss`, by the energy of the weights;
- gates: filters draw their shapes by Gumbel-softmax, and learn which draws serve the loss;
- none: as `proximal`, and filters may be removed.

`--data stripes` makes images whose classes differ along rows alone: there the right shape is known to be 1xk, and
`rows` in the record is the share of filters that took it.

The record is written after every run; started again, the command trains what is missing. `--budget 300` begins no
run that would not end within 300 seconds. `--time` also times the networks of the first seed through `optimize`.
At the end it answers the questions of `lowrank_cnn/frontier/questions.json`: does a learned way beat every rival?
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from fractions import Fraction
from statistics import mean, stdev
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.common import parser
from benchmarks.run_book import BudgetSpent, RunBook, kept_answers, paired_answers
from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.frontier.answering import read_questions
from lowrank_cnn.frontier.training import free_memory, right_answers
from lowrank_cnn.method.converting import convert
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.method.settling import LearnedShapes
from lowrank_cnn.method.shaping import ShapedConv2d
from lowrank_cnn.method.thinning import thin
from lowrank_cnn.models import create_model
from lowrank_cnn.system.clock import measure
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import text_table
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train import learning_shapes as learning
from lowrank_cnn.train.inputs import augmentation, input_size
from lowrank_cnn.train.settings import parse_settings

SHAPES = ("kx1", "1xk", "1x1", "kxk")
KIND = "learned-shapes"


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.data == "stripes":
        data = stripes(options.limit or 1024)
    else:
        data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    recipe = get_recipe(options.recipe, **parse_settings(options.settings))
    about = {name: getattr(options, name) for name in ("network", "width", "macs", "multiple", "limit")}
    book = RunBook(options.out, KIND, {**about, "recipe": recipe.to_dict(), "data": data.name}, options.budget)
    bench = ShapeBench(data, recipe, options, book)
    _train_all(bench)
    answers = judged(book)
    book.save(answers=answers)
    print(_table(book.rows), _answer_table(answers), sep="\n\n")


def _train_all(bench: ShapeBench) -> None:
    """The first seed of every way, then the second. A way that the budget of MACs rules out is left out."""
    book, options = bench.book, bench.options
    ways = list(options.ways)
    try:
        for seed in range(options.seeds):
            for way in list(ways):
                try:
                    book.run(lambda way=way, seed=seed: bench.run(way, seed), way=way, seed=seed)
                except LowRankError as error:
                    ways.remove(way)
                    print(f"{way} is left out: {error}", flush=True)
    except BudgetSpent:
        print(f"The budget of {options.budget:.0f} s is spent: the same command continues.")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "learned_shapes.json")
    made.add_argument("--data", required=True)
    made.add_argument("--network", default="nin")
    made.add_argument("--width", type=float, default=1.0)
    made.add_argument("--recipe", default="modern")
    made.add_argument("--set", dest="settings", action="append", default=[], help="field=value of the recipe")
    made.add_argument("--macs", type=float, default=0.4)
    made.add_argument("--multiple", type=int, default=8)
    made.add_argument("--limit", type=int, help="images of each split")
    made.add_argument("--image-size", type=int, help="bring images to this square")
    made.add_argument("--seeds", type=int, default=4)
    made.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    made.add_argument("--device", default="auto")
    made.add_argument("--time", action="store_true")
    made.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    return made.parse_args(arguments)


def stripes(count: int, *, side: int = 16, noise: float = 160.0) -> Data:
    """Images whose rows are square waves that begin anywhere, under noise; the class is the length of the wave.

    Rows do not depend on each other, so that only taps along a row tell classes apart.
    """

    def split(seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 4
        places = torch.randint(0, 24, (count, side, 1), generator=draw) + torch.arange(side)
        waves = (places // (1 + labels)[:, None, None] % 2).float()[:, None]
        images = 64 + 128 * waves + noise * torch.randn(waves.shape, generator=draw)
        return ResidentSplit.of(images.clamp(0, 255).to(torch.uint8), labels)

    return Data("stripes", ("1", "2", "3", "4"), split(0), split(1))


def rows_share(shapes: LearnedShapes) -> float:
    """The share of filters that are wider than high."""
    groups = [(shape.split("x"), n) for scheme in shapes.convs.values() for shape, n in scheme.shapes]
    spatial = [(int(w) > int(h), n) for (h, w), n in groups if (h, w) != ("1", "1")]
    return float(sum(n for wide, n in spatial if wide) / max(1, sum(n for _, n in spatial)))


def judged(book: RunBook) -> list[dict[str, Any]]:
    """The questions that were written down before the runs: each learned way against each rival."""
    asked = read_questions()["learned_shapes"]
    runs = {way: [row for row in book.rows if row["way"] == way] for way in WAYS}
    pairs = [(way, rival) for way in LEARNED for rival in asked["rivals"]]
    return paired_answers(pairs, runs, margin=asked["better_by"], alpha=asked["alpha"])


class ShapeBench:
    """Trains one way after the other on one set of images."""

    def __init__(self, data: Data, recipe: Recipe, options: argparse.Namespace, book: RunBook) -> None:
        self.data, self.recipe, self.options, self.book = data, recipe, options, book
        self.size = input_size(data.test, augmentation(recipe))
        self.how: dict[str, Any] = {"progress": False, "device": options.device, "compile": False}

    def dense(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = {"num_classes": len(self.data.classes), "in_channels": self.size[0], "image_size": self.size[1]}
        return create_model(self.options.network, **made, width=self.options.width, **self.recipe.network())

    def run(self, way: str, seed: int) -> dict[str, Any]:
        """The result of one run, in values that JSON can hold."""
        network, shapes = WAYS[way](self, seed)
        right = right_answers(network, self.data, self.recipe.precision)
        cost = count(network, self.size)
        row = {
            **kept_answers(right),
            "macs": cost.macs / count(self.dense(seed), self.size).macs,
            "params": cost.params,
            "shapes": shapes.to_dict()["learned_shapes"] if shapes else None,
            **({"rows": rows_share(shapes)} if shapes and self.data.name == "stripes" else {}),
            **({"ms": self.ms(network)} if self.options.time and seed == 0 else {}),
        }
        free_memory()
        return row

    def trained(self, network: nn.Module, seed: int) -> nn.Module:
        fit(network, self.data, self.recipe, seed=seed, **self.how)
        return network

    def learned(
        self, seed: int, shapes: tuple[str, ...] = SHAPES, **options: Any
    ) -> tuple[nn.Module, LearnedShapes]:
        found = learning.learn_shapes(
            self.dense(seed), self.data, self.recipe, macs=self.options.macs, shapes=shapes, seed=seed,
            multiple=self.options.multiple, **options, **self.how,
        )  # fmt: skip
        return found.network, found.shapes

    def fixed(self, seed: int, strips: tuple[str, ...]) -> nn.Module:
        """The share of kxk filters, the same in every layer, that meets the budget."""
        dense = self.dense(seed)
        target, best = self.options.macs * count(dense, self.size).macs, None
        for part in range(65):
            shapes = tuple((shape, Fraction(64 - part, len(strips))) for shape in strips if part < 64)
            shapes += (("kxk", Fraction(part)),) if part else ()
            torch.manual_seed(seed)
            network = convert(dense, Scheme("mixture", shapes), allow_costlier=True)
            if count(network, self.size).macs <= target:
                best = network
        if best is None:
            raise LowRankError(f"macs={self.options.macs:g} is below what filters of {', '.join(strips)} cost.")
        return self.trained(best, seed)

    def ms(self, network: nn.Module) -> dict[str, float]:
        """Milliseconds of a batch through `optimize`, beside the dense network in turns."""
        from lowrank_cnn.deploy.optimizing import optimize

        device = next(network.parameters()).device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        images = torch.randn(256 if device.type == "cuda" else 1, *self.size, device=device, dtype=dtype)
        images = images.contiguous(memory_format=torch.channels_last)
        runs = {}
        for name, one in {"ours": network, "dense": self.dense(0)}.items():
            fast = optimize(copy.deepcopy(one).to(device, dtype).eval(), images)
            runs[name] = lambda fast=fast: fast(images)
        return {name: sample.ms for name, sample in measure(runs, repeats=21, cuda=images.is_cuda).items()}


def _regrowth(bench: ShapeBench, seed: int) -> tuple[nn.Module, LearnedShapes]:
    with mock.patch.object(ShapedConv2d, "regrow", True):
        return bench.learned(seed, by="loss")


def _again(bench: ShapeBench, seed: int) -> tuple[nn.Module, LearnedShapes]:
    row = bench.book.run(lambda: bench.run("proximal", seed), way="proximal", seed=seed)
    shapes = LearnedShapes({name: parse_scheme(text) for name, text in row["shapes"].items()})
    return bench.trained(shapes.apply(bench.dense(seed)), seed), shapes


def _thin(bench: ShapeBench, seed: int) -> tuple[nn.Module, None]:
    network = thin(bench.dense(seed), macs=bench.options.macs, input_size=bench.size, multiple=1)
    return bench.trained(network, seed), None


WAYS: dict[str, Callable[[ShapeBench, int], tuple[nn.Module, LearnedShapes | None]]] = {
    "dense": lambda bench, seed: (bench.trained(bench.dense(seed), seed), None),
    "thin": _thin,
    "strips": lambda bench, seed: (bench.fixed(seed, ("kx1", "1xk")), None),
    "points": lambda bench, seed: (bench.fixed(seed, ("1x1",)), None),
    "proximal": lambda bench, seed: bench.learned(seed, by="proximal"),
    "again": _again,
    "loss": lambda bench, seed: bench.learned(seed, by="loss"),
    "energy": lambda bench, seed: bench.learned(seed, by="energy"),
    "gates": lambda bench, seed: bench.learned(seed, by="gates"),
    "regrowth": _regrowth,
    "none": lambda bench, seed: bench.learned(seed, (*SHAPES, "none")),
}
LEARNED = tuple(WAYS)[4:]


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for way in WAYS:
        found = [row for row in rows if row["way"] == way]
        if found:
            scores = [100 * row["top1"] for row in found]
            spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            lines.append(
                (way, f"{mean(row['macs'] for row in found):.3f}", f"{mean(scores):.2f}{spread}", len(found))
            )
    return text_table(("way", ">of the MACs", ">top-1 %", ">n"), lines)


def _answer_table(answers: list[dict[str, Any]]) -> str:
    lines = [
        (
            f"{one['ours']} over {one['theirs']} by {one['margin']:g}",
            f"{one['gap']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})",
            f"{one['corrected']:.4f}",
            one["verdict"],
        )
        for one in answers
    ]
    return text_table(("question", ">gap, 99% interval", ">p, corrected", "verdict"), lines)


if __name__ == "__main__":
    main()
