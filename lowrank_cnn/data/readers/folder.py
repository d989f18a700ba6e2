"""Image folders: `train/CLASS/*` beside `val/CLASS/*` or `test/CLASS/*`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowrank_cnn.data.fingerprint import fingerprint_of_files
from lowrank_cnn.data.images.decode import BadImageError
from lowrank_cnn.data.types import Problems
from lowrank_cnn.system.files import is_regular, read_regular

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
_LARGEST_FILE = 2**29
_TEST_FOLDERS = ("test", "val", "valid", "validation")


@dataclass
class FolderStore:
    """The image files below one folder, sorted, and the class of each."""

    root: Path
    files: list[str]
    labels: Tensor

    def read(self, row: int) -> bytes:
        try:
            return read_regular(self.files[row], most=_LARGEST_FILE)
        except OSError as error:
            raise BadImageError(error.strerror or "unreadable") from error

    def where(self, row: int) -> str:
        return os.path.relpath(self.files[row], self.root.parent)

    def shuffled(self, draw: torch.Generator) -> Tensor:
        return torch.randperm(len(self.files), generator=draw)

    def fingerprint(self) -> str:
        return fingerprint_of_files(self.root, self.files)

    def keep(self, places: int, rows: int) -> None:
        """Files are read one by one: nothing is kept."""


def class_folders(folder: Path) -> list[str]:
    """Names of the folders within, hidden ones apart."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")


def evaluation_folder(root: Path) -> Path | None:
    """The first of test, val, ... that has class folders: a test folder of unnamed images does not count."""
    return next((root / name for name in _TEST_FOLDERS if class_folders(root / name)), None)


def open_folder(folder: Path, classes: Sequence[str], problems: Problems) -> FolderStore:
    """The images of these classes; a class without images, or a folder that is no class, is a problem."""
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images(folder / name)
        files += found
        labels += [label] * len(found)
        if not found:
            problems.add("empty class folder", f"{folder.name}/{name}")
    for name in sorted(set(class_folders(folder)) - set(classes)):
        problems.add("class folder unknown in train", f"{folder.name}/{name}")
    return FolderStore(folder, files, torch.tensor(labels, dtype=torch.int64))


def _images(folder: Path) -> list[str]:
    """Image files at any depth below the folder, by name."""
    return sorted(
        str(Path(parent, name))
        for parent, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in _SUFFIXES and name[0] != "." and is_regular(Path(parent, name))
    )
