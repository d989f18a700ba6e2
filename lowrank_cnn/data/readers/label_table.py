"""A CSV file of image paths and labels, and files of class names."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lowrank_cnn.data.readers.folder import FolderStore
from lowrank_cnn.data.types import Problems
from lowrank_cnn.system.errors import LowRankError

_PATH_COLUMNS = ("path", "file", "filename", "image")
_LABEL_COLUMNS = ("label", "class", "category")
_SPLIT_COLUMNS = ("split", "set", "subset")
_TRAIN = ("", "train", "training")
_MOST_BYTES = 2**28


class TableRow(NamedTuple):
    """A line of the table: where the image lies, what it shows, and whether it is to train on."""

    path: str
    label: str
    train: bool


class LabelTable(NamedTuple):
    """The images of a table: a store for each split; None if no line is for testing."""

    classes: tuple[str, ...]
    train: FolderStore
    test: FolderStore | None


def open_table(path: Path, problems: dict[str, Problems]) -> LabelTable:
    """The images that a CSV file lists: a column path, a column label, and perhaps a column split.

    Paths are relative to the file. Classes are the labels, sorted; missing files are problems.
    """
    rows = _read(path)
    classes = tuple(sorted({row.label for row in rows}))
    train = _store(path, [row for row in rows if row.train], classes, problems["train"])
    tested = [row for row in rows if not row.train]
    return LabelTable(classes, train, _store(path, tested, classes, problems["test"]) if tested else None)


def read_class_names(path: Path) -> dict[str, str]:
    """Names to show for classes: a JSON object, or lines of class and name parted by a tab or comma."""
    text = _text(path)
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except ValueError as error:
            raise LowRankError(f"{path} is not JSON: it is to map class folders to names.") from error
        pairs = list(found.items()) if isinstance(found, dict) else []
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        pairs = [line.split("\t" if "\t" in line else ",", 1) for line in lines]
    if not pairs or not all(len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs):
        raise LowRankError(f"{path} is to hold a class and its name in each line, parted by a tab or a comma.")
    return {folder.strip(): name.strip() for folder, name in pairs}


def renamed(classes: Sequence[str], names: dict[str, str], path: Path) -> tuple[str, ...]:
    """The classes by the names to show; a class without one keeps its own."""
    shown = tuple(names.get(name, name) for name in classes)
    twice = next((name for name in shown if shown.count(name) > 1), None)
    if twice is not None:
        raise LowRankError(f"{path} gives two classes the name {twice!r}: names must differ.")
    if shown == tuple(classes):
        raise LowRankError(f"{path} names none of the classes, such as {classes[0]!r}.")
    return shown


def _read(path: Path) -> list[TableRow]:
    lines = list(csv.reader(_text(path).splitlines()))
    header = [name.strip().lower() for name in lines[0]] if lines else []
    places = [_column(header, names) for names in (_PATH_COLUMNS, _LABEL_COLUMNS, _SPLIT_COLUMNS)]
    at_path, at_label, at_split = places
    if at_path is None or at_label is None:
        raise LowRankError(
            f"{path} needs a first line that names the columns path and label (and split, if you like), "
            f"not {', '.join(header) or 'nothing'}."
        )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not any(line):
            continue
        if len(line) <= max(place for place in places if place is not None) or not line[at_label].strip():
            raise LowRankError(f"line {number} of {path} has no path or no label.")
        split = line[at_split].strip().lower() if at_split is not None else ""
        rows.append(TableRow(line[at_path].strip(), line[at_label].strip(), split in _TRAIN))
    if not any(row.train for row in rows):
        raise LowRankError(f"{path} lists no image to train on.")
    return rows


def _column(header: Sequence[str], names: Iterable[str]) -> int | None:
    return next((header.index(name) for name in names if name in header), None)


def _store(path: Path, rows: list[TableRow], classes: Sequence[str], problems: Problems) -> FolderStore:
    number = {name: index for index, name in enumerate(classes)}
    there = []
    for row in rows:
        if (path.parent / row.path).is_file():
            there.append(row)
        else:
            problems.add("missing file", row.path)
    labels = torch.tensor([number[row.label] for row in there], dtype=torch.int64)
    return FolderStore(path.parent, [str(path.parent / row.path) for row in there], labels)


def _text(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise LowRankError(f"{path} is not a text file of moderate size.")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise LowRankError(f"{path} is not UTF-8 text.") from error
