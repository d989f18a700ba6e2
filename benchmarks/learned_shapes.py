"""Learned shapes against hand-made shares and thinner networks, all with the same share of the dense MACs.

    python -m benchmarks.learned_shapes --data FOLDER --network nin --recipe nin-modern --macs 0.55 --seeds 4

Every way is trained by the same recipe, with the same seeds. `--rates 0.5 1 2` lets every way try these factors of
the learning rate first, each as often, on held-out training images; then it trains at its own best rate.

- dense: the network as it is;
- thin: the dense network with fewer filters in every layer;
- strips: a fixed share of kx1, 1xk and kxk filters in every layer; points: of 1x1 and kxk filters;
- proximal: shapes learned by `learn_shapes`, the taps outside them shrunk after every epoch; again: those shapes,
  trained from scratch;
- strips-kxk: as `proximal`, without 1x1 filters.

`--data stripes` makes images whose classes differ only along rows, so the right shape is 1xk; `rows` in the record
is the share of filters that chose it.

The record is written after every run; started again, the command trains what is missing. `--budget 300` begins no
run that would not end within 300 seconds. `--train 1000` trains on 1000 images and holds out the other training
images to try rates on; without it a tenth is held out. `--processes 4` trains four networks at a time on the
device. `--time` then times the networks of the first seed through `optimize`, in turns with the dense one. If a
rival takes more or less time than the learned network, `--ways thin:0.6` adds the rival with another share of the
MACs. It ends with answers to the questions of `lowrank_cnn/choose/questions.json`: does learning beat every rival,
at equal MACs and at equal time?
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks import run_book
from benchmarks.common import run_command, training_parser
from benchmarks.run_book import FULL, TRY, Key, Row, RunBook
from benchmarks.shape_verdicts import FIXED, LEARNING, SHAPES, WAYS, base_way, judged, needs, read_way, shown
from benchmarks.stripes import rows_share, stripes
from lowrank_cnn.choose import learn_shapes as learning
from lowrank_cnn.choose.runs import WorkerPool, release_memory
from lowrank_cnn.choose.trace import BudgetSpent
from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.graph.finalize_shapes import LearnedShapes
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.method.thin import thin
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.failure import NotFiniteError
from lowrank_cnn.train.inputs import augmentation, image_size
from lowrank_cnn.train.recipe import parse_settings
from lowrank_cnn.train.run_folder import Record

KIND = "learned-shapes"
PARTS = 64
"""Shares of kxk filters are multiples of one in this many."""


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.data == "stripes":
        data = stripes(options.limit or 1024)
    else:
        data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    recipe = get_recipe(options.recipe, **parse_settings(options.settings))
    names = ("network", "width", "macs", "multiple", "limit", "train", "rates", "tries")
    about = {name: getattr(options, name) for name in names} | {"recipe": recipe.to_dict(), "data": data.name}
    book = RunBook(options.out, KIND, about, options.budget)
    bench = ShapeBench(*run_book.split_for_tries(data, options.train), recipe, options, book)
    _train_all(bench)
    if options.time:
        bench.time_all()
    verdicts = judged(book)
    book.save(**verdicts)
    print(shown(book, verdicts))


def _train_all(bench: ShapeBench) -> None:
    """The first seed of every way, then the second. A way that the budget of MACs rules out is left out."""
    book, options = bench.book, bench.options
    left_out: set[str] = set()
    ways = list(dict.fromkeys(one for way in options.ways for one in (*needs(way), way)))

    def ready(key: Key) -> bool:
        return key["way"] not in left_out and all(bench.needed(key, way) for way in needs(key["way"]))

    def failed(key: Key, error: LowRankError) -> None:
        if key["way"] not in left_out:
            left_out.add(key["way"])
            print(f"{key['way']} is left out: {error}", flush=True)

    how = {"rates": options.rates, "tries": options.tries, "seeds": range(options.seeds)}
    try:
        with WorkerPool(bench, options.processes) as pool:
            run_book.make_tuned(book, pool, "way", ways, **how, ready=ready, failed=failed)
    except BudgetSpent:
        print(f"The budget of {options.budget:.0f} s is spent: the same command continues.")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = training_parser(__doc__, "learned_shapes.json", network="nin", recipe="modern", seeds=4)
    made.add_argument("--macs", type=float, default=0.4)
    made.add_argument("--multiple", type=int, default=8)
    made.add_argument("--ways", nargs="+", type=read_way, default=list(WAYS), help=f"any of {', '.join(WAYS)}")
    made.add_argument("--rates", type=float, nargs="+", default=[1.0], help="factors of the learning rate to try")
    made.add_argument("--tries", type=int, default=1, help="runs of each rate")
    made.add_argument("--train", type=int, help="images to train on; the others are held out")
    made.add_argument("--time", action="store_true")
    made.add_argument("--no-compile", dest="compile", action="store_false", help="time without torch.compile")
    return made.parse_args(arguments)


class ShapeBench:
    """Trains one way after the other on one set of images."""

    def __init__(
        self, data: Data, held_out: Data, recipe: Recipe, options: argparse.Namespace, book: RunBook
    ) -> None:
        self.data, self.held_out, self.options, self.book = data, held_out, options, book
        self.recipe = replace(recipe, evaluate_every=recipe.epochs)  # the test images are used once, at the end
        self.size = image_size(data.test, augmentation(recipe))
        self.how: dict[str, Any] = {"progress": False, "device": options.device, "compile": False}

    def __call__(self, key: Key) -> Row:
        """The row of one run, in values that JSON can hold."""
        return run_book.timed(lambda: run_book.finite(lambda: self.run(key)))

    def needed(self, key: Key, way: str) -> Row | None:
        """The run of another way that a run needs: of the same seed, and in tries of the same rate."""
        same = ("phase", "rate", "seed") if key["phase"] == TRY else ("phase", "seed")
        return self.book.find(way=way, **{name: key[name] for name in same})

    def macs_of(self, way: str) -> float:
        """The share of the dense MACs that a way has."""
        return float(way.partition(":")[2] or self.options.macs)

    def dense(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = {"num_classes": len(self.data.classes), "in_channels": self.size[0], "image_size": self.size[1]}
        return create_model(self.options.network, **made, width=self.options.width, **self.recipe.network())

    def run(self, key: Key) -> Row:
        """The result of one run."""
        way, macs, seed = base_way(key["way"]), self.macs_of(key["way"]), key["seed"]
        data = self.held_out if key["phase"] == TRY else self.data
        recipe = replace(self.recipe, lr=key["rate"] * self.recipe.lr)
        if way in LEARNING:
            network, shapes, record = self.learned(seed, data, recipe, macs, **LEARNING[way])
        else:
            network, shapes = self.built(key)
            record = fit(network, data, recipe, seed=seed, **self.how)
        assert record.right is not None
        cost = count(network, self.size)
        row = {
            **run_book.kept_answers(record.right),
            "macs": cost.macs / count(self.dense(seed), self.size).macs,
            "params": cost.params,
            "shapes": shapes.to_dict()["learned_shapes"] if shapes else None,
            **({"scheme": str(self.fixed(FIXED[way], macs))} if way in FIXED else {}),
            **({"rows": rows_share(shapes)} if shapes and self.data.name == "stripes" else {}),
        }
        release_memory()
        return row

    def built(self, key: Key) -> tuple[nn.Module, LearnedShapes | None]:
        """A network of given shapes, with fresh weights. `again` has the shapes that `proximal` learned."""
        way, macs, dense = base_way(key["way"]), self.macs_of(key["way"]), self.dense(key["seed"])
        if way == "dense":
            return dense, None
        if way == "thin":
            return thin(dense, macs=macs, input_size=self.size, multiple=self.options.multiple), None
        if way in FIXED:
            return convert(dense, self.fixed(FIXED[way], macs), allow_costlier=True), None
        self.book.reload()  # they may have been learned by another process
        found = self.needed(key, *needs(key["way"]))
        if found is None or found["top1"] is None:
            raise NotFiniteError("the run that was to learn shapes diverged.")
        shapes = LearnedShapes({name: parse_scheme(text) for name, text in found["shapes"].items()})
        return shapes.apply(dense), shapes

    def learned(
        self, seed: int, data: Data, recipe: Recipe, macs: float, shapes: Sequence[str] = SHAPES
    ) -> tuple[nn.Module, LearnedShapes, Record]:
        found = learning.learn_shapes(
            self.dense(seed), data, recipe, macs=macs, shapes=shapes, seed=seed,
            multiple=self.options.multiple, **self.how,
        )  # fmt: skip
        return found.network, found.shapes, found.record

    @cache  # noqa: B019
    def fixed(self, strips: tuple[str, ...], macs: float) -> Scheme:
        """The largest share of kxk filters, the same in every layer, that meets the budget."""

        def scheme(part: int) -> Scheme:
            shapes = tuple((shape, Fraction(PARTS - part, len(strips))) for shape in strips if part < PARTS)
            return Scheme("mixture", shapes + ((("kxk", Fraction(part)),) if part else ()))

        with torch.device("meta"):
            dense = self.dense(0)
            target = macs * count(dense, self.size).macs

            def too_costly(part: int) -> bool:
                network = convert(dense, scheme(part), allow_costlier=True)
                return count(network, self.size).macs > target

            first = bisect_left(range(PARTS + 1), True, key=too_costly)
        if not first:
            raise LowRankError(f"macs={macs:g} is below what filters of {', '.join(strips)} cost.")
        return scheme(first - 1)

    def time_all(self) -> None:
        """Time the networks of the first seed that were not timed before, in turns with the dense network."""
        trained = [row for row in self.book.of(FULL, seed=0) if row["top1"] is not None]
        rows = {row["way"]: row for row in trained if "ms" not in row}
        if not rows:
            return
        times = self.times({"dense": self.dense(0), **{way: self.rebuilt(row) for way, row in rows.items()}})
        for way, row in rows.items():
            ours, dense = times[way], times["dense"]
            row["ms"] = {"ours": ours.ms, "low": ours.low, "high": ours.high, "dense": dense.ms}
            print(f"{way}: {ours.ms:.3f} ms, dense {dense.ms:.3f} ms", flush=True)
        self.book.note_machine()
        self.book.save()

    def rebuilt(self, row: Row) -> nn.Module:
        """The network of a run with fresh weights."""
        if not row["shapes"]:
            return self.built(row)[0]
        shapes = LearnedShapes({name: parse_scheme(text) for name, text in row["shapes"].items()})
        return shapes.apply(self.dense(0))

    def times(self, networks: Mapping[str, nn.Module]) -> dict[str, Sample]:
        """Milliseconds through `optimize`: of 256 images in bfloat16 on a GPU, of one in float32 on a CPU."""
        device = torch.device(resolve_device(self.options.device))
        batch, dtype = (256, torch.bfloat16) if device.type == "cuda" else (1, torch.float32)
        images = torch.randn(batch, *self.size, device=device, dtype=dtype)
        images = images.contiguous(memory_format=torch.channels_last)

        def fast(network: nn.Module) -> Callable[[], Any]:
            optimized = optimize(network.to(device, dtype).eval(), images, compile=self.options.compile)
            return lambda: optimized(images)

        runs = {}
        for name, network in networks.items():
            runs[name] = fast(network)
            print(f"{name} is ready to be timed", flush=True)
        return measure(runs, repeats=21, cuda=images.is_cuda)


if __name__ == "__main__":
    run_command(main)
