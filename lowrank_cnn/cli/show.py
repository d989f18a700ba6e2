"""How the command prints: tables that fit 80 columns, JSON, and numbers a person can read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from lowrank_cnn.data import Data

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table with its first column to the left and numbers to the right; a heading `<name` goes left too."""
    # Names of files and classes are shown as they are: rich would read markup in them.
    table = Table(title=Text(title, "bold"), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 0))
    for index, heading in enumerate(columns):
        left = index == 0 or heading.startswith("<")
        table.add_column(heading.lstrip("<"), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    console.print(table)


def print_json(value: object) -> None:
    """Plain JSON on standard output, for other programs."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_problems(data: Data) -> None:
    """What was left out of the images, and why."""
    for name, split in (("train", data.train), ("test", data.test)):
        if split.problems:
            console.print(f"Left out of {name}: {split.problems}", markup=False)
