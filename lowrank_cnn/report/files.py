"""Finding record files in folders, and reading them whatever they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from lowrank_cnn.report.reading import read_record
from lowrank_cnn.report.records import Problem, Records
from lowrank_cnn.system.errors import LowRankError

LARGEST_FILE = 64 * 2**20
FIRST_STEP = "lowrank train nin-c3-lr --data digits --recipe digits --width 0.25 --out runs/first"


def read_records(paths: Iterable[str | Path]) -> Records:
    """Every record in these files and folders; what cannot be read is listed, not raised."""
    records, seen = Records(), set()
    for path in map(Path, paths):
        if not path.exists():
            raise LowRankError(f"there is no file or folder {path}; make a run first: {FIRST_STEP}")
        for file in _files(path):
            if (resolved := file.resolve()) not in seen:
                seen.add(resolved)
                _read_into(records, file)
    return records


def require_records(paths: Iterable[str | Path], records: Records) -> None:
    """Refuse to go on with nothing, and say what to run first."""
    if records:
        return
    places = " or ".join(map(str, paths)) or "the folders given"
    rest = f" (skipped: {records.problems[0].path}, {records.problems[0].reason})" if records.problems else ""
    raise LowRankError(f"there is no record in {places}{rest}; make one first: {FIRST_STEP}")


def _files(path: Path) -> Iterator[Path]:
    """The JSON files of a folder, at any depth, less those that belong to a run but are not its record."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*.json")):
        of_checkpoint = file.with_suffix(".safetensors").exists()
        of_run = file.name == "recipe.json" and (file.parent / "record.json").exists()
        if file.is_file() and not of_checkpoint and not of_run:
            yield file


def _read_into(records: Records, file: Path) -> None:
    """Add what a file holds: one record, or an array of them."""
    try:
        values = _load(file)
    except LowRankError as error:
        records.problems.append(Problem(str(file), str(error)))
        return
    for value in values if isinstance(values, list) else [values]:
        try:
            for record in read_record(value, file):
                records.add(record)
        except LowRankError as error:
            records.problems.append(Problem(str(file), str(error)))


def _load(file: Path) -> object:
    try:
        size = file.stat().st_size
        content = file.read_bytes() if size <= LARGEST_FILE else b""
    except OSError as error:
        raise LowRankError(f"it cannot be read ({error.strerror}).") from error
    if size > LARGEST_FILE:
        raise LowRankError(f"it is larger than {LARGEST_FILE >> 20} MiB.")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LowRankError(f"it is not JSON{_where(error)}.") from error


def _where(error: Exception) -> str:
    return f", from line {error.lineno} on" if isinstance(error, json.JSONDecodeError) else ""
