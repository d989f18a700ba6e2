"""The commands `lowrank models`, `lowrank count` and `lowrank recipes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from lowrank_cnn.cli.options import Input, Inputs, Into, Json, Model, Norm, Scheme, Width, option
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.text import si

if TYPE_CHECKING:
    from lowrank_cnn.method.count import Count


def models_command(as_json: Json = False) -> None:
    """List the networks with their cost and published accuracy.

    Accuracies are the paper's: on CIFAR-10 for NiN, on ILSVRC for VGG and GoogLeNet.

    Examples:

      lowrank models
      lowrank models --json
    """
    import torch

    from lowrank_cnn.method.count import count
    from lowrank_cnn.models import create_model, list_models
    from lowrank_cnn.paper.published import published

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.1f}%"

    rows = []
    for name in list_models():
        with torch.device("meta"):
            net = create_model(name)
        cost, row = count(net, net.input_size), published().get(name)
        about = {"network": name, "input": "x".join(map(str, net.input_size)), "macs": cost.macs}
        about |= {"params": cost.params, "top1": row.top1 if row else None, "top5": row.top5 if row else None}
        rows.append(about)
    if as_json:
        return print_json(rows)
    columns = ("network", "input", "MACs", "params", "published top-1", "top-5")
    table = [
        (r["network"], r["input"], si(r["macs"]), si(r["params"]), percent(r["top1"]), percent(r["top5"]))
        for r in rows
    ]
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
    import torch

    from lowrank_cnn.cli.source import find_example, find_model, is_ours, parse_size
    from lowrank_cnn.method.count import count

    asked, ours = parse_size(input_text), is_ours(model)
    options = {"width": width, "norm": norm, "stride": stride, "num_classes": num_classes}
    if asked and ours:
        options["in_channels"] = asked[0]
    with torch.device("meta" if ours else "cpu"):
        source = find_model(model, into=into, scheme=scheme, **options)
    inputs = find_example(example) if example else source.size(asked)
    result = count(source.network, inputs, convention=convention)
    if as_json:
        return print_json({"model": model, **result.to_dict()})
    _print_count(model, result)
    return None


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


def _print_count(name: str, result: Count) -> None:
    columns = ("layer", "<output", "MACs", "params", "MiB")
    rows = [(row.name, "x".join(map(str, row.output)), *_costs(row)) for row in result.layers]
    size = "x".join(map(str, result.input))
    title = f"{name}, {size}, convention {result.convention}"
    print_table(title, columns, [*rows, ("total", "", *_costs(result))])
    if result.unsupported:
        calls = ", ".join(f"{operation} ({times})" for operation, times in result.unsupported)
        console.print(f" Not counted, because their cost is unknown: {calls}.")


def _costs(item: Any) -> tuple[str, str, str]:
    return f"{item.macs:,}", f"{item.params:,}", f"{item.activation_bytes / 2**20:.2f}"
