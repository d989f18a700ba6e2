"""Learned shapes against hand-made shares and thinner networks, all with the same share of the dense MACs.

    python -m benchmarks.learned_shapes --data FOLDER --network nin --recipe nin-modern --macs 0.4 --seeds 4

Every way is trained by the same recipe, with the same seeds:

- dense: the network as it is;
- thin: the dense network with fewer filters in every layer;
- strips: a fixed share of kx1, 1xk and kxk filters in every layer; points: of 1x1 and kxk filters;
- loss: shapes learned by `learn_shapes`, their damage measured on batches; again: those, trained from scratch;
- energy: the same, by the energy of the weights; no regrowth: by energy, and masked taps learn nothing;
- proximal: no masks at first; taps outside each filter's best shape are shrunk after every epoch;
- none: as `loss`, and filters may be removed.

Started again, it goes on with what is missing. `--time` also times every network through `optimize`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

import torch
from torch import nn

from lowrank_cnn.data import Data, open_data
from lowrank_cnn.frontier.training import free_memory, right_answers
from lowrank_cnn.method import shaping
from lowrank_cnn.method.converting import convert
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.scheme import Scheme
from lowrank_cnn.method.settling import LearnedShapes
from lowrank_cnn.method.shape_damage import shaped_convs
from lowrank_cnn.method.thinning import thin
from lowrank_cnn.models import create_model
from lowrank_cnn.system.clock import measure
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.files import write_json
from lowrank_cnn.system.text import text_table
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train import learning_shapes as learning
from lowrank_cnn.train.inputs import augmentation, input_size
from lowrank_cnn.train.settings import parse_settings

OUT = Path(__file__).parent / "results" / "learned_shapes.json"
SHAPES = ("kx1", "1xk", "1x1", "kxk")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--network", default="nin")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--recipe", default="modern")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="field=value of the recipe")
    parser.add_argument("--macs", type=float, default=0.4)
    parser.add_argument("--multiple", type=int, default=8)
    parser.add_argument("--limit", type=int, help="images of each split")
    parser.add_argument("--image-size", type=int, help="bring images to this square")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    data = open_data(options.data, limit=options.limit, image_size=options.image_size, progress=False)
    recipe = get_recipe(options.recipe, **parse_settings(options.settings))
    bench = ShapeBench(data, recipe, options)
    about = {name: getattr(options, name) for name in ("network", "width", "macs", "multiple", "limit", "seeds")}
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    about |= {"recipe": recipe.to_dict(), "data": data.name, "environment": environment()}
    rows: list[dict[str, Any]] = known.get("rows", [])
    for seed in range(options.seeds):
        for way in options.ways:
            if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                continue
            rows.append(bench.run(way, seed, rows))
            write_json(options.out, {**about, "rows": rows})
            print(f"{way} {seed}: {rows[-1]['top1']:.4f} at {rows[-1]['macs']:.3f}", flush=True)
    print(_table(rows))


class ShapeBench:
    """Trains one way after the other on one set of images."""

    def __init__(self, data: Data, recipe: Recipe, options: argparse.Namespace) -> None:
        self.data, self.recipe, self.options = data, recipe, options
        self.size = input_size(data.test, augmentation(recipe))
        self.how: dict[str, Any] = {"progress": False, "device": options.device, "compile": False}

    def dense(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = {"num_classes": len(self.data.classes), "in_channels": self.size[0], "image_size": self.size[1]}
        return create_model(self.options.network, **made, width=self.options.width, **self.recipe.network())

    def run(self, way: str, seed: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The result of one run, in values that JSON can hold."""
        network, shapes = WAYS[way](self, seed, rows)
        right = right_answers(network, self.data, self.recipe.precision)
        row = {
            "way": way,
            "seed": seed,
            "top1": float(right.double().mean()),
            "macs": count(network, self.size).macs / count(self.dense(seed), self.size).macs,
            "params": count(network, self.size).params,
            "shapes": shapes.to_dict()["learned_shapes"] if shapes else None,
            **({"ms": self.ms(network)} if self.options.time else {}),
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
        assert best is not None, "the budget is below what these shapes cost"
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


class Proximal(learning.ShapeSchedule):
    """Shrinks the taps outside each filter's best shape, and puts masks on at the last choice."""

    @torch.no_grad()
    def __call__(self, row: Any, network: nn.Module) -> None:
        if row.epoch >= self.last:
            return super().__call__(row, network) if row.epoch == self.last else None
        self.chooser.choose(network, self.target)
        for layer in shaped_convs(network).values():
            outside = 1 - layer.masks[layer.choice][:, None]
            layer.weight.sub_(layer.weight * outside * (row.epoch / self.last) ** 2)
            layer.choice.fill_(layer.starts.index(layer.form.kernel))
        return None


@contextlib.contextmanager
def without_regrowth() -> Iterator[None]:
    with mock.patch.object(shaping, "_straight_through", lambda weight, mask: weight * mask):
        yield


def _no_regrowth(bench: ShapeBench, seed: int, _: Any) -> tuple[nn.Module, LearnedShapes]:
    with without_regrowth():
        return bench.learned(seed, by="energy")


def _proximal(bench: ShapeBench, seed: int, _: Any) -> tuple[nn.Module, LearnedShapes]:
    with mock.patch.object(learning, "ShapeSchedule", Proximal):
        return bench.learned(seed, by="energy")


def _again(bench: ShapeBench, seed: int, rows: list[dict[str, Any]]) -> tuple[nn.Module, LearnedShapes]:
    from lowrank_cnn.method.scheme import parse_scheme

    row = next(row for row in rows if (row["way"], row["seed"]) == ("loss", seed))
    shapes = LearnedShapes({name: parse_scheme(text) for name, text in row["shapes"].items()})
    return bench.trained(shapes.apply(bench.dense(seed)), seed), shapes


def _thin(bench: ShapeBench, seed: int, _: Any) -> tuple[nn.Module, None]:
    network = thin(bench.dense(seed), macs=bench.options.macs, input_size=bench.size, multiple=1)
    return bench.trained(network, seed), None


WAYS: dict[str, Callable[[ShapeBench, int, Any], tuple[nn.Module, LearnedShapes | None]]] = {
    "dense": lambda bench, seed, _: (bench.trained(bench.dense(seed), seed), None),
    "thin": _thin,
    "strips": lambda bench, seed, _: (bench.fixed(seed, ("kx1", "1xk")), None),
    "points": lambda bench, seed, _: (bench.fixed(seed, ("1x1",)), None),
    "loss": lambda bench, seed, _: bench.learned(seed),
    "again": _again,
    "energy": lambda bench, seed, _: bench.learned(seed, by="energy"),
    "no regrowth": _no_regrowth,
    "proximal": _proximal,
    "none": lambda bench, seed, _: bench.learned(seed, (*SHAPES, "none")),
}


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


if __name__ == "__main__":
    main()
