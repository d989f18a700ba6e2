"""Commands about networks and their cost: models, count."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.cli.source import INTO_HELP, MODEL_HELP, find_model, is_ours, parse_size
from lowrank_cnn.method.counting import Count, count
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.models.network import Network
from lowrank_cnn.paper.published import published
from lowrank_cnn.system.text import si

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def add_to(app: typer.Typer) -> None:
    app.command("models")(models_command)
    app.command("count")(count_command)


def models_command(as_json: Json = False) -> None:
    """List the networks with their cost; the paper's also with the accuracy it published."""
    rows = [_describe(name) for name in list_models()]
    if as_json:
        return print_json(rows)
    columns = ("network", "input", "MACs", "params", "published top-1", "top-5")
    table = [
        (r["network"], r["input"], si(r["macs"]), si(r["params"]), _percent(r["top1"]), _percent(r["top5"]))
        for r in rows
    ]
    print_table("Networks", columns, table)
    return None


def count_command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    input_text: Annotated[str | None, typer.Option("--input", help="Image size, as 3x224x224.")] = None,
    convention: Annotated[str, typer.Option(help="mac, or paper (biases and auxiliary heads count).")] = "mac",
    scheme: Annotated[str | None, typer.Option(help="A scheme in place of the network's own.")] = None,
    width: Annotated[float | None, typer.Option(help="Scale the number of filters.")] = None,
    norm: Annotated[str | None, typer.Option(help="batch, for batch norm.")] = None,
    stride: Annotated[int | None, typer.Option(help="Stride of the first conv.")] = None,
    num_classes: Annotated[int | None, typer.Option("--classes", help="Number of classes.")] = None,
    into: Annotated[str | None, typer.Option(help=INTO_HELP)] = None,
    as_json: Json = False,
) -> None:
    """Count multiply-accumulates, parameters and activation memory, per layer and in total."""
    asked = parse_size(input_text)
    options = {"width": width, "norm": norm, "stride": stride, "num_classes": num_classes}
    if is_ours(model):
        net = _build(model, asked, **options, scheme=scheme)
        size = asked or net.input_size
    else:
        source = find_model(model, into=into, scheme=scheme, **options)
        net, size = source.network, source.size(asked)
    result = count(net, size, convention=convention)
    if as_json:
        return print_json({"model": model, **result.to_dict(), "input": list(size)})
    _print_count(model, result)
    return None


def _describe(name: str) -> dict:
    net = _build(name, None)
    cost, row = count(net, net.input_size), published().get(name)
    return {
        "network": name,
        "input": "x".join(map(str, net.input_size)),
        "macs": cost.macs,
        "params": cost.params,
        "top1": row.top1 if row else None,
        "top5": row.top5 if row else None,
    }


def _build(name: str, size: tuple[int, ...] | None, **options: Any) -> Network:
    """A network without storage, whose input has as many channels as the size says."""
    given = {key: value for key, value in options.items() if value is not None}
    with torch.device("meta"):
        return create_model(name, in_channels=size[0] if size else 3, **given)


def _print_count(name: str, result: Count) -> None:
    columns = ("layer", "<output", "MACs", "params", "MiB")
    rows = [
        (layer.name, "x".join(map(str, layer.output)), f"{layer.macs:,}", f"{layer.params:,}", _mib(layer))
        for layer in result.layers
    ]
    total = ("total", "", f"{result.macs:,}", f"{result.params:,}", _mib(result))
    size = "x".join(map(str, result.input))
    print_table(f"{name}, {size}, convention {result.convention}", columns, [*rows, total])
    if result.unsupported:
        calls = ", ".join(f"{operation} ({times})" for operation, times in result.unsupported)
        console.print(f" Not counted, since their cost is not known: {calls}.", markup=False)


def _mib(item) -> str:
    """Memory of the activations; the heading has the unit."""
    return f"{item.activation_bytes / 2**20:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"
