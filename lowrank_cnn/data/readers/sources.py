"""Open a source by its name or content: a folder, a table, an archive, or a repository of the Hub."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lowrank_cnn.data.readers import cifar_binary, folder, hub, parquet
from lowrank_cnn.data.readers.digits import open_digits
from lowrank_cnn.data.readers.image_store import UNKNOWN_CLASS, ImageStore
from lowrank_cnn.data.readers.label_table import open_table, read_class_names, renamed
from lowrank_cnn.data.readers.read_options import VAL_SPLIT, ReadOptions
from lowrank_cnn.data.readers.splits import class_rows, divided, make_split, with_default_size, with_limit
from lowrank_cnn.data.types import Data, Problems, places_by_name
from lowrank_cnn.system.errors import LowRankError, LowRankWarning
from lowrank_cnn.system.files import as_path
from lowrank_cnn.system.text import counted, first_few

_TABLES = (".csv", ".tsv")


@dataclass(frozen=True)
class LabelledImages:
    """The images of a source before they become splits; None for a split that it lacks.

    `tested` names the split to test on (test, val, ...), and then others that could be; `unlabelled` those whose
    images have no class folders.
    """

    name: str
    classes: tuple[str, ...]
    train: ImageStore | None
    test: ImageStore | None
    tested: tuple[str, ...] = ()
    unlabelled: tuple[str, ...] = field(default=(), kw_only=True)
    problems: dict[str, Problems] = field(default_factory=lambda: {"train": Problems(), "test": Problems()})


def open_source(source: str | Path, options: ReadOptions) -> Data:
    """The data of a name or path."""
    found = _find(source, options)
    if isinstance(found, Data):
        return with_limit(found, options)
    if options.test is not None:
        found = _tested_elsewhere(found, options)
    if options.class_names is not None:  # last: classes are matched by the names of their folders
        path = Path(options.class_names)
        found = replace(found, classes=renamed(found.classes, read_class_names(path), path))
    if len(found.tested) > 1:
        warnings.warn(_unused_in_words(found, source, options), LowRankWarning, stacklevel=3)
    if found.unlabelled:
        warnings.warn(_unlabelled_in_words(found), LowRankWarning, stacklevel=3)
    return _splits(found, options)


def _find(source: str | Path, options: ReadOptions) -> Data | LabelledImages:
    if not isinstance(source, str | Path):
        raise LowRankError(f"data is opened by its name or path, not by {source!r}.")
    path = as_path(source)
    if str(source) == "digits" and not path.exists():
        return open_digits()
    if path.is_dir():
        return _find_in_folder(path, options)
    if path.is_file() and path.suffix.lower() in _TABLES:
        problems = {"train": Problems(), "test": Problems()}
        return LabelledImages(f"{path.resolve().parent.name}/{path.name}", *open_table(path, problems), problems)
    if path.is_file() and path.suffix.lower() in folder.SUFFIXES:
        raise LowRankError(f"{source} is one image: give the folder that has a folder of images for each class.")
    if path.is_file():
        return cifar_binary.open_archive(path)
    if isinstance(source, str) and hub.is_repository(source):
        return _find_shards(hub.download_shards(source), options, name=source)
    raise LowRankError(
        f"{source} is no data: give digits, a folder of images (CLASS/* or train/CLASS/*) or of parquet shards, a "
        f".csv of paths and labels, {cifar_binary.ARCHIVE}, or a Hub repository as owner/name."
    )


def _find_in_folder(path: Path, options: ReadOptions) -> Data | LabelledImages:
    if cifar_binary.is_inside(path):
        return cifar_binary.open_cifar_folder(path)
    if parquet.find_shards(path):
        return _find_shards(path, options, name=path.resolve().name)
    return _find_images(path)


def _find_shards(path: Path, options: ReadOptions, *, name: str) -> LabelledImages:
    shards = parquet.find_shards(path)
    problems = {"train": Problems(), "test": Problems()}
    stores: dict[str, Any] = {}
    names: list[str] = []
    tested = tuple(parquet.labelled_splits(shards))
    for split, files in (("train", shards.get("train")), ("test", shards[tested[0]] if tested else None)):
        stores[split] = None
        if files:
            missing = options.missing
            stores[split], named = parquet.open_shards(files, missing=missing, problems=problems[split])
            if names and named and named != names:  # the test shards number their classes otherwise
                stores[split] = _matched(stores[split], named, names, problems[split])
            names = names or named
    labelled = stores["train"] or stores["test"]
    if labelled is None:
        raise LowRankError(f"{name} needs shards train-* with labels; it has {', '.join(shards) or 'none'}.")
    classes = tuple(names) or parquet.numbered_classes(labelled.labels, name)
    return LabelledImages(name, classes, stores["train"], stores["test"], tested, problems)


def _find_images(path: Path) -> LabelledImages:
    """A folder with train and test folders, or one with the classes themselves."""
    train, tested = folder.training_folder(path), folder.evaluation_folders(path)
    test = next(iter(tested), None)
    name, problems = path.resolve().name, {"train": Problems(), "test": Problems()}
    if train is None and test is None:
        if not (flat := tuple(folder.flat_classes(path, problems["train"]))):
            raise LowRankError(_no_images(path))
        store = folder.open_folder(path, flat, problems["train"], others=True)
        return LabelledImages(name, flat, store, None, (), problems)
    classes = tuple(folder.class_folders(train or test))  # type: ignore[arg-type]
    stores = {
        split: folder.open_folder(place, classes, problems[split]) if place else None
        for split, place in (("train", train), ("test", test))
    }
    names = tuple(place.name for place in tested)
    unlabelled = tuple(folder.unlabelled_folders(path))
    return LabelledImages(name, classes, stores["train"], stores["test"], names, problems, unlabelled=unlabelled)


def _no_images(path: Path) -> str:
    if folder.holds_images(path):
        return f"{path} holds images without classes: put those of each class into a folder of its own."
    return (
        f"{path} holds neither parquet shards (train-00000-of-...) nor images as CLASS/* or train/CLASS/*: "
        "each class needs a folder with its images."
    )


def _tested_elsewhere(found: LabelledImages, options: ReadOptions) -> LabelledImages:
    """Train on one source and test on another, whose classes are matched by name."""
    assert options.test is not None
    other = _find(options.test, options)
    if isinstance(other, Data):
        raise LowRankError(f"{options.test} cannot be the test set of another: give a folder or a .csv.")
    tested = other.test or other.train
    assert tested is not None
    if not set(other.classes) & set(found.classes):
        raise LowRankError(
            f"{options.test} has none of the classes of {found.name} ({first_few(found.classes)}), but "
            f"{first_few(other.classes)}: class folders are matched by name."
        )
    _check_apart(found, tested)
    problems = other.problems["test" if other.test else "train"]
    store = _matched(tested, other.classes, found.classes, problems)
    chosen = {"test": store, "tested": other.tested, "unlabelled": other.unlabelled}
    return replace(found, **chosen, problems={**found.problems, "test": problems})


def _check_apart(found: LabelledImages, tested: ImageStore) -> None:
    """Refuse to test on files that are trained on: the accuracy would not be one on unseen images."""
    ours = {os.path.realpath(file) for file in (found.train.paths if found.train else ())}
    if both := sorted(ours & {os.path.realpath(file) for file in tested.paths}):
        raise LowRankError(
            f"{counted(len(both), 'file')} with images to test on, {both[0]} first, would be trained on as well: "
            "leave --test out, and a share of the images is held out (--val-split)."
        )


def _matched(store: Any, theirs: Sequence[str], ours: Sequence[str], problems: Problems) -> ImageStore:
    """A store whose labels are places among our classes; classes that we do not have are a problem."""
    labels, found = store.labels, places_by_name(theirs, ours)
    for number, name in enumerate(theirs):
        if found[number] is None and (images := int((labels == number).sum())):
            problems.add("unknown class", f"{name}: {counted(images, 'image')}")
    places = torch.tensor([UNKNOWN_CLASS if place is None else place for place in found])
    known = (labels >= 0) & (labels < len(theirs))
    return replace(store, labels=torch.where(known, places[labels.clamp(0, len(theirs) - 1)], labels))


def _splits(found: LabelledImages, options: ReadOptions) -> Data:
    """Both splits of a set; the training images decide whether it is grey, and of which size."""
    if options.only_test:
        return _only_tested(found, options)
    if found.train is None:
        raise LowRankError(f"{found.name} has images to test on and none to train on: add train/CLASS/*.")
    if found.test is not None and options.val_split is not None:
        raise LowRankError(
            f"{found.name} has test images: leave val_split out, or hold images out of the training set "
            "(--set holdout=0.1)."
        )
    details = _unused(found)
    train, test, problems = found.train, found.test, found.problems
    train_rows = class_rows(train, len(found.classes), problems["train"], found.name)
    if test is None:
        share = options.val_split or VAL_SPLIT
        limit = {} if options.limit is None else {"limit": options.limit}
        details["val_split"] = {"share": share, "seed": options.val_seed, **limit}
        test = train
        train_rows, test_rows = divided(train, train_rows, share, seed=options.val_seed, name=found.name)
        untrained = set(train.labels[test_rows].tolist()) - set(train.labels[train_rows].tolist())
        problems["train"].add_all(("untrained class", found.classes[label]) for label in sorted(untrained))
    else:
        test_rows = class_rows(test, len(found.classes), problems["test"], found.name)
    sized = with_default_size(train, train_rows, options)
    if sized is not options:
        details["sized_by"] = "network"
    trained = make_split(train, train_rows, problems["train"], sized, which="to train on")
    channels = trained.channels
    tested = make_split(test, test_rows, problems["test"], sized, channels=channels, which="to test on")
    return Data(found.name, found.classes, trained, tested, details)


def _only_tested(found: LabelledImages, options: ReadOptions) -> Data:
    """For evaluation: the test images, or all of a set without any. There is nothing to train on."""
    name = "test" if found.test is not None else "train"
    store = found.test if found.test is not None else found.train
    assert store is not None
    rows = class_rows(store, len(found.classes), found.problems[name], found.name)
    options = with_default_size(store, rows, options)
    tested = make_split(store, rows, found.problems[name], options, which="to test on")
    return Data(found.name, found.classes, tested.subset(torch.arange(0)), tested, _unused(found))


def _unused_in_words(found: LabelledImages, source: str | Path, options: ReadOptions) -> str:
    """Which split is tested on and which are not, and how to test on one of these where it is a folder."""
    tested, *unused = found.tested
    place = Path(source if options.test is None else options.test, unused[0])
    hint = f" ({'--data' if options.only_test else '--test'} {place} tests on {unused[0]})"
    verb = "is" if len(unused) == 1 else "are"
    told = f"{found.name} is tested on {tested}; {' and '.join(unused)} {verb} not used"
    return f"{told}{hint if place.is_dir() else ''}."


def _unlabelled_in_words(found: LabelledImages) -> str:
    """Which folders of test images have no classes, and what is tested on instead."""
    verb = "has" if len(found.unlabelled) == 1 else "have"
    instead = f"{found.tested[0]} is" if found.tested else "other images are"
    return (
        f"{' and '.join(found.unlabelled)} of {found.name} {verb} no class folders: {instead} tested on instead."
    )


def _unused(found: LabelledImages) -> dict[str, Any]:
    """For the record: the split that is tested on, where others could have been."""
    first, *others = found.tested or ("",)
    return {"tested_split": first, "unused_splits": others} if others else {}
