"""How the command prints: tables that fit 80 columns, and JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowrank_cnn.core.numbers import accuracy, deviation
from lowrank_cnn.core.text import printable

if TYPE_CHECKING:
    from lowrank_cnn.data import Data


class SafeConsole(Console):
    """A console for plain text. Names of classes and files may contain control characters, which are escaped."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)


console = SafeConsole(highlight=False, markup=False)
errors = SafeConsole(highlight=False, markup=False, stderr=True, soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table without the columns that are empty in all rows.

    The first column and those headed `<name` are left-aligned, the others right-aligned.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    shown = [index for index in range(len(columns)) if not cells or any(row[index] for row in cells)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))
    for index in shown:
        left = index == 0 or columns[index].startswith("<")
        table.add_column(columns[index].lstrip("<"), justify="left" if left else "right", overflow="fold")
    for row in cells:  # Text objects, because rich would read markup in names of files and classes
        table.add_row(*(Text(printable(row[index])) for index in shown))
    console.print(Text(printable(title), "bold"))  # apart: as the table's own it would wrap at the table's width
    console.print(table)


def print_accuracy(title: str, network: str, result: Mapping[str, Any], classes: int, **more: str) -> None:
    """Print the accuracies of a network in a row, with what else is known of it."""
    from lowrank_cnn.train.evaluate import TOP_FIVE

    top5 = {"top-5": f"{result['top5']:.2%}"} if classes > TOP_FIVE else {}
    row = {"network": network, "top-1": accuracy(result["top1"], result["n"]), **top5, "n": f"{result['n']:,}"}
    print_table(title, [*row, *more], [[*row.values(), *more.values()]])


def over_seeds(shares: Sequence[float]) -> str:
    """Accuracies over seeds in percent, as 90.12 ± 0.30; one seed has no spread, and none are empty."""
    if not shares:
        return ""
    spread = deviation(shares)
    return f"{100 * fmean(shares):.2f}" + (f" ± {100 * spread:.2f}" if spread is not None else "")


@contextlib.contextmanager
def resumable() -> Iterator[None]:
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
    print(json.dumps(value, indent=2))


def print_problems(data: Data, say: Callable[[str], None] = console.print) -> None:
    """Print which images were left out, and why."""
    for name, split in (("train", data.train), ("test", data.test)):
        if split.problems:
            say(f"Left out of {name}: {split.problems}")
