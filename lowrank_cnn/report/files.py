"""Finding record files in folders, and reading them whatever they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lowrank_cnn.report.reading import read_record
from lowrank_cnn.report.records import Records, SkippedFile
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import UnreadableError, read_json
from lowrank_cnn.system.seal import BrokenSealError, unsealed

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
    rest = f" (skipped: {records.skipped[0].path}, {records.skipped[0].reason})" if records.skipped else ""
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
        records.skipped.append(SkippedFile(str(file), str(error)))
        return
    for value in values if isinstance(values, list) else [values]:
        try:
            for record in read_record(value, file):
                records.add(record)
        except LowRankError as error:
            records.skipped.append(SkippedFile(str(file), str(error)))


def _load(file: Path) -> object:
    """The value in a file, its checksum verified where it has one."""
    try:
        value = read_json(file)
        return unsealed(value) if isinstance(value, dict) else value
    except (UnreadableError, BrokenSealError) as error:
        raise LowRankError(f"{error}.") from error
