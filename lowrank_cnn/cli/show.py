"""How the command prints: tables that fit 80 columns, JSON, and numbers a person can read."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lowrank_cnn.system.text import printable

if TYPE_CHECKING:
    from lowrank_cnn.data import Data


class SafeConsole(Console):
    """A console that shows control characters in text as escapes: names of classes and files are not ours."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)


console = SafeConsole(highlight=False)
errors = SafeConsole(stderr=True, highlight=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table with its first column to the left and numbers to the right; a heading `<name` goes left too."""
    # Names of files and classes are shown as they are: rich would read markup in them.
    table = Table(title=Text(printable(title), "bold"), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 0))
    for index, heading in enumerate(columns):
        left = index == 0 or heading.startswith("<")
        table.add_column(heading.lstrip("<"), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row))
    console.print(table)


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], Callable[[str], None]]]:
    """One line on a terminal for what is under way, of whom and what; in the end it is gone.

    It is drawn when told and never by itself: a thread that turns a wheel would show in what is measured.
    """
    with Live(console=errors, auto_refresh=False, transient=True) as live:
        yield lambda whose: lambda what: live.update(Text(printable(f" {whose}, {what} ...")), refresh=True)


def print_json(value: object) -> None:
    """Plain JSON on standard output, for other programs."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_problems(data: Data) -> None:
    """What was left out of the images, and why."""
    for name, split in (("train", data.train), ("test", data.test)):
        if split.problems:
            console.print(f"Left out of {name}: {split.problems}", markup=False)
