"""Image folders: `CLASS/*`, or `train/CLASS/*` beside `val/CLASS/*` or `test/CLASS/*`."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.files import is_regular, read_regular, read_text
from lowrank_cnn.data.decode import BadImageError
from lowrank_cnn.data.types import Contents, Problems, fingerprint_of_files, version_of_files

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation", "eval", "evaluation")
_LARGEST_FILE = 2**29


@dataclass
class FolderStore:
    """The image files below one folder, sorted, and the class of each."""

    root: Path
    files: list[str]
    labels: Tensor
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(self.files, len(self.files))

    @property
    def paths(self) -> Sequence[str]:
        return self.files

    def read(self, row: int) -> bytes:
        try:
            return read_image(self.files[row])
        except OSError as error:
            raise BadImageError(error.strerror or "unreadable") from error

    def file_of(self, row: int) -> int:
        return row

    def where(self, row: int) -> str:
        return os.path.relpath(self.files[row], self.root.parent)

    def shuffled(self, draw: torch.Generator) -> Tensor:
        return torch.randperm(len(self.files), generator=draw)

    def fingerprint(self) -> str:
        return fingerprint_of_files(self.root, self.files)

    def version(self) -> str:
        return version_of_files(self.files)

    def keep(self, places: int, rows: int) -> None:
        """Files are read one by one: nothing is kept."""


def read_image(path: str | Path) -> bytes:
    """The content of an image file; `OSError` for anything but a regular file of bounded size."""
    return read_regular(path, most=_LARGEST_FILE)


def class_folders(folder: Path) -> list[str]:
    """Names of the folders within, hidden ones apart."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")


def training_folder(root: Path) -> Path | None:
    """`train` or `training`, in any case of letters, where it has class folders."""
    return next(iter(_named(root, TRAIN_NAMES)), None)


def evaluation_folders(root: Path) -> list[Path]:
    """Those of test, val, ... that have class folders: a test folder of unnamed images does not count."""
    return _named(root, TEST_NAMES)


def unlabelled_folders(root: Path) -> list[str]:
    """Names of those of test, val, ... that hold images and no class folders."""
    named = [root / name for name in class_folders(root) if name.lower() in TEST_NAMES]
    return [folder.name for folder in named if not class_folders(folder) and holds_images(folder)]


def flat_classes(root: Path, problems: Problems) -> list[str]:
    """The class folders of a root without train and test folders: those with images in them.

    A folder `train` of images may be a class, of vehicles say, or hold images without classes: it is a problem.
    """
    names = [name for name in class_folders(root) if next(image_files(root / name, Problems()), None)]
    classes = [name for name in names if name.lower() not in TRAIN_NAMES + TEST_NAMES]
    for name in sorted(set(names) - set(classes)) if classes else ():
        problems.add(
            "folder", f"{root.resolve().name}/{name}: if it is a class, put all class folders into train/"
        )
    return classes


def holds_images(folder: Path) -> bool:
    """Whether image files lie directly in the folder."""
    return any(entry.suffix.lower() in SUFFIXES for entry in folder.iterdir())


def open_folder(folder: Path, classes: Sequence[str], problems: Problems, *, others: bool = False) -> FolderStore:
    """The images of these classes; a class without images, or a folder that is no class, is a problem.

    With `others`, further folders are no problem: those beside the classes of a flat folder are not asked about.
    """
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(image_files(folder / name, problems))
        files += found
        labels += [label] * len(found)
        if not found:
            problems.add("empty class folder", f"{folder.name}/{name}")
    for name in () if others else sorted(set(class_folders(folder)) - set(classes)):
        problems.add("unknown class folder", f"{folder.name}/{name}: not in train")
    return FolderStore(folder, files, torch.tensor(labels, dtype=torch.int64))


def _named(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders of these names that have class folders, in the order of the names."""
    by_name = {name.lower(): root / name for name in reversed(class_folders(root))}
    found = (by_name[name] for name in names if name in by_name)
    return [folder for folder in found if class_folders(folder)]


def image_files(folder: Path, problems: Problems) -> Iterator[str]:
    """Image files at any depth below the folder, without those that are hidden or in hidden folders.

    Links to folders are followed, each folder once: a link may lead back to where it lies. Pipes and devices with
    the name of an image would hang a reader.
    """
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        if (place := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(place)
        for name in names:
            if name[0] == "." or Path(name).suffix.lower() not in SUFFIXES:
                continue
            path = Path(parent, name)
            if is_regular(path):
                yield str(path)
            else:
                problems.add("special file", str(path.relative_to(folder.parent)))


# A CSV file of image paths and labels, and files of class names.

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
