"""Parquet shards in the Hugging Face image layout, in a folder or on the Hub: their classes, and reading rows."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, first_line, nearest, require
from lowrank_cnn.core.files import UnreadableError, is_regular, parse_json, regular
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.data.decode import BadImageError
from lowrank_cnn.data.store import NO_LABEL, ImageStore, LabelledImages
from lowrank_cnn.data.types import Problems

MOST_ROWS = 3 * 10**7
"""Images of one split: twice those of ImageNet-21k."""
MOST_SHARDS = 10**5
LARGEST_GROUP = 2**30
"""Bytes of the images in one row group, as the file states them."""
READ_ERRORS = (OSError, ValueError, NotImplementedError, LookupError, TypeError)
"""The bases of pyarrow's errors, except those of memory."""
_SHARD = re.compile(
    r"(?P<split>train|test|validation|valid|val)(-(?P<part>\d+)-of-(?P<parts>\d+)(-[0-9a-f]+)?)?\.parquet"
)
_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label")
_TEST_SPLITS = ("test", "validation", "valid", "val")
_BATCH_ROWS = 2**16
_NAMED = 5


def open_parquet(folder: Path, *, name: str) -> LabelledImages:
    """The images of the shards in a folder. Test shards may number their classes in another order."""
    shards, problems = find_shards(folder), {"train": Problems(), "test": Problems()}
    # `test` first, unless its labels are withheld, that is, all negative.
    tested = tuple(split for split in _TEST_SPLITS if split in shards and not _withheld(shards[split][0]))
    stores: dict[str, ImageStore] = {}
    names: list[str] = []
    for split, files in (("train", shards.get("train")), ("test", shards[tested[0]] if tested else None)):
        if files:
            stores[split], named = open_shards(files)
            if names and named and named != names:
                stores[split] = stores[split].with_classes(named, names, problems[split])
            names = names or named
    if not stores:
        raise LowRankError(f"{name} needs shards train-* with labels; it has {', '.join(shards) or 'none'}.")
    if not names:  # the label numbers, as the schema has none
        labels = next(iter(stores.values())).labels
        if not len(labels):
            raise LowRankError(f"{name} holds no images to train on.")
        highest = int(labels.max())
        if highest >= len(labels):
            raise LowRankError(
                f"{name} names no classes, and its labels go up to {highest}: one of them is wrong."
            )
        names = [str(label) for label in range(highest + 1)]
    return LabelledImages(name, tuple(names), stores, problems, tested)


@dataclass(frozen=True)
class RowGroup:
    """A row group: what is read from a shard at once."""

    shard: int
    number: int
    first: int  # the row of the shard
    start: int  # and that of the store
    rows: int


@dataclass
class ParquetStore(ImageStore):
    """The rows of several shards, numbered through; row groups in use are kept, the oldest dropped."""

    groups: Sequence[RowGroup]
    image_column: str
    _held: OrderedDict[int, Any] = field(default_factory=OrderedDict, repr=False)
    _capacity: int = 2

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
        return f"{Path(self.paths[group.shard]).name}:{group.first + offset}"

    def shuffled(self, draw: torch.Generator) -> Tensor:
        """Shards in random order, each whole, its row groups in random order within it."""
        shard_of = torch.tensor([group.shard for group in self.groups])
        place = torch.randperm(len(self.paths), generator=draw)[shard_of]
        mixed = torch.randperm(len(self.groups), generator=draw)
        order = mixed[torch.argsort(place[mixed], stable=True)].tolist()
        groups = (self.groups[index] for index in order)
        return torch.cat([torch.arange(group.start, group.start + group.rows) for group in groups])

    def keep(self, places: int, rows: int) -> None:
        mean = max(1, len(self.labels) // len(self.groups))
        self._capacity = places * (ceil_div(rows, mean) + 1)

    def _find(self, row: int) -> tuple[int, int]:
        index = bisect_right(self.groups, row, key=attrgetter("start")) - 1
        return index, row - self.groups[index].start

    def _load(self, index: int) -> Any:
        if index not in self._held:
            while len(self._held) >= self._capacity:
                self._held.popitem(last=False)
            group = self.groups[index]
            self._held[index] = read_binaries(self.paths[group.shard], self.image_column, group.number)
        self._held.move_to_end(index)
        return self._held[index]


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
    """Names of the shards that are missing by the `-of-` count of the others."""
    matches = [match for file in files if (match := _SHARD.fullmatch(file.name)) and match["parts"]]
    counts = sorted({match["parts"] for match in matches})
    if not counts:
        return []
    if len(counts) > 1:
        raise LowRankError(f"{files[0].parent} mixes shards of {' and '.join(counts)} in one split.")
    if int(counts[0]) > MOST_SHARDS:
        raise LowRankError(
            f"{files[0]} claims to be one of {int(counts[0]):,} shards; at most {MOST_SHARDS:,} are read."
        )
    present, width = {int(match["part"]) for match in matches}, len(matches[0]["part"])
    absent = (part for part in range(int(counts[0])) if part not in present)
    return [f"{matches[0]['split']}-{part:0{width}d}-of-{counts[0]}.parquet" for part in absent]


def open_shards(files: Sequence[Path]) -> tuple[ParquetStore, list[str]]:
    """The store over these shards, and the class names that their schema gives ([] where it gives none)."""
    if absent := absent_shards(files):
        more = f" and {len(absent) - _NAMED:,} more" if len(absent) > _NAMED else ""
        raise LowRankError(f"{files[0].parent} lacks the shard {', '.join(absent[:_NAMED])}{more}.")
    groups: list[RowGroup] = []
    labels: list[Tensor] = []
    image, names, total = "", [], 0
    for shard, path in enumerate(files):
        try:
            with _opened(path) as file:
                before = total
                for number in range(file.num_row_groups):
                    rows = file.metadata.row_group(number).num_rows
                    if rows:
                        groups.append(RowGroup(shard, number, total - before, total, rows))
                    total += rows
                labels.append(_read_labels(file, path, total))
                schema = file.schema_arrow
        except READ_ERRORS as error:
            if isinstance(error, LowRankError):
                raise
            raise LowRankError(f"{path} cannot be read as parquet: {first_line(error)}.") from error
        named = _class_names(schema)
        if not shard:
            image, names = _image_column(schema, path), named
        elif named and named != names:
            raise LowRankError(f"{path} names other classes than {files[0].name}, or in another order.")
    return ParquetStore(files[0].parent, files, torch.cat(labels), groups, image), names


def _opened(path: str | Path, **options: Any) -> Any:
    pq = require("pyarrow.parquet", extra="data", purpose="reading parquet")
    return pq.ParquetFile(regular(Path(path)), **options)


def _withheld(path: Path) -> bool:
    with suppress(*READ_ERRORS), _opened(path) as file:
        return bool((_read_labels(file, path) < 0).all())
    return False  # opening the split says what is wrong with it


def _read_labels(file: Any, path: Path, rows: int = 0) -> Tensor:
    """The labels of a shard, NO_LABEL where a row has none; this and earlier shards claim to have `rows`."""
    name = next((name for name in _LABEL_COLUMNS if name in file.schema_arrow.names), None)
    if name is None:
        raise LowRankError(f"{path} has no column label, only {', '.join(file.schema_arrow.names)}.")
    kind = file.schema_arrow.field(name).type
    if not str(kind).startswith(("int", "uint")):
        raise LowRankError(f"the column {name} of {path} holds {kind}, not class numbers.")
    for claimed in (rows, file.metadata.num_rows):
        if not 0 <= claimed <= MOST_ROWS:
            raise LowRankError(
                f"{path} claims {claimed:,} rows; at most {MOST_ROWS:,} images of a split are read."
            )
    found, done = torch.empty(file.metadata.num_rows, dtype=torch.int64), 0
    # In pieces: parquet stores equal values once, so a few hundred bytes can stand for gigabytes.
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[name], use_threads=False):
        values = batch.column(0).cast("int64").fill_null(NO_LABEL).to_numpy(zero_copy_only=False)
        if done + len(values) > len(found):
            raise ValueError("it has more rows than it says")
        found[done : done + len(values)] = torch.from_numpy(values.copy())
        done += len(values)
    return found[:done]


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
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = next(features[name]["names"] for name in _LABEL_COLUMNS if name in features)
    except (KeyError, TypeError, UnreadableError, StopIteration):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def read_binaries(path: str | Path, name: str, group: int) -> Any:
    """The images of a row group as an array of bytes; None where they exceed the bound or are damaged.

    Values that are stored once stay so: as a dictionary, they take the memory that the file says they take.
    """
    with suppress(*READ_ERRORS), _opened(path, read_dictionary=[name]) as file:
        metadata = file.metadata.row_group(group)
        columns = [metadata.column(index) for index in range(metadata.num_columns)]
        sizes = [column.total_uncompressed_size for column in columns if column.path_in_schema == name]
        if sizes and sizes[0] <= LARGEST_GROUP:
            column = file.read_row_group(group, columns=[name], use_threads=False).column(0).combine_chunks()
            return column.field("bytes") if hasattr(column, "field") else column
    return None


_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# ILSVRC's test images come without labels: 13 GB that nothing here could use.
_WANTED = {"ILSVRC/imagenet-1k": ("data/train-*.parquet", "data/validation-*.parquet")}


def is_repository(source: str) -> bool:
    """Whether the text has the form `owner/name`."""
    return _REPOSITORY.fullmatch(source) is not None


def download_shards(repository: str) -> Path:
    """The local folder of the set's shards, downloaded where they are not cached yet."""
    folder = Path(repository).parent
    if folder.is_dir():
        names = [entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."]
        there = nearest(Path(repository).name, names) if names else f"{folder} holds no folders."
        raise LowRankError(
            f"there is no folder {repository}; {there} A set of the Hub is not looked up by the name of a local "
            "folder."
        )
    hub = require("huggingface_hub", extra="data", purpose="fetching a set from the Hub")
    wanted = list(_WANTED.get(repository, ("*.parquet",)))
    try:
        return Path(hub.snapshot_download(repository, repo_type="dataset", allow_patterns=wanted))
    except Exception as error:  # network, permission, disk and unknown names have no common ancestor
        raise LowRankError(
            f"{repository} is no local folder and cannot be fetched from the Hub ({first_line(error)}): "
            "check its name, the network, and for a gated set that you are logged in."
        ) from error
