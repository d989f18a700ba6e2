"""How the command prints: tables that fit 80 columns, and JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowrank_cnn.core.text import printable

if TYPE_CHECKING:
    from lowrank_cnn.data import Data


class SafeConsole(Console):
    """A console for plain text. Names of classes and files may contain control characters, which are escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)


console, errors = SafeConsole(), SafeConsole(stderr=True, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: the first column and those headed `<name` are left-aligned, the others right-aligned."""
    # Text objects, because rich would read markup in names of files and classes.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    for index, heading in enumerate(columns):
        left = index == 0 or heading.startswith("<")
        table.add_column(heading.lstrip("<"), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row))
    console.print(Text(printable(title), "bold"))  # apart: as the table's own it would wrap at the table's width
    console.print(table)


@contextlib.contextmanager
def continued_by_same_command() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop a command that resumes by itself when it is started again."""
    from lowrank_cnn.train.failure import Interrupted

    try:
        yield
    except KeyboardInterrupt as stopped:
        told = "Stopped and saved: the same command continues from here."
        if not isinstance(stopped, Interrupted):  # outside a training run of this process
            raise Interrupted(told) from stopped
        stopped.args = (told,)
        raise


def print_json(value: object) -> None:
    """Plain JSON on standard output, for other programs."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_problems(data: Data, say: Callable[[str], None] = console.print) -> None:
    """Print which images were left out, and why."""
    for name, split in (("train", data.train), ("test", data.test)):
        if split.problems:
            say(f"Left out of {name}: {split.problems}")
