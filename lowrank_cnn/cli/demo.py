"""The command `lowrank demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowrank_cnn.cli.demonstration import Row, demo
from lowrank_cnn.cli.models import Json
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.system.text import si


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command(
    out: Annotated[Path, typer.Option(help="Directory of the two runs and the report.")] = Path("runs/demo"),
    epochs: Annotated[int | None, typer.Option(help="Train so many epochs instead of the recipe's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Train a dense network and its low-rank twin on real digits, and compare them."""
    rows, report = demo(out, epochs=epochs, device=device, say=str if as_json else console.print)
    if as_json:
        return print_json({"rows": [vars(row) for row in rows], "report": str(report)})
    dense, low_rank = rows
    lines = [*(_line(row) for row in rows), _ratios(dense, low_rank)]
    columns = ("Network-in-Network", "accuracy", "MACs", "parameters", "time per image")
    print_table("Digits it never saw, told apart", columns, lines)
    console.print(f" Accuracy on {dense.n:,} test digits; time on this machine's CPU, both measured in turns.")
    console.print(f" The report: {report}", markup=False, soft_wrap=True)
    return None


def _line(row: Row) -> tuple[str, ...]:
    return row.name, f"{row.top1:.1%}", si(row.macs), si(row.params), f"{row.ms_per_image:.3f} ms"


def _ratios(dense: Row, low_rank: Row) -> tuple[str, ...]:
    macs, params = low_rank.macs / dense.macs, low_rank.params / dense.params
    time = low_rank.ms_per_image / dense.ms_per_image
    points = 100 * (low_rank.top1 - dense.top1)
    return "low-rank / dense", f"{points:+.1f} points", f"x {macs:.2f}", f"x {params:.2f}", f"x {time:.2f}"
