"""Image files: `CLASS/*`, `train/CLASS/*` beside `val/CLASS/*` or `test/CLASS/*`, or the paths in a .csv."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.files import is_regular, read_regular, read_text
from lowrank_cnn.data.decode import BadImageError
from lowrank_cnn.data.store import ImageStore, LabelledImages, no_problems
from lowrank_cnn.data.types import Problems

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation", "eval", "evaluation")
_LARGEST_FILE = 2**29


class FolderStore(ImageStore):
    """Image files, each a row. The places in `paths` are the rows."""

    def read(self, row: int) -> bytes:
        try:
            return read_image(self.paths[row])
        except OSError as error:
            raise BadImageError(error.strerror or "unreadable") from error

    def file_of(self, row: int) -> int:
        return row

    def where(self, row: int) -> str:
        return os.path.relpath(self.paths[row], self.root.parent)

    def shuffled(self, draw: torch.Generator) -> Tensor:
        return torch.randperm(len(self.paths), generator=draw)


def read_image(path: str | Path) -> bytes:
    """The content of an image file; `OSError` for anything but a regular file of bounded size."""
    return read_regular(path, most=_LARGEST_FILE)


def open_images(path: Path) -> LabelledImages:
    """A folder with train and test folders, or one with the classes themselves."""
    name, problems = path.resolve().name, no_problems()
    train, tested = next(iter(_named(path, TRAIN_NAMES)), None), _named(path, TEST_NAMES)
    if train is None and not tested:
        if not (flat := _flat_classes(path, problems["train"])):
            raise LowRankError(_no_images(path))
        return LabelledImages(name, flat, open_folder(path, flat, problems["train"]), problems=problems)
    classes = _class_folders(train or tested[0])
    stores = {}
    for split, folder in (("train", train), ("test", next(iter(tested), None))):
        if folder:
            stores[split] = open_folder(folder, classes, problems[split])
            for other in sorted(set(_class_folders(folder)) - set(classes)):
                problems[split].add("unknown class folder", f"{folder.name}/{other}: not in train")
    named = [path / folder for folder in _class_folders(path) if folder.lower() in TEST_NAMES]
    unlabelled = tuple(f.name for f in named if not _class_folders(f) and _holds_images(f))
    names = tuple(folder.name for folder in tested)
    return LabelledImages(name, classes, stores.get("train"), stores.get("test"), names, unlabelled, problems)


def open_folder(folder: Path, classes: Sequence[str], problems: Problems) -> FolderStore:
    """The images of these classes; a class without images is a problem."""
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(image_files(folder / name, problems))
        files += found
        labels += [label] * len(found)
        if not found:
            problems.add("empty class folder", f"{folder.name}/{name}")
    return FolderStore(folder, files, torch.tensor(labels, dtype=torch.int64))


def _class_folders(folder: Path) -> tuple[str, ...]:
    """Names of the folders within, without hidden ones."""
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))


def _named(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders of these names, in any case of letters, that have class folders, in the order of the names."""
    by_name = {name.lower(): root / name for name in reversed(_class_folders(root))}
    return [by_name[name] for name in names if name in by_name and _class_folders(by_name[name])]


def _flat_classes(root: Path, problems: Problems) -> tuple[str, ...]:
    """The class folders of a root without train and test folders: those with images in them.

    A folder `train` of images may be a class, of vehicles say, or hold images without classes: it is a problem.
    """
    folders = _class_folders(root)
    names = [name for name in folders if next(image_files(root / name, Problems()), None)]
    classes = tuple(name for name in names if name.lower() not in TRAIN_NAMES + TEST_NAMES)
    problems.add_all(
        ("empty class folder", f"{root.resolve().name}/{name}") for name in folders if name not in names
    )
    for name in sorted(set(names) - set(classes)) if classes else ():
        problems.add(
            "folder", f"{root.resolve().name}/{name}: if it is a class, put all class folders into train/"
        )
    return classes


def _holds_images(folder: Path) -> bool:
    return any(entry.suffix.lower() in SUFFIXES for entry in folder.iterdir())


def _no_images(path: Path) -> str:
    if _holds_images(path):
        return f"{path} holds images without classes: put those of each class into a folder of its own."
    return (
        f"{path} holds neither parquet shards (train-00000-of-...) nor images as CLASS/* or train/CLASS/*: "
        "each class needs a folder with its images."
    )


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


_PATH_COLUMNS = ("path", "file", "filename", "image")
_LABEL_COLUMNS = ("label", "class", "category")
_SPLIT_COLUMNS = ("split", "set", "subset")
_DELIMITERS = (",", ";", "\t")
"""Spreadsheets write semicolons if a comma is the decimal mark."""
_MOST_BYTES = 2**28


class TableRow(NamedTuple):
    """A line of a table of images."""

    path: str
    label: str
    split: str


def open_table(path: Path) -> LabelledImages:
    """The images that a CSV file lists: a column path, a column label, and perhaps a column split.

    Paths are relative to the file. Classes are the labels, sorted; missing files are problems, and so are files
    that are to be trained and tested on. If there are lines for `test` and for `val`, those for `test` are used.
    """
    try:
        rows, problems = _table_rows(path), no_problems()
    except csv.Error as error:
        raise LowRankError(f"{path} cannot be read as a table: {error}.") from error
    splits = tuple(name for name in TEST_NAMES if any(row.split == name for row in rows))
    train = [row for row in rows if row.split in TRAIN_NAMES]
    if not train:
        raise LowRankError(f"{path} lists no image to train on.")
    trained = {os.path.normpath(row.path) for row in train}
    test = []
    for row in (row for row in rows if row.split in splits[:1]):
        if os.path.normpath(row.path) in trained:
            problems["test"].add("file to train on", row.path)
        else:
            test.append(row)
    classes = sorted({row.label for row in rows})
    return LabelledImages(
        f"{path.resolve().parent.name}/{path.name}",
        tuple(classes),
        _store(path.parent, train, classes, problems["train"]),
        _store(path.parent, test, classes, problems["test"]) if test else None,
        tested=splits,
        problems=problems,
    )


def _table_rows(path: Path) -> list[TableRow]:
    text = _text(path)
    first = text.partition("\n")[0]
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=first.count))
    header = [name.strip().lower() for name in next(lines, [])]
    columns = (_PATH_COLUMNS, _LABEL_COLUMNS, _SPLIT_COLUMNS)
    places = [next((header.index(name) for name in names if name in header), None) for names in columns]
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
    return rows


def _store(folder: Path, rows: Sequence[TableRow], classes: Sequence[str], problems: Problems) -> FolderStore:
    there = []
    for row in rows:
        if (folder / row.path).is_file():
            there.append(row)
        else:
            problems.add("missing file", row.path)
    number = {name: index for index, name in enumerate(classes)}
    labels = torch.tensor([number[row.label] for row in there], dtype=torch.int64)
    return FolderStore(folder, [str(folder / row.path) for row in there], labels)


def read_class_names(path: Path) -> dict[str, str]:
    """Names to show for classes: lines of class and name parted by a tab or comma."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    pairs = [line.split("\t" if "\t" in line else ",", 1) for line in lines]
    if not pairs or any(len(pair) < 2 for pair in pairs):
        raise LowRankError(f"{path} is to hold a class and its name in each line, parted by a tab or a comma.")
    return {folder.strip(): name.strip() for folder, name in pairs}


def renamed(classes: Sequence[str], path: Path) -> tuple[str, ...]:
    """The classes by the names that a file gives to show; a class without one keeps its own."""
    names = read_class_names(path)
    shown = tuple(names.get(name, name) for name in classes)
    twice = next((name for name in shown if shown.count(name) > 1), None)
    if twice is not None:
        raise LowRankError(f"{path} gives two classes the name {twice!r}: names must differ.")
    if shown == tuple(classes):
        raise LowRankError(f"{path} names none of the classes, such as {classes[0]!r}.")
    return shown


def _text(path: Path) -> str:
    try:
        return read_text(path, most=_MOST_BYTES)
    except OSError as error:
        raise LowRankError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise LowRankError(f"{path} is not UTF-8 text.") from error
