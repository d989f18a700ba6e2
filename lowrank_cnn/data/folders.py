"""Image files: `CLASS/*`, `train/CLASS/*` beside `val/CLASS/*` or `test/CLASS/*`, or the paths in a .csv."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lowrank_cnn.core.errors import LowRankError, nearest
from lowrank_cnn.core.files import is_regular, read_text
from lowrank_cnn.data.store import ImageStore, LabelledImages
from lowrank_cnn.data.types import Problems

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation", "eval", "evaluation")


def open_images(path: Path) -> LabelledImages:
    """A folder with train and test folders, or one with the classes themselves."""
    name, problems = path.resolve().name, {"train": Problems(), "test": Problems()}
    train, tested = next(iter(_named(path, TRAIN_NAMES)), None), _named(path, TEST_NAMES)
    if train is None and not tested:
        if not (flat := _flat_classes(path, problems["train"])):
            if _holds_images(path):
                raise LowRankError(
                    f"{path} holds images without classes: put those of each class into a folder of its own."
                )
            raise LowRankError(
                f"{path} holds neither parquet shards (train-00000-of-...) nor images as CLASS/* or "
                "train/CLASS/*: each class needs a folder with its images."
            )
        return LabelledImages(name, flat, {"train": open_folder(path, flat, problems["train"])}, problems)
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
    return LabelledImages(name, classes, stores, problems, names, unlabelled)


def open_folder(folder: Path, classes: Sequence[str], problems: Problems) -> ImageStore:
    """The images of these classes; a class without images is a problem."""
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(image_files(folder / name, problems))
        files += found
        labels += [label] * len(found)
        if not found:
            problems.add("empty class folder", f"{folder.name}/{name}")
    return ImageStore(folder, files, torch.tensor(labels, dtype=torch.int64))


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
    folders, parent = _class_folders(root), root.resolve().name
    names = [name for name in folders if next(image_files(root / name, Problems()), None)]
    classes = tuple(name for name in names if name.lower() not in TRAIN_NAMES + TEST_NAMES)
    problems.add_all(("empty class folder", f"{parent}/{name}") for name in folders if name not in names)
    for name in sorted(set(names) - set(classes)) if classes else ():
        problems.add("folder", f"{parent}/{name}: if it is a class, put all class folders into train/")
    return classes


def _holds_images(folder: Path) -> bool:
    return any(entry.suffix.lower() in SUFFIXES for entry in folder.iterdir())


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


def open_table(path: Path) -> LabelledImages:
    """The images that a CSV file lists: a column path, a column label, and perhaps a column split.

    Paths are relative to the file. Classes are the labels, sorted; missing files are problems, and so are files
    that are to be trained and tested on. If there are lines for `test` and for `val`, those for `test` are used.
    """
    try:
        rows, problems = _table_rows(path), {"train": Problems(), "test": Problems()}
    except csv.Error as error:
        raise LowRankError(f"{path} cannot be read as a table: {error}.") from error
    splits = tuple(name for name in TEST_NAMES if any(split == name for _, _, split in rows))
    train = [row for row in rows if row[2] in TRAIN_NAMES]
    if not train:
        raise LowRankError(f"{path} lists no image to train on.")
    trained = {os.path.normpath(file) for file, _, _ in train}
    test = [row for row in rows if row[2] in splits[:1]]
    problems["test"].add_all(("file to train on", row[0]) for row in test if os.path.normpath(row[0]) in trained)
    test = [row for row in test if os.path.normpath(row[0]) not in trained]
    classes = sorted({label for _, label, _ in rows})
    chosen = {"train": train, "test": test} if test else {"train": train}
    stores = {split: _store(path.parent, rows, classes, problems[split]) for split, rows in chosen.items()}
    return LabelledImages(f"{path.resolve().parent.name}/{path.name}", tuple(classes), stores, problems, splits)


def _table_rows(path: Path) -> list[tuple[str, str, str]]:
    """The path, the label and the split of each line."""
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
        rows.append((line[at_path].strip(), line[at_label].strip(), split))
    return rows


def _store(
    folder: Path, rows: Sequence[tuple[str, str, str]], classes: Sequence[str], problems: Problems
) -> ImageStore:
    number = {name: index for index, name in enumerate(classes)}
    files, labels = [], []
    for file, label, _ in rows:
        if (folder / file).is_file():
            files.append(str(folder / file))
            labels.append(number[label])
        else:
            problems.add("missing file", file)
    return ImageStore(folder, files, torch.tensor(labels, dtype=torch.int64))


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
