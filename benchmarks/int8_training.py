"""Training with int8 layers against as much training in float, for a network that int8 makes less accurate.

    python -m benchmarks.int8_training --data cifar10

The shipped `nin` is decomposed by CP, which gives it depthwise strips. The decomposed network is trained further
for the same steps, on the same images and at the same rate, once in float and once with `fit(...,
quantize="int8")`. `lr.quantize` writes all of them, and every file runs on the same test images. *All layers*
quantises every layer; *as usual* leaves up to three in float, as `lr.quantize` does by default.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lowrank_cnn as lr
from benchmarks.common import parser, run_command, write_record
from benchmarks.int8_accuracy import BATCH, correct, paired
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.data.types import stratified
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import Trained, carried_by

MOST_LOSS = {"all layers": math.inf, "as usual": 0.3}
"""Points that may be lost before a layer goes back to float."""
CALIBRATION = 256
WAYS = (("none", "all layers"), ("int8", "all layers"), ("float", "all layers"), ("float", "as usual"))
"""How the network was trained on, and which of its layers are in int8."""


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    data = open_data(options.data, progress=False)
    data = replace(data, test=data.test.subset(torch.arange(min(options.test, len(data.test)))))
    start = decomposed(options)
    setting = {name: value for name, value in vars(options).items() if name not in ("data", "out")}
    setting |= {"macs": lr.count(start.network, start.input_size).macs}
    networks = {"none": start}
    rows: list[dict[str, Any]] = []
    answers: dict[tuple[str, str], torch.Tensor] = {}
    for training, layers in WAYS:
        if training not in networks:
            networks[training] = trained_on(start, data, training, options)
        trained = networks[training]
        in_float, after = int8_answers(trained, data, MOST_LOSS[layers])
        answers[training, layers] = after
        rows.append({"training": training, "layers": layers, "in_float": in_float})
        rows[-1] |= paired(correct(trained.network.eval(), trained, data), after)
        print(f"{training}, {layers}: {rows[-1]['before']:.2%} to {rows[-1]['after']:.2%}", flush=True)
        if (best := answers.get(("int8", "all layers"))) is not None:
            for row in rows:
                row["int8_training_gains"] = paired(best, answers[row["training"], row["layers"]])
        write_record(options.out, "int8-training", setting=setting, rows=rows)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "int8_training.json")
    made.add_argument("--data", default="cifar10")
    made.add_argument("--network", default="nin")
    made.add_argument("--scheme", default="cp(m=96)")
    made.add_argument("--images", type=int, default=2560, help="training images of an epoch")
    made.add_argument("--epochs", type=int, default=1)
    made.add_argument("--rate", type=float, default=0.0003, help="the learning rate of both trainings")
    made.add_argument("--test", type=int, default=2000, help="test images, from the first on")
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args(arguments)


def decomposed(options: argparse.Namespace) -> Trained:
    """The shipped network, its filters replaced by the nearest low-rank ones."""
    trained = lr.load_pretrained(options.network, "cifar10")
    torch.manual_seed(options.seed)
    return replace(trained, network=lr.decompose(trained.network.eval(), options.scheme).eval())


def trained_on(start: Trained, data: Data, training: str, options: argparse.Namespace) -> Trained:
    """A copy of the network, trained on for some steps in float or with int8 layers."""
    few = replace(
        data,
        train=data.train.subset(stratified(data.train.labels, options.images, seed=options.seed)),
        test=data.test.subset(torch.arange(min(BATCH, len(data.test)))),  # the files are measured on the whole set
    )
    network = copy_with(start.network)
    lr.fit(
        network,
        few,
        recipe_of(start.recipe, options),
        quantize="int8" if training == "int8" else None,
        seed=options.seed,
        device="cpu",
        progress=False,
    )
    found = carried_by(network)
    assert found is not None
    return found


def recipe_of(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe of the network's own training, for a few steps at a low rate."""
    return replace(
        recipe, epochs=options.epochs, lr=options.rate, batch_size=64, warmup=0.0, ema=0.0, evaluate_every=1
    )


def int8_answers(trained: Trained, data: Data, most_loss: float) -> tuple[list[str], torch.Tensor]:
    """The layers in float of the int8 file, and whether it classifies each test image correctly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        few = data
        if math.isinf(most_loss):  # no held-out images are needed, since no layer returns to float
            few = replace(data, train=data.train.subset(stratified(data.train.labels, 2 * CALIBRATION, seed=0)))
        found = lr.quantize(trained, few, path, images=CALIBRATION, test=BATCH, most_loss=most_loss)
        return list(found.in_float), correct(lr.load(path), trained, data)


if __name__ == "__main__":
    run_command(main)
