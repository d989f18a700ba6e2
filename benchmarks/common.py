"""Shared by all benchmarks: arguments, records, and the spread of measurements."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import write_atomically, write_json

RESULTS = Path(__file__).parent / "results"


def parser(text: str | None, out: str) -> argparse.ArgumentParser:
    """A parser that shows the docstring of a benchmark; `--out` defaults to `results/OUT`."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS / out, help="the record to write")
    return made


def training_parser(
    text: str | None, out: str, *, network: str, recipe: str, seeds: int
) -> argparse.ArgumentParser:
    """A parser with the options of benchmarks that train one network many times, and their defaults."""
    made = parser(text, out)
    made.add_argument("--data", required=True)
    made.add_argument("--network", default=network)
    made.add_argument("--width", type=float, default=1.0)
    made.add_argument("--recipe", default=recipe)
    made.add_argument("--set", dest="settings", action="append", default=[], help="field=value of the recipe")
    made.add_argument("--seeds", type=int, default=seeds, help="full runs of each")
    made.add_argument("--limit", type=int, help="images of each split")
    made.add_argument("--image-size", type=int, help="bring images to this square")
    made.add_argument("--device", default="auto")
    made.add_argument("--processes", type=int, default=1, help="trainings at a time on the device")
    made.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    return made


def run_command(main: Callable[[], None]) -> None:
    """Run a benchmark as a command: user errors print one sentence, without a traceback."""
    try:
        main()
    except LowRankError as error:
        sys.exit(f"error: {error}")


def write_record(path: Path, kind: str, *, by_line: str = "", **values: Any) -> None:
    """Write the record of one run, atomically, with its environment unless it already has one.

    `by_line` names a list whose items get one line each.
    """
    rows = [json.dumps(row) for row in values.pop(by_line)] if by_line else []
    record = {"kind": kind, **values, "environment": values.get("environment") or environment()}
    text = json.dumps(record, indent=1)
    if by_line:
        separator = ",\n  "
        text = f'{text[:-2]},\n "{by_line}": [\n  {separator.join(rows)}\n ]\n}}'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{text}\n".encode())


def earlier_runs(path: Path, kind: str) -> list[dict[str, Any]]:
    """The runs in an existing record, oldest first."""
    found = json.loads(path.read_text()) if path.exists() else {"kind": kind, "runs": []}
    if found.get("kind") != kind or "runs" not in found:
        sys.exit(f"{path} is no record of runs of {kind}: name another file by --out.")
    return found["runs"]


def write_runs(path: Path, kind: str, runs: list[dict[str, Any]]) -> None:
    """Write a record of several runs, atomically, the newest last."""
    write_json(path, {"kind": kind, "runs": runs})


def rates(values: Sequence[float]) -> dict[str, float]:
    """Images per second: the median of several rounds, the lowest and the highest."""
    return {"images_per_second": median(values), "lowest": min(values), "highest": max(values)}


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Times of one thing: the median of several, the least and the most."""
    return {"ms": median(values), "least": min(values), "most": max(values)}
