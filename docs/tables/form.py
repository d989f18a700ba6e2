"""How a table of the documentation is written, and where the records are that it is made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def markdown(columns: list[str], rows: list[list[object]]) -> str:
    """A table, its first column and those marked `<` to the left, the others to the right."""
    sides = ["---" if not place or name.startswith("<") else "---:" for place, name in enumerate(columns)]
    lines = [[name.removeprefix("<") for name in columns], sides, *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def source(path: str, environment: dict[str, Any]) -> str:
    """The line under a table: what it was measured with, and where the record is."""
    device = environment.get("gpu") or environment["cpu"]
    where = f"record: `benchmarks/results/{path}`, commit {environment['commit']}"
    return f"\n*{device}, torch {environment['torch']}; {where}.*\n"


def recorded(name: str) -> bool:
    """Whether there is such a record yet: a page may have a place for one that is still to come."""
    return (RESULTS / name).exists()


NO_RUNS = "No runs recorded yet.\n"
