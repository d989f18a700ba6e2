"""Find record files in folders and read them, whatever they hold.

A record is a JSON object with a `kind`. `READERS` maps a kind to the function that reads it; a new kind is one new
entry. A reader leaves out what is missing or impossible. If a record lacks what its reader cannot do without, the
reader raises a `LowRankError`, and the page lists the file as skipped.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowrank_cnn.frontier.record import KIND
from lowrank_cnn.models.hub import CONFIG, WEIGHTS
from lowrank_cnn.report.fields import items, text
from lowrank_cnn.report.records import Records, Run, SkippedFile, TimedNetwork
from lowrank_cnn.report.timing_record import (
    read_cpu_speed,
    read_gpu_models,
    read_gpu_speed,
    read_timing,
    read_timings,
)
from lowrank_cnn.report.training_record import read_training
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import UnreadableError, read_json
from lowrank_cnn.system.seal import BrokenSealError, unsealed

FIRST_STEP = "lowrank train nin-c3-lr --data digits --recipe digits --width 0.25 --out runs/first"
_TIMING_FIELDS = {"runtime", "device", "layers", "total"}


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


_BESIDE = ("recipe.json", "shape_costs.json", "shapes.json")
"""Files of a run beside its record."""


def require_records(paths: Iterable[str | Path], records: Records) -> None:
    """Refuse to go on with nothing, and say what to run first."""
    if records:
        return
    places = " or ".join(map(str, paths)) or "the folders given"
    if records.elsewhere:
        raise LowRankError(
            f"{places} has no training run and no timing of a network; {shown_elsewhere(records)[0]}."
        )
    rest = f" (skipped: {records.skipped[0].path}, {records.skipped[0].reason})" if records.skipped else ""
    raise LowRankError(f"there is no record in {places}{rest}; make one first: {FIRST_STEP}")


def shown_elsewhere(records: Records) -> list[str]:
    """A sentence for each file that another command shows."""
    return [f"{file.path} is shown by {file.reason}" for file in records.elsewhere]


def _files(path: Path) -> Iterator[Path]:
    """The JSON files of a folder, at any depth, less those of a run or a stored network that are no record."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*.json")):
        of_checkpoint = file.with_suffix(".safetensors").exists()
        of_run = file.name in _BESIDE and (file.parent / "record.json").exists()
        # What `reproduce` keeps of a finished run.
        of_network = file.name == CONFIG and (file.parent / WEIGHTS).exists()
        if file.is_file() and not (of_checkpoint or of_run or of_network):
            yield file


def _read_into(records: Records, file: Path) -> None:
    """Add the records of a file, which holds one or an array of them."""
    try:
        values = _load(file)
    except LowRankError as error:
        records.skipped.append(SkippedFile(str(file), str(error)))
        return
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, Mapping) and value.get("kind") == KIND:
            family = text(value.get("family")) or "FAMILY"
            command = shlex.join(["lowrank", "frontier", family, "--out", str(file.parent)])
            records.elsewhere.append(SkippedFile(str(file), f"`{command}`"))
            continue
        try:
            for record in read_record(value, file):
                records.add(record)
        except LowRankError as error:
            records.skipped.append(SkippedFile(str(file), str(error)))


def _load(file: Path) -> object:
    """The value in a file; a checksum that it has must fit."""
    try:
        value = read_json(file)
        if isinstance(value, dict):
            unsealed(value)
    except (UnreadableError, BrokenSealError) as error:
        raise LowRankError(f"{error}.") from error
    return value


def read_record(values: object, path: Path) -> list[Run | TimedNetwork]:
    """Read one record, by its kind. A timing may include that of its dense twin."""
    if not isinstance(values, Mapping):
        raise LowRankError("it is not a record but plain JSON.")
    kind = text(values.get("kind")) or _kind_by_fields(values)
    if kind is None:
        raise LowRankError(f"it has no kind ({', '.join(READERS)}).")
    if kind not in READERS:
        raise LowRankError(f"a record of kind {kind!r} has no training run and no timing of a network.")
    return list(READERS[kind](values, path))


def _kind_by_fields(values: Mapping[str, Any]) -> str | None:
    """What `lowrank time --json` prints (timings in one environment), and benchmarks that name no kind."""
    if values.keys() >= _TIMING_FIELDS:
        return "timing"
    if items(values.get("batches")):
        return "cpu-speed"
    return "timings" if items(values.get("timings")) else None


def _nothing(_values: Mapping[str, Any], _path: Path) -> Iterator[Run]:
    """A table that was made of runs, whose own records say more."""
    yield from ()


Reader = Callable[[Mapping[str, Any], Path], Iterator[Run | TimedNetwork]]
READERS: dict[str, Reader] = {
    "training": read_training,
    "timing": read_timing,
    "timings": read_timings,
    "gpu-speed": read_gpu_speed,
    "gpu-models": read_gpu_models,
    "cpu-speed": read_cpu_speed,
    "reproduction": _nothing,
    "search": _nothing,
}
