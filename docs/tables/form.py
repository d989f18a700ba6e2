"""How a table of the documentation is written, and where its records are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NO_RUNS = "No runs recorded yet.\n"
NOT_MEASURED = "not measured yet"
JsonRecord = dict[str, Any]


def markdown(columns: list[str], rows: Sequence[Sequence[object]]) -> str:
    """A table, its first column and those marked `<` to the left, the others to the right."""
    sides = ["---" if not place or name.startswith("<") else "---:" for place, name in enumerate(columns)]
    lines = [[name.removeprefix("<") for name in columns], sides, *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def chip(word: str) -> str:
    """A verdict in a word, coloured by `docs/assets/site.css`; what holds has the colour of what wins."""
    colour = {"holds": "wins", "does not hold": "loses"}.get(word, word.replace(" ", "-"))
    return f'<b class="{colour}">{word}</b>'


def compared(ours: float | None, rival: float | None, repeats: float) -> str:
    """Our time over a rival's, with a verdict; times of one network differ by up to the share `repeats`."""
    if ours is None or rival is None:
        return ""
    ratio = ours / rival
    return (
        f"{ratio:.2f} {chip('wins' if ratio < 1 - repeats else 'loses' if ratio > 1 + repeats else 'undecided')}"
    )


def record(name: str) -> JsonRecord:
    return json.loads((RESULTS / name).read_text())


def source(path: str, *environments: dict[str, Any]) -> str:
    """The line under a table: hardware and versions, oldest first, and the path of the record."""
    commits = dict.fromkeys(_short(known["commit"]) for known in environments)
    where = f"record: `benchmarks/results/{path}`, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return _measured_with(environments, where)


def sources(records: dict[str, list[dict[str, Any]]]) -> str:
    """One line for the figures of several records."""
    named = (
        f"`{path}` ({', '.join(dict.fromkeys(_short(known['commit'])[:7] for known in environments))})"
        for path, environments in records.items()
    )
    every = chain.from_iterable(records.values())
    return _measured_with(every, f"records in `benchmarks/results`, with their commits: {', '.join(named)}")


def _measured_with(environments: Iterable[dict[str, Any]], where: str) -> str:
    every = list(environments)
    devices = dict.fromkeys(known.get("gpu") or known["cpu"] for known in every)
    versions = dict.fromkeys(known["torch"] for known in every)
    return f"\n*{', '.join(devices)}, torch {', '.join(versions)}; {where}.*\n"


def _short(commit: str) -> str:
    """Twelve digits of a hash, and any suffix."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit)


def recorded(name: str) -> bool:
    """Whether this record exists: a page may have a place for a future one."""
    return (RESULTS / name).exists()


def from_record(
    name: str, *, without: str = NO_RUNS
) -> Callable[[Callable[[JsonRecord], str]], Callable[[], str]]:
    """Pass a table its record; without one the page says that there are no runs, or what else is given."""

    def with_record(make: Callable[[JsonRecord], str]) -> Callable[[], str]:
        @wraps(make)
        def table() -> str:
            return make(record(name)) if recorded(name) else without

        return table

    return with_record
