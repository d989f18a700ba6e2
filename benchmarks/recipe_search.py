"""Try settings of a recipe on 5,000 held-out training images; the test set is not used.

    python -m benchmarks.recipe_search --data FOLDER --network nin-c3-lr --recipe nin-paper \
        --try "lr=0.1" --try "lr=0.05 weight_decay=1e-4" [--epochs 60] [--budget 300] [--out results.json]

A network is a name, with a scheme and a width if it has them: "resnet18-small lr 1.25".
Every try is one run of one seed; the record keeps all of them, the poor ones too.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn

from benchmarks.common import parser, write_record
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, open_data
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit, get_recipe
from lowrank_cnn.train.recipe import parse_settings

HELD_OUT = 5000
KEPT = ("top1", "loss", "seconds", "images_per_second")


def settled(model: nn.Module) -> None:
    """As `create_model` leaves it."""


def unsettled(model: nn.Module) -> None:
    """The class scores by the paper's rule: large weights, zero biases."""
    layer = model.get_submodule("features.classes")
    assert isinstance(layer, nn.Conv2d)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.out_channels))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


def unrectified(model: nn.Module) -> None:
    """No ReLU on the class scores, so their biases are not raised."""
    model.features.classes_relu = nn.Identity()  # type: ignore[union-attr]
    nn.init.zeros_(model.features.classes.bias)  # type: ignore[union-attr]


STARTS = {start.__name__: start for start in (settled, unsettled, unrectified)}


def attempt(network: str, recipe_name: str, settings: str, data: Data, arguments: argparse.Namespace) -> dict:
    own = {"holdout": 0, "levels": 0, "evaluate_every": 10}
    recipe = get_recipe(recipe_name, **{**own, **parse_settings(settings.split())})
    recipe = get_recipe(recipe_name, **{**recipe.to_dict(), "epochs": arguments.epochs or recipe.epochs})
    torch.manual_seed(arguments.seed)
    made = {"image_size": recipe.crop or 32, "init": arguments.init, **recipe.network()}
    name, scheme, width = (*network.split(), "", "")[:3]
    made |= {"scheme": scheme} if scheme else {}
    made |= {"width": float(width)} if width else {}
    model = create_model(name, num_classes=len(data.classes), **made)
    row = {"network": network, "recipe": recipe_name, "settings": settings, "seed": arguments.seed}
    row |= {"epochs": recipe.epochs, "init": arguments.init, "start": arguments.start, "images": len(data.train)}
    STARTS[arguments.start](model)
    try:
        record = fit(model, data, recipe, seed=arguments.seed, progress=False, compile=arguments.compile)
    except LowRankError as error:
        return row | {"failed": str(error)}
    curve = [round(100 * epoch["accuracy"], 2) for epoch in record.history if epoch["accuracy"] is not None]
    losses = [round(epoch["train_loss"], 4) for epoch in record.history]
    result = {key: record.result[key] for key in KEPT}
    return row | result | {"curve": curve, "train_loss": losses}


def main() -> None:
    made = parser(__doc__, "search.json")
    made.add_argument("--data", required=True)
    made.add_argument("--network", nargs="+", default=["nin-c3-lr"])
    made.add_argument("--recipe", default="nin-paper")
    made.add_argument("--try", dest="tries", action="append", default=[])
    made.add_argument("--epochs", type=int)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--init", default="composite")
    made.add_argument("--start", choices=STARTS, default="settled", help="How the class maps begin.")
    made.add_argument("--compile", action="store_true")
    made.add_argument("--limit", type=int)
    made.add_argument("--budget", type=float, default=1e9, help="Start nothing new after this many seconds.")
    arguments = made.parse_args()
    data = open_data(arguments.data, limit=arguments.limit)
    data = data.holdout(HELD_OUT if not arguments.limit else 100, 0)
    rows, began = [], time.monotonic()
    for settings in arguments.tries or [""]:
        for network in arguments.network:
            if time.monotonic() - began > arguments.budget:
                break
            rows.append(attempt(network, arguments.recipe, settings, data, arguments))
            shown = {key: value for key, value in rows[-1].items() if key not in ("curve", "train_loss")}
            print(shown, rows[-1].get("curve", [])[-3:], flush=True)
            write_record(arguments.out, "search", rows=rows)


if __name__ == "__main__":
    main()
