"""Parquet shards in the Hugging Face image layout: finding them, their classes, and reading rows."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lowrank_cnn.data.fingerprint import Contents, fingerprint_of_files, version_of_files
from lowrank_cnn.data.images.decode import BadImageError
from lowrank_cnn.data.readers.bounded import MOST_SHARDS, READ_ERRORS, check_rows, read_binaries, read_integers
from lowrank_cnn.data.readers.image_store import NO_LABEL
from lowrank_cnn.data.types import Problems
from lowrank_cnn.system.arithmetic import ceil_div
from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import is_regular, regular

Missing = Literal["skip", "refuse"]
_SHARD = re.compile(
    r"(?P<split>train|test|validation|valid|val)(-(?P<part>\d+)-of-(?P<parts>\d+)(-[0-9a-f]+)?)?\.parquet"
)
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label")
_NAMED = 5
_TEST_SPLITS = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class RowGroup:
    """A row group: what is read from a shard at once."""

    shard: int
    number: int
    first: int
    rows: int


@dataclass
class ParquetStore:
    """The rows of several shards, numbered through; row groups in use are kept, the oldest dropped."""

    shards: tuple[Path, ...]
    groups: tuple[RowGroup, ...]
    labels: Tensor
    image_column: str
    _starts: list[int] = field(repr=False)
    _held: OrderedDict[int, Any] = field(default_factory=OrderedDict, repr=False)
    _capacity: int = 2
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(self.shards, len(self.labels))

    @property
    def paths(self) -> Sequence[Path]:
        return self.shards

    def read(self, row: int) -> bytes:
        index, offset = self._find(row)
        column = self._load(index)
        if column is None:
            raise BadImageError(f"row group {self.groups[index].number} is unreadable")
        data = column[offset].as_py()
        if not data:
            raise BadImageError("no bytes")
        return data

    def file_of(self, row: int) -> int:
        return self.groups[self._find(row)[0]].shard

    def where(self, row: int) -> str:
        index, offset = self._find(row)
        group = self.groups[index]
        return f"{self.shards[group.shard].name}:{group.first + offset}"

    def shuffled(self, draw: torch.Generator) -> Tensor:
        """Shards in random order, each whole, its row groups in random order within it."""
        shard_of = torch.tensor([group.shard for group in self.groups])
        place = torch.randperm(len(self.shards), generator=draw)[shard_of]
        mixed = torch.randperm(len(self.groups), generator=draw)
        order = mixed[torch.argsort(place[mixed], stable=True)].tolist()
        starts = self._starts
        return torch.cat([torch.arange(starts[i], starts[i] + self.groups[i].rows) for i in order])

    def fingerprint(self) -> str:
        return fingerprint_of_files(self.shards[0].parent, self.shards)

    def version(self) -> str:
        return version_of_files(self.shards)

    def keep(self, places: int, rows: int) -> None:
        mean = max(1, len(self.labels) // len(self.groups))
        self._capacity = places * (ceil_div(rows, mean) + 1)

    def _find(self, row: int) -> tuple[int, int]:
        index = bisect_right(self._starts, row) - 1
        return index, row - self._starts[index]

    def _load(self, index: int) -> Any:
        if index not in self._held:
            while len(self._held) >= self._capacity:
                self._held.popitem(last=False)
            self._held[index] = self._read_group(self.groups[index])
        self._held.move_to_end(index)
        return self._held[index]

    def _read_group(self, group: RowGroup) -> Any:
        """The column of image bytes, or None where the shard is damaged there."""
        try:
            return read_binaries(self.shards[group.shard], self.image_column, group.number)
        except READ_ERRORS:
            return None


def find_shards(folder: Path) -> dict[str, list[Path]]:
    """Shards by split name, from the folder itself or the one subfolder that holds them; {} where none is."""
    by_folder: dict[Path, dict[str, list[Path]]] = {}
    for file in sorted((*folder.glob("*.parquet"), *folder.glob("*/*.parquet"))):
        # Opening a FIFO would wait for its writer, and a device may have no end.
        if (match := _SHARD.fullmatch(file.name)) and is_regular(file):
            by_folder.setdefault(file.parent, {}).setdefault(match["split"], []).append(file)
    if len(by_folder) > 1:
        names = ", ".join(sorted(str(found) for found in by_folder))
        raise LowRankError(f"{folder} holds several sets, point at one of them: {names}.")
    return next(iter(by_folder.values()), {})


def absent_shards(files: Sequence[Path]) -> list[str]:
    """Names of the shards that the others' `-of-` count promises and that are not there."""
    matches = [match for file in files if (match := _SHARD.fullmatch(file.name)) and match["parts"]]
    counts = {match["parts"] for match in matches}
    if len(counts) > 1:
        raise LowRankError(f"{files[0].parent} mixes shards of {' and '.join(sorted(counts))} in one split.")
    present = {int(match["part"]) for match in matches}
    if counts and (promised := int(counts.copy().pop())) > MOST_SHARDS:
        raise LowRankError(
            f"{files[0]} claims to be one of {promised:,} shards; at most {MOST_SHARDS:,} are read."
        )
    return [
        f"{match['split']}-{part:0{len(match['part'])}d}-of-{match['parts']}.parquet"
        for match in matches[:1]
        for part in range(int(match["parts"]))
        if part not in present
    ]


def open_shards(files: Sequence[Path], *, missing: Missing, problems: Problems) -> tuple[ParquetStore, list[str]]:
    """The store over these shards, and the class names that their schema gives ([] where it gives none)."""
    absent = absent_shards(files)
    if absent and missing == "refuse":
        more = f" and {len(absent) - _NAMED:,} more" if len(absent) > _NAMED else ""
        raise LowRankError(f"{files[0].parent} lacks the shard {', '.join(absent[:_NAMED])}{more}.")
    problems.add_all(("missing shard", name) for name in absent)
    pq = require("pyarrow.parquet", extra="data", purpose="reading parquet")
    groups: list[RowGroup] = []
    labels: list[Tensor] = []
    schemas = []
    for shard, path in enumerate(files):
        try:
            with pq.ParquetFile(regular(path)) as file:
                schemas.append(file.schema_arrow)
                groups += _groups(file.metadata, shard)
                check_rows(sum(group.rows for group in groups), path)
                labels.append(_read_labels(file, path))
        except READ_ERRORS as error:
            if isinstance(error, LowRankError):
                raise
            raise LowRankError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    image, names = _image_column(schemas[0], files[0]), _class_names(schemas[0])
    for path, schema in zip(files, schemas, strict=True):
        if (named := _class_names(schema)) and named != names:
            raise LowRankError(f"{path} names other classes than {files[0].name}, or in another order.")
    store = ParquetStore(tuple(files), tuple(groups), torch.cat(labels), image, _starts(groups))
    return store, names


def numbered_classes(labels: Tensor, name: str) -> tuple[str, ...]:
    """Class names where the schema has none: the label numbers."""
    if not len(labels):
        raise LowRankError(f"{name} holds no images to train on.")
    highest = int(labels.max())
    if highest >= len(labels):
        raise LowRankError(f"{name} names no classes, and its labels go up to {highest}: one of them is wrong.")
    return tuple(str(label) for label in range(highest + 1))


def labelled_splits(shards: dict[str, list[Path]]) -> list[str]:
    """The splits that can be tested on, the one to take first: `test`, unless its labels are withheld.

    Withheld labels are all negative.
    """
    return [name for name in _TEST_SPLITS if name in shards and not _withheld(shards[name][0])]


def _withheld(path: Path) -> bool:
    pq = require("pyarrow.parquet", extra="data", purpose="reading parquet")
    try:
        with pq.ParquetFile(regular(path)) as file:
            return bool((_read_labels(file, path) < 0).all())
    except READ_ERRORS:
        return False  # opening the split says what is wrong with it


def _groups(metadata: Any, shard: int) -> list[RowGroup]:
    counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    firsts = accumulate(counts, initial=0)
    numbered = enumerate(zip(firsts, counts, strict=False))
    return [RowGroup(shard, number, first, rows) for number, (first, rows) in numbered if rows]


def _starts(groups: Sequence[RowGroup]) -> list[int]:
    return list(accumulate((group.rows for group in groups[:-1]), initial=0))


def _read_labels(file: Any, path: Path) -> Tensor:
    name = next((name for name in _LABEL_COLUMNS if name in file.schema_arrow.names), None)
    if name is None:
        raise LowRankError(f"{path} has no column label, only {', '.join(file.schema_arrow.names)}.")
    kind = file.schema_arrow.field(name).type
    if not str(kind).startswith(("int", "uint")):
        raise LowRankError(f"the column {name} of {path} holds {kind}, not class numbers.")
    check_rows(file.metadata.num_rows, path)
    return read_integers(file, name, missing=NO_LABEL)


def _image_column(schema: Any, path: Path) -> str:
    """The leaf to read: `bytes` within the struct, or the column itself where it is plain bytes."""
    for name in (name for name in _IMAGE_COLUMNS if name in schema.names):
        kind = schema.field(name).type
        if str(kind) in ("binary", "large_binary"):
            return name
        if str(kind).startswith("struct") and kind.get_field_index("bytes") >= 0:
            return f"{name}.bytes"
    raise LowRankError(f"{path} has no column image with bytes, only {', '.join(schema.names)}.")


def _class_names(schema: Any) -> list[str]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = next(features[name]["names"] for name in _LABEL_COLUMNS if name in features)
    except (KeyError, TypeError, ValueError, StopIteration):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
