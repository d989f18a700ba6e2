"""Opening a source by its looks: a name, a folder, an archive, or a repository of the Hub."""

from __future__ import annotations

from pathlib import Path

from lowrank_cnn.data.readers import cifar_binary, folder, hub, parquet
from lowrank_cnn.data.readers.digits import open_digits
from lowrank_cnn.data.readers.splits import Options, limited, make_split
from lowrank_cnn.data.readers.store import Store
from lowrank_cnn.data.types import Data, Problems
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.files import as_path


def open_source(source: str | Path, options: Options) -> Data:
    """The data behind a name or path, or a sentence on what it should have been."""
    if not isinstance(source, str | Path):
        raise LowRankError(f"data is opened by its name or path, not by {source!r}.")
    path = as_path(source)
    if str(source) == "digits" and not path.exists():
        return limited(open_digits(), options)
    if path.is_dir():
        return _open_folder(path, options)
    if path.is_file():
        return limited(cifar_binary.open_archive(path), options)
    if isinstance(source, str) and hub.is_repository(source):
        return _open_parquet(hub.fetch(source), options, name=source)
    raise LowRankError(
        f"{source} is no data: give digits, a folder of parquet shards or of train/CLASS images, "
        f"{cifar_binary.ARCHIVE}, or a Hub repository as owner/name."
    )


def _open_folder(path: Path, options: Options) -> Data:
    if cifar_binary.is_inside(path):
        return limited(cifar_binary.open_folder(path), options)
    if parquet.find_shards(path):
        return _open_parquet(path, options, name=path.resolve().name)
    if folder.class_folders(path / "train"):
        return _open_images(path, options)
    raise LowRankError(f"{path} holds neither parquet shards (train-00000-of-...) nor images as train/CLASS/*.")


def _open_parquet(path: Path, options: Options, *, name: str) -> Data:
    shards = parquet.find_shards(path)
    test_files = parquet.labelled_split(shards)
    if "train" not in shards or not test_files:
        raise LowRankError(
            f"{name} needs shards train-* and test-* or validation-* with labels; "
            f"it has {', '.join(shards) or 'none'}."
        )
    problems = {"train": Problems(), "test": Problems()}
    train, names = parquet.open_shards(shards["train"], missing=options.missing, problems=problems["train"])
    test, _ = parquet.open_shards(test_files, missing=options.missing, problems=problems["test"])
    classes = tuple(names) or parquet.numbered_classes(train.labels, name)
    return _data(name, classes, train, test, problems, options)


def _open_images(path: Path, options: Options) -> Data:
    test_path = folder.evaluation_folder(path)
    if test_path is None:
        raise LowRankError(f"{path} has train/ but no val/ or test/ with a folder for each class.")
    classes = tuple(folder.class_folders(path / "train"))
    problems = {"train": Problems(), "test": Problems()}
    train = folder.open_folder(path / "train", classes, problems["train"])
    test = folder.open_folder(test_path, classes, problems["test"])
    return _data(path.resolve().name, classes, train, test, problems, options)


def _data(
    name: str,
    classes: tuple[str, ...],
    train: Store,
    test: Store,
    problems: dict[str, Problems],
    options: Options,
) -> Data:
    """Both splits of a set; the training images decide whether it is grey."""
    trained = make_split(train, len(classes), problems["train"], options)
    tested = make_split(test, len(classes), problems["test"], options, channels=trained.channels)
    return Data(name, classes, trained, tested)
