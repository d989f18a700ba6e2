"""The commands `lowrank models`, `lowrank count` and `lowrank recipes`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import lowrank_cnn as lr
from lowrank_cnn.cli.options import Input, Inputs, Into, Json, Model, Norm, Scheme, Width, option
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.text import si

_LAYER = ("name", "type", "output", "macs", "params", "activation_bytes")


def stored_counts() -> dict[str, dict[str, Any]]:
    """`count(...).to_dict()` of every network at its own size, from a table: torch alone takes seconds to import.

    `tests/golden` writes the table and compares it with real counts.
    """
    table = json.loads((files("lowrank_cnn") / "models/counts.json").read_text(encoding="utf-8"))
    return {
        name: {**cost, "layers": [dict(zip(_LAYER, row, strict=True)) for row in cost["layers"]]}
        for name, cost in table.items()
    }


def models_command(as_json: Json = False) -> None:
    """List the networks with their cost and published accuracy.

    Accuracies are the paper's: on CIFAR-10 for NiN, on ILSVRC for VGG and GoogLeNet.

    Examples:

      lowrank models
      lowrank models --json
    """
    from lowrank_cnn.paper.published import published

    rows = []
    for name, cost in stored_counts().items():
        row = published().get(name)
        about = {"network": name, "input": "x".join(map(str, cost["input"])), "macs": cost["macs"]}
        about |= {"params": cost["params"], "top1": row and row.top1, "top5": row and row.top5}
        rows.append(about)
    if as_json:
        return print_json(rows)
    columns = ("network", "input", "MACs", "params", "published top-1", "top-5")
    table = []
    for r in rows:
        shares = ("" if share is None else f"{100 * share:.1f}%" for share in (r["top1"], r["top5"]))
        table.append((r["network"], r["input"], si(r["macs"]), si(r["params"]), *shares))
    print_table("Networks", columns, table)
    return None


def count_command(
    model: Model,
    input_text: Input = None,
    example: Inputs = None,
    convention: Annotated[str, option("mac, or paper (biases and auxiliary heads count).")] = "mac",
    scheme: Scheme = None,
    width: Width = None,
    norm: Norm = None,
    stride: Annotated[int | None, option("Stride of the first conv.")] = None,
    num_classes: Annotated[int | None, option("Number of classes.", "--classes")] = None,
    into: Into = None,
    as_json: Json = False,
) -> None:
    """Count multiply-accumulates, parameters and memory, layer by layer.

    Counts are exact; nothing is computed or allocated for networks by name.

    Examples:

      lowrank count vgg11-gmp-lr
      lowrank count nin --scheme lr-join --input 3x32x32
      lowrank count torchvision:resnet18 --scheme lr
      lowrank count model.py:make --example model.py:inputs
    """
    options = {"width": width, "norm": norm, "stride": stride, "num_classes": num_classes}
    changed = (*options.values(), input_text, example, scheme, into)
    plain = all(value is None for value in changed) and convention == "mac" and not Path(model).exists()
    if plain and (known := stored_counts().get(model)):
        return _print_count(model, known, as_json)
    import torch

    from lowrank_cnn.cli.source import find_example, find_model, parse_size

    asked = parse_size(input_text)
    ours = model in lr.list_models() and not Path(model).exists()  # a run's directory of that name comes first
    if asked and ours:
        options["in_channels"] = asked[0]
    with torch.device("meta" if ours else "cpu"):
        source = find_model(model, into=into, scheme=scheme, **options)
    inputs = find_example(example) if example else source.size(asked)
    return _print_count(model, lr.count(source.network, inputs, convention=convention).to_dict(), as_json)


def recipes_command(as_json: Json = False) -> None:
    """List the training recipes.

    Any field can be changed: `lowrank train ... --set lr=0.05 --set cutout=8`.

    Examples:

      lowrank recipes
      lowrank recipes --json
    """
    from lowrank_cnn.train import RECIPES

    if as_json:
        return print_json({name: recipe.to_dict() for name, recipe in RECIPES.items()})
    columns = ("recipe", "epochs", "batch", "lr", "<schedule", "weight decay", "<images", "<norm")
    rows = [
        (r.name, r.epochs, r.batch_size, r.lr, r.schedule, r.weight_decay, r.preprocess, r.norm or "none")
        for r in RECIPES.values()
    ]
    print_table("Recipes", columns, rows)
    return None


def _print_count(name: str, result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        return print_json({"model": name, **result})
    columns = ("layer", "<output", "MACs", "params", "MiB")
    rows = [(row["name"], "x".join(map(str, row["output"])), *_costs(row)) for row in result["layers"]]
    size = "x".join(map(str, result["input"]))
    title = f"{name}, {size}, convention {result['convention']}"
    print_table(title, columns, [*rows, ("total", "", *_costs(result))])
    if result["unsupported"]:
        calls = ", ".join(f"{operation} ({times})" for operation, times in result["unsupported"])
        console.print(f" Not counted, because their cost is unknown: {calls}.")
    return None


def _costs(item: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{item['macs']:,}", f"{item['params']:,}", f"{item['activation_bytes'] / 2**20:.2f}"
