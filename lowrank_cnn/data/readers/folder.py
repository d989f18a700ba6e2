"""Image folders: `CLASS/*`, or `train/CLASS/*` beside `val/CLASS/*` or `test/CLASS/*`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lowrank_cnn.data.fingerprint import Contents, fingerprint_of_files, version_of_files
from lowrank_cnn.data.images.decode import BadImageError
from lowrank_cnn.data.types import Problems
from lowrank_cnn.system.files import is_regular, read_regular

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
