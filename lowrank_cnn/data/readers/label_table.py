"""A CSV file of image paths and labels, and files of class names."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lowrank_cnn.data.readers.folder import TEST_NAMES, TRAIN_NAMES, FolderStore
from lowrank_cnn.data.types import Problems
from lowrank_cnn.system.errors import LowRankError, nearest
from lowrank_cnn.system.files import read_text

_PATH_COLUMNS = ("path", "file", "filename", "image")
_LABEL_COLUMNS = ("label", "class", "category")
_SPLIT_COLUMNS = ("split", "set", "subset")
_DELIMITERS = (",", ";", "\t")
"""Spreadsheets write semicolons where a comma parts decimals."""
_MOST_BYTES = 2**28


class TableRow(NamedTuple):
    """A line of the table: where the image lies, what it shows, and the split that it is of."""

    path: str
    label: str
    split: str

    @property
    def train(self) -> bool:
        return self.split in TRAIN_NAMES


class LabelTable(NamedTuple):
    """The images of a table: a store for each split; None if no line is for testing.

    `tested` names the split to test on, and then others that could be.
    """

    classes: tuple[str, ...]
    train: FolderStore
    test: FolderStore | None
    tested: tuple[str, ...]


def open_table(path: Path, problems: dict[str, Problems]) -> LabelTable:
    """The images that a CSV file lists: a column path, a column label, and perhaps a column split.

    Paths are relative to the file. Classes are the labels, sorted; missing files are problems, and so are files
    that are to be trained and tested on. Of lines for `test` and for `val`, those for `test` are tested on.
    """
    rows = _read(path)
    splits = tuple(name for name in TEST_NAMES if any(row.split == name for row in rows))
    classes = tuple(sorted({row.label for row in rows}))
    train = _store(path, [row for row in rows if row.train], classes, problems["train"])
    trained = {os.path.normpath(row.path) for row in rows if row.train}
    tested = []
    for row in (row for row in rows if row.split in splits[:1]):
        if os.path.normpath(row.path) in trained:
            problems["test"].add("file to train on", row.path)
        else:
            tested.append(row)
    test = _store(path, tested, classes, problems["test"]) if tested else None
    return LabelTable(classes, train, test, splits)


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
    text = _text(path)
    first = text.partition("\n")[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=first.count))
    header = [name.strip().lower() for name in next(lines, [])]
    places = [_column(header, names) for names in (_PATH_COLUMNS, _LABEL_COLUMNS, _SPLIT_COLUMNS)]
    at_path, at_label, at_split = places
    if at_path is None or at_label is None:
        raise LowRankError(
            f"{path} needs a first line that names the columns path and label (and split, if you like), "
            f"not {', '.join(header) or 'nothing'}."
        )
    rows = []
    for line in lines:
        if not any(line):
            continue
        where = f"line {lines.line_num} of {path}"
        if len(line) <= max(place for place in places if place is not None) or not line[at_label].strip():
            raise LowRankError(f"{where} has no path or no label.")
        split = (line[at_split].strip().lower() if at_split is not None else "") or TRAIN_NAMES[0]
        if split not in TRAIN_NAMES + TEST_NAMES:
            raise LowRankError(f"{where} has the split {split!r}: {nearest(split, TRAIN_NAMES + TEST_NAMES)}")
        rows.append(TableRow(line[at_path].strip(), line[at_label].strip(), split))
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
        return read_text(path, most=_MOST_BYTES)
    except OSError as error:
        raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise LowRankError(f"{path} is not UTF-8 text.") from error
