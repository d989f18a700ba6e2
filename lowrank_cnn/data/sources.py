"""Open a source by its name or content: a folder, a table, an archive, or a repository of the Hub."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.core.files import as_path
from lowrank_cnn.core.text import counted, first_few
from lowrank_cnn.data import folders, parquet, small_sets
from lowrank_cnn.data.parquet import Missing
from lowrank_cnn.data.resident import ResidentSplit
from lowrank_cnn.data.store import (
    ImageStore,
    LabelledImages,
    decode_rows,
    fingerprint_of_rows,
    first_readable,
    labelled_rows,
    read_headers,
    with_classes,
)
from lowrank_cnn.data.streamed import StreamedSplit
from lowrank_cnn.data.types import Bad, Data, Decoded, Problems, Size, Split, split_off, stratified

RESIDENT_BYTES = 2**31
VAL_SPLIT = 0.2
"""The share of images to test on where a set comes without test images."""
_LARGEST_SIDE = 2**14


@dataclass(frozen=True)
class ReadOptions:
    """The options of `open_data`, which explains each. Sizes are (height, width).

    `only_test` is for evaluation: all images are for testing where the set has no test images.
    """

    bad: Bad = "skip"
    limit: int | None = None
    image_size: tuple[int, int] | None = None
    default_size: tuple[int, int] | None = None
    channels: int | None = None
    missing: Missing = "refuse"
    resident_bytes: int = RESIDENT_BYTES
    test: str | Path | None = None
    val_split: float | None = None
    val_seed: int = 0
    class_names: str | Path | None = None
    only_test: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("bad", "missing"):
            if (value := getattr(self, name)) not in ("skip", "refuse"):
                raise LowRankError(f"{name} must be skip or refuse, not {value!r}.")
        for name in ("limit", "resident_bytes", "val_seed"):
            value, least = getattr(self, name), 1 if name == "limit" else 0
            if value is not None and (not isinstance(value, int) or value < least):
                raise LowRankError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        if self.channels not in (None, 1, 3):
            raise LowRankError(f"channels must be 1 (grey) or 3 (colour), not {self.channels!r}.")
        share = self.val_split
        if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
            raise LowRankError(f"val_split is the share of images to test on, between 0 and 1, not {share!r}.")
        for name in ("test", "class_names"):
            if not isinstance(value := getattr(self, name), str | Path | None):
                raise LowRankError(f"{name} must be a path, not {value!r}.")
        if self.test is not None and share is not None:
            raise LowRankError(
                "test names images to test on, and val_split takes some of the others: give one of them."
            )


def parse_image_size(value: object) -> tuple[int, int] | None:
    """Height and width from 64, "64", "48x64" or (48, 64); None stays None.

    >>> parse_image_size("48x64")
    (48, 64)
    """
    if value is None:
        return None
    sides = value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", value.strip())):
        sides = tuple(int(side) for side in match.groups() if side)
    if isinstance(sides, int) and not isinstance(sides, bool):
        sides = (sides,)
    if isinstance(sides, tuple | list) and 1 <= len(sides) <= 2:
        height, width = sides[0], sides[-1]
        if all(isinstance(side, int) and 1 <= side <= _LARGEST_SIDE for side in (height, width)):
            return height, width
    raise LowRankError(
        f"an image size is a side like 64 or a height and width like 48x64, up to {_LARGEST_SIDE}, not {value!r}."
    )


LARGE_SIDE = 256
"""Images whose shorter side is longer than this are resized to the network's own size by default."""


def make_split(
    store: ImageStore,
    rows: Tensor,
    problems: Problems,
    options: ReadOptions,
    *,
    channels: int | None = None,
    which: str = "of the set",
) -> Split:
    """Some rows of a store, at most `limit`: held in memory if they fit and have one size, else streamed.

    They are grey if all images of a sample are, unless `channels` or the options say otherwise.
    """
    if options.bad == "refuse":
        problems.refuse()
    if options.limit is not None:
        rows = rows[stratified(store.labels[rows], options.limit, seed=0)]
    headers = read_headers(store, rows) or [first_readable(store, rows, which)]
    channels = options.channels or channels or (1 if all(header.grey for header in headers) else 3)
    sizes = {options.image_size} if options.image_size else {(header.height, header.width) for header in headers}
    size: Size | None = (channels, *sizes.pop()) if len(sizes) == 1 else None
    if size is None or len(rows) * size[0] * size[1] * size[2] > options.resident_bytes:
        return StreamedSplit(store, rows, size, channels, problems, options.bad)
    decode = partial(
        decode_rows,
        store,
        rows,
        size=size,
        any_size=options.image_size is not None,
        bad=options.bad,
        problems=problems,
        what=f"Decoding images {which}" if options.progress else "",
    )
    return ResidentSplit(decode, size, partial(fingerprint_of_rows, store, rows), store)


def with_default_size(store: ImageStore, rows: Tensor, options: ReadOptions) -> ReadOptions:
    """The options with `default_size` as the size of all images, if these are large or differ in size."""
    if options.image_size is not None or options.default_size is None:
        return options
    sizes = {(header.height, header.width) for header in read_headers(store, rows)}
    fits = len(sizes) == 1 and min(next(iter(sizes))) <= LARGE_SIDE
    return options if fits else replace(options, image_size=options.default_size)


def divided(store: ImageStore, rows: Tensor, share: float, *, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Rows to train on, and this share of every class to test on."""
    number = round(share * len(rows))
    if not 0 < number < len(rows):
        raise LowRankError(
            f"{name} has no test images, and {share:g} of its {counted(len(rows), 'image')} leaves none to "
            "train or test on: set another share (--val-split 0.5)."
        )
    rest, chosen = split_off(store.labels[rows], number, seed=seed)
    return rows[rest], rows[chosen]


def class_rows(store: ImageStore, classes: int, problems: Problems, name: str) -> Tensor:
    """The rows whose label names a class; refuses a store without any, or without an image that can be read."""
    rows = labelled_rows(store, classes, problems)
    if not len(rows):
        raise LowRankError(f"there is no image to read, problems: {problems}.")
    first_readable(store, rows, f"of {name}")
    return rows


def with_limit(data: Data, options: ReadOptions) -> Data:
    """A set that is already in memory, with `limit` and `channels` applied; refuses what it cannot apply."""
    channels, height, width = data.train.size or (data.train.channels, 0, 0)
    if options.test is not None or options.val_split is not None or options.class_names is not None:
        raise LowRankError(f"{data.name} has test images and class names of its own: leave these options out.")
    if options.image_size not in (None, (height, width)):
        raise LowRankError(
            f"{data.name} has images of {channels}x{height}x{width}, which image_size does not change."
        )
    train, test = (fewer(split, options.limit) for split in (data.train, data.test))
    if options.channels in (None, channels):
        return replace(data, train=train, test=test)
    return replace(data, train=in_channels(train, options.channels), test=in_channels(test, options.channels))


def in_channels(split: Split, channels: int) -> ResidentSplit:
    """Grey images in colour (3), or colour images in grey (1) as Pillow makes them."""
    assert isinstance(split, ResidentSplit)

    def decoded() -> Decoded:
        images = split.images
        if channels == 1:
            weights = torch.tensor([19595, 38470, 7471]).view(3, 1, 1)  # those of ITU-R 601, in 65536ths
            images = ((images.long() * weights).sum(1, keepdim=True) + 32768 >> 16).to(torch.uint8)
        else:
            images = images.expand(-1, channels, -1, -1).contiguous()
        return Decoded(images, split.labels, split.problems, split.describe)

    return ResidentSplit(decoded, (channels, *split.size[1:]))


def fewer(split: Split, limit: int | None) -> Split:
    """At most `limit` images of a split, class by class in proportion."""
    return split if limit is None else split.subset(stratified(split.labels, limit, seed=0))


def open_source(source: str | Path, options: ReadOptions) -> Data:
    """The data of a name or path."""
    found = _find(source, options)
    if isinstance(found, Data):
        return with_limit(found, options)
    if options.test is not None:
        found = _tested_elsewhere(found, options)
    if options.class_names is not None:  # last: classes are matched by the names of their folders
        path = Path(options.class_names)
        found = replace(found, classes=folders.renamed(found.classes, folders.read_class_names(path), path))
    for text in _ignored_images(found, source, options):
        warnings.warn(text, LowRankWarning, stacklevel=3)
    return _splits(found, options)


def _find(source: str | Path, options: ReadOptions) -> Data | LabelledImages:
    if not isinstance(source, str | Path):
        raise LowRankError(f"data is opened by its name or path, not by {source!r}.")
    path = as_path(source)
    if str(source) == "digits" and not path.exists():
        return small_sets.open_digits()
    if path.is_dir():
        if small_sets.is_inside(path):
            return small_sets.open_cifar_folder(path)
        if parquet.find_shards(path):
            return parquet.open_parquet(path, name=path.resolve().name, missing=options.missing)
        return folders.open_images(path)
    if path.is_file() and path.suffix.lower() in (".csv", ".tsv"):
        return folders.open_table(path)
    if path.is_file() and path.suffix.lower() in folders.SUFFIXES:
        raise LowRankError(f"{source} is one image: give the folder that has a folder of images for each class.")
    if path.is_file():
        return small_sets.open_archive(path)
    if isinstance(source, str) and parquet.is_repository(source):
        return parquet.open_parquet(parquet.download_shards(source), name=source, missing=options.missing)
    raise LowRankError(
        f"{source} is no data: give digits, a folder of images (CLASS/* or train/CLASS/*) or of parquet shards, a "
        f".csv of paths and labels, {small_sets.ARCHIVE}, or a Hub repository as owner/name."
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
    store = with_classes(tested, other.classes, found.classes, problems)
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


def _ignored_images(found: LabelledImages, source: str | Path, options: ReadOptions) -> Iterator[str]:
    """Sentences about test images that are not used, with the option that uses them, and about unlabelled ones."""
    if len(found.tested) > 1:
        tested, *unused = found.tested
        place = Path(source if options.test is None else options.test, unused[0])
        hint = f" ({'--data' if options.only_test else '--test'} {place} tests on {unused[0]})"
        verb = "is" if len(unused) == 1 else "are"
        told = f"{found.name} is tested on {tested}; {' and '.join(unused)} {verb} not used"
        yield f"{told}{hint if place.is_dir() else ''}."
    if found.unlabelled:
        verb = "has" if len(found.unlabelled) == 1 else "have"
        instead = f"{found.tested[0]} is" if found.tested else "other images are"
        names = " and ".join(found.unlabelled)
        yield f"{names} of {found.name} {verb} no class folders: {instead} tested on instead."


def _unused(found: LabelledImages) -> dict[str, Any]:
    """For the record: the split that is tested on, where others could have been."""
    first, *others = found.tested or ("",)
    return {"tested_split": first, "unused_splits": others} if others else {}
