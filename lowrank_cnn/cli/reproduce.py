"""The command `lowrank reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.show import errors, print_json, print_table
from lowrank_cnn.data import open_data
from lowrank_cnn.paper.experiments import EXPERIMENTS
from lowrank_cnn.paper.reproduce import Row, reproduce
from lowrank_cnn.train.recipe import parse_settings
from lowrank_cnn.units import si


def add_to(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce_command)


def reproduce_command(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")],
    data: Annotated[str, typer.Option(help="Where its images are.")],
    out: Annotated[Path, typer.Option(help="Directory of the runs; finished ones are not repeated.")],
    parts: Annotated[list[str] | None, typer.Option("--part", help="A part of it alone; repeatable.")] = None,
    networks: Annotated[list[str] | None, typer.Option("--network", help="A network alone; repeatable.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each network.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: field=value.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the networks.")] = False,
    limit: Annotated[int | None, typer.Option(help="Use at most so many images of each split.")] = None,
    as_json: Json = False,
) -> None:
    """Train the paper's networks over several seeds and hold their accuracy against the published one."""
    rows = reproduce(
        experiment,
        open_data(data, limit=limit),
        out,
        parts=tuple(parts or ()),
        networks=tuple(networks or ()),
        seeds=seeds,
        settings=parse_settings(settings or []),
        say=lambda line: errors.print(line, markup=False),
        device=device,
        compile=compile_,
        progress=False,
    )
    if as_json:
        print_json([row.to_dict() for row in rows])
    else:
        _print(experiment, rows)


def _print(experiment: str, rows: list[Row]) -> None:
    columns = ("network", "<variant", "published", "ours", "n", "MACs", "params", "epochs", "seconds")
    for part in dict.fromkeys(row.part for row in rows):
        lines = [_line(row) for row in rows if row.part == part]
        print_table(f"{experiment}: {part}", columns, lines)


def _line(row: Row) -> tuple[object, ...]:
    ours = f"{100 * row.mean:.2f}" + (f" ± {100 * row.spread:.2f}" if row.spread is not None else "")
    stated = f"{100 * row.published:.2f}" if row.published else ""
    cost = (si(row.macs), si(row.params), f"{row.epochs:.0f}", f"{row.seconds:.0f}")
    return row.network, row.variant, stated, ours, len(row.top1), *cost
