"""The command `lowrank convert`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from torch import nn

from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.options import Input, Into, Model, Norm, Pretrained, Width
from lowrank_cnn.cli.show import print_json, print_table
from lowrank_cnn.cli.source import Source, find_model, parse_size
from lowrank_cnn.method.converting import Conversion, Cost, conversion_costs, convert, told_if_low_rank
from lowrank_cnn.method.decomposing import decompose
from lowrank_cnn.method.selection import stages
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes
from lowrank_cnn.system.text import si

if TYPE_CHECKING:
    from lowrank_cnn.deploy.exporting import Exported


def add_to(app: typer.Typer) -> None:
    app.command("convert")(convert_command)


def convert_command(
    model: Model,
    scheme: Annotated[str, typer.Option(help="lr, lr-join, separable, mixture(...), with options.")] = "lr-join",
    where: Annotated[
        list[str] | None,
        typer.Option(help="Name, prefix or pattern of the layers, or a kernel as 3x3; repeatable."),
    ] = None,
    stage: Annotated[
        list[int] | None, typer.Option(help="The convs of one stage, counted from 1 by map size; repeatable.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the trained filters instead of starting afresh.")
    ] = False,
    energy: Annotated[float | None, typer.Option(help="Fit, keeping this share of each layer's weights.")] = None,
    macs: Annotated[float | None, typer.Option(help="Fit, within this share of the MACs.")] = None,
    latency: Annotated[float | None, typer.Option(help="Fit, within this share of the time.")] = None,
    input_text: Input = None,
    pretrained: Pretrained = None,
    width: Width = None,
    norm: Norm = None,
    into: Into = None,
    out: Annotated[Path | None, typer.Option(help="Write the network: .safetensors, .onnx or .pt2.")] = None,
    as_json: Json = False,
) -> None:
    """Rewrite the spatial convolutions of any network by a scheme."""
    source = find_model(model, pretrained=pretrained, into=into, width=width, norm=norm)
    size = source.size(parse_size(input_text))
    network = source.network
    chosen = _where(where, stage, network, size)
    budget = {"energy": energy, "macs": macs, "latency": latency}
    fitted = fit or any(value is not None for value in budget.values())
    with told_if_low_rank(network):
        if fitted:
            new = decompose(network, scheme, where=chosen, input_size=size, **budget)
        else:
            new = convert(network, scheme, where=chosen)
    costs = conversion_costs(network, new, size)
    if out is not None:
        # Fresh weights know nothing of classes: of the source, the file then keeps the size of images alone.
        export_source(source if fitted else replace(source, trained=None), new, out, size)
    if as_json:
        return print_json(_conversion_json(source, size, new, costs))
    _print_conversion(source, size, new, costs)
    return None


def export_source(
    source: Source, network: nn.Module, path: Path, size: tuple[int, ...], *, overwrite: bool = False
) -> Exported:
    """Write a network made from a source, with what is known of its classes and images."""
    from lowrank_cnn.deploy import export

    model = network if source.trained is None else replace(source.trained, network=network)
    return export(model, path, input_size=size, overwrite=overwrite)


def _where(
    patterns: list[str] | None, numbers: list[int] | None, network: nn.Module, size: tuple[int, ...]
) -> Any:
    """Patterns as they are, a kernel written 3x3 as a pair, and the layers of stages; None for no choice."""
    items = [tuple(map(int, p.split("x"))) if re.fullmatch(r"\d+x\d+", p) else p for p in patterns or []]
    found = stages(network, size) if numbers else ()
    for number in numbers or []:
        if not 1 <= number <= len(found):
            raise LowRankError(f"the network has {len(found)} stages, counted from 1; there is no stage {number}.")
        items += found[number - 1]
    return items or None


def _conversion_json(
    source: Source, size: tuple[int, ...], new: nn.Module, costs: tuple[Cost, ...]
) -> dict[str, Any]:
    report = notes(new).conversion or Conversion()
    return {
        "model": source.name,
        "input": list(size),
        **report.to_dict(),
        "costs": [vars(cost) for cost in costs],
        "fitted": [row.to_dict() for row in notes(new).decomposition],
    }


def _print_conversion(source: Source, size: tuple[int, ...], new: nn.Module, costs: tuple[Cost, ...]) -> None:
    report = notes(new).conversion or Conversion()
    kept = {row.name: f"{row.energy:.1%}" for row in notes(new).decomposition}
    rows = [
        (
            change.name,
            change.after,
            si(cost.macs_before),
            si(cost.macs_after),
            si(cost.params_after),
            kept.get(change.name),
        )
        for change, cost in zip(report.changed, costs[:-1], strict=True)
    ]
    total = costs[-1]
    ratio = f"{total.macs_after / max(1, total.macs_before):.3f} of the MACs"
    rows.append(("total", ratio, si(total.macs_before), si(total.macs_after), si(total.params_after), None))
    columns = ("layer", "<filters now", "MACs", "now", "params", "energy" if kept else "")
    print_table(f"{source.name}, {'x'.join(map(str, size))}", columns, rows)
    if report.kept:
        print_table(
            "Left as they were", ("layer", "<", "<why"), [(k.name, k.layer, k.reason) for k in report.kept]
        )
