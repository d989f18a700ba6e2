"""Open a source by its name or content: a folder, a table, an archive, or a repository of the Hub."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import (
    LowRankError,
    LowRankWarning,
    check_choice,
    check_number,
    check_type,
    option,
    setting,
)
from lowrank_cnn.core.files import as_path
from lowrank_cnn.core.modules import in_words
from lowrank_cnn.core.text import counted, first_few
from lowrank_cnn.data import folders, parquet, small_sets
from lowrank_cnn.data.resident import ResidentSplit
from lowrank_cnn.data.store import NO_LABEL, UNKNOWN_CLASS, ImageStore, LabelledImages
from lowrank_cnn.data.streamed import StreamedSplit
from lowrank_cnn.data.types import Bad, Data, Decoded, Problems, Size, Split, split_off, stratified

RESIDENT_BYTES = 2**31
VAL_SPLIT = 0.2
"""The share of images to test on where a set comes without test images."""
VAL_SEED = 0
"""Every opening of a set holds out the same images."""
LARGE_SIDE = 256
"""Images whose shorter side is longer than this are resized to the network's own size by default."""
MOST_WRONG = 10**5
"""More wrong labels than this mean a wrong column, and naming each would take more memory than the images."""
_LARGEST_SIDE = 2**14

ImageSize = int | str | tuple[int, int] | None


def open_data(
    source: str | Path,
    *,
    bad: Bad = "skip",
    limit: int | None = None,
    image_size: ImageSize = None,
    default_size: ImageSize = None,
    channels: int | None = None,
    resident_bytes: int = RESIDENT_BYTES,
    test: str | Path | None = None,
    val_split: float | None = None,
    class_names: str | Path | None = None,
    only_test: bool = False,
    progress: bool = True,
) -> Data:
    """Open images to train and test on.

    >>> data = open_data("digits", limit=100)
    >>> len(data.train), data.train.size
    (100, (1, 28, 28))

    - `source`: a folder with `CLASS/*`, or with `train/CLASS/*` and `val` or `test`; a .csv with columns path and
      label; a folder of parquet shards; a Hub repository as `owner/name`; CIFAR-10's binary archive;
      `digits`; an .npz of volumes (x_train, y_train, x_test, y_test). Of a set with both, `test` is tested on,
      and a warning says that `val` is not used.
    - `test`: another source whose images to test on; its classes are matched by name.
    - `val_split`: the share of each class to test on, where the set has no test images; 0.2 if not given.
    - `class_names`: a file with the names to show for classes, a class folder and its name in each line.
    - `image_size`: bring every image to this square, or height and width ("48x64"): scaled to cover it, then its
      centre. `default_size` does so only where images are large or differ in size.
    - `channels`: 1 or 3 to read all images as grey or in colour; else grey only where the set is.
    - `bad`: whether images that cannot be decoded and wrong labels are left out and counted, or refused.
    - `limit`: at most this many images of each split, class by class in proportion.
    - `resident_bytes`: splits that take no more than this as uint8, all of one size, are held in memory.
    - `only_test`: for evaluation alone. A set without test images is one to test on, and needs none to train on.
    - `progress`: count the decoded images on standard error.
    """
    check_choice("bad", bad, ("skip", "refuse"))
    check_number("limit", 1 if limit is None else limit, least=1, whole=True)
    check_number("resident_bytes", resident_bytes, least=0, whole=True)
    check_number("val_split", VAL_SPLIT if val_split is None else val_split, above=0, below=1)
    if channels not in (None, 1, 3):
        raise LowRankError(f"channels must be 1 (grey) or 3 (colour), not {channels!r}.")
    check_type("test", test, str, Path, type(None))
    check_type("class_names", class_names, str, Path, type(None))
    if test is not None and val_split is not None:
        raise LowRankError("test names images to test on, and val_split a share of the others: give one of them.")
    size, wanted = parse_image_size(image_size), parse_image_size(default_size)
    found = _find(source)
    if isinstance(found, Data):
        if test is not None or val_split is not None or class_names is not None:
            raise LowRankError(f"{found.name} has test images and class names of its own: leave such options out.")
        return _fewer_in_memory(found, limit, size, channels)
    if test is not None:
        found = _tested_elsewhere(found, test)
    if class_names is not None:  # last: classes are matched by the names of their folders
        found = replace(found, classes=folders.renamed(found.classes, Path(class_names)))
    for text in _ignored_images(found, Path(source if test is None else test), only_test=only_test):
        warnings.warn(text, LowRankWarning, stacklevel=2)
    reading = Reading(bad, limit, size, wanted, channels, resident_bytes, progress)
    if only_test:
        return _only_tested(found, reading)
    return _both_splits(found, reading, val_split)


def parse_image_size(value: object) -> tuple[int, int] | None:
    """Height and width from 64, "64", "48x64" or (48, 64); None stays None.

    >>> parse_image_size("48x64")
    (48, 64)
    """
    if value is None:
        return None
    sides: Any = [value] if isinstance(value, int) else value
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}(x\d{1,6})?", value.strip()):
        sides = [int(side) for side in value.split("x")]
    sides = sides if isinstance(sides, tuple | list) else ()
    if len(sides) in (1, 2) and all(type(side) is int and 1 <= side <= _LARGEST_SIDE for side in sides):
        return sides[0], sides[-1]
    raise LowRankError(
        f"an image size is a side like 64 or a height and width like 48x64, up to {_LARGEST_SIDE}, not {value!r}."
    )


def fewer(split: Split, limit: int | None) -> Split:
    """At most `limit` images of a split, class by class in proportion."""
    return split if limit is None else split.subset(stratified(split.labels, limit, seed=0))


def _find(source: str | Path) -> Data | LabelledImages:
    """The reader of each kind of source is tried in turn."""
    if not isinstance(source, str | Path):
        raise LowRankError(f"data is opened by its name or path, not by {source!r}.")
    path = as_path(source)
    if str(source) == "digits" and not path.exists():
        return small_sets.open_digits()
    if path.is_dir():
        if small_sets.is_inside(path):
            return small_sets.open_cifar(path)
        if parquet.find_shards(path):
            return parquet.open_parquet(path, name=path.resolve().name)
        return folders.open_images(path)
    if path.is_file() and path.suffix.lower() in (".csv", ".tsv"):
        return folders.open_table(path)
    if path.is_file() and path.suffix.lower() in folders.SUFFIXES:
        raise LowRankError(f"{source} is one image: give the folder that has a folder of images for each class.")
    if path.is_file():
        return small_sets.open_volumes(path) if path.suffix.lower() == ".npz" else small_sets.open_cifar(path)
    if isinstance(source, str) and parquet.is_repository(source):
        return parquet.open_parquet(parquet.download_shards(source), name=source)
    raise LowRankError(
        f"there is no data at {source}: give digits, a folder of images (CLASS/* or train/CLASS/*) or of parquet "
        f"shards, a .csv of paths and labels, an .npz of volumes, {small_sets.ARCHIVE}, or a Hub repository as "
        "owner/name."
    )


def _fewer_in_memory(data: Data, limit: int | None, size: tuple[int, int] | None, channels: int | None) -> Data:
    """A set that is already in memory, with `limit` and `channels` applied; it cannot be resized."""
    own = data.train.size or (data.train.channels, 0, 0)
    if size not in (None, own[1:]):
        raise LowRankError(f"{data.name} has {in_words(own)}, which image_size does not change.")
    train, test = (fewer(split, limit) for split in (data.train, data.test))
    if channels not in (None, own[0]):
        if len(own) > 3:
            raise LowRankError(f"{data.name} has volumes, whose channels stay as they are: leave channels out.")
        train, test = _in_channels(train, channels), _in_channels(test, channels)
    return replace(data, train=train, test=test)


def _in_channels(split: Split, channels: int) -> ResidentSplit:
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


def _tested_elsewhere(found: LabelledImages, test: str | Path) -> LabelledImages:
    """Train on one source and test on another, whose classes are matched by name."""
    other = _find(test)
    if isinstance(other, Data):
        raise LowRankError(f"{test} cannot be the test set of another: give a folder or a .csv.")
    split = "test" if "test" in other.stores else "train"
    tested, problems = other.stores[split], other.problems[split]
    if not set(other.classes) & set(found.classes):
        raise LowRankError(
            f"{test} has none of the classes of {found.name} ({first_few(found.classes)}), but "
            f"{first_few(other.classes)}: class folders are matched by name."
        )
    ours = {os.path.realpath(file) for file in (found.stores["train"].paths if "train" in found.stores else ())}
    if both := sorted(ours & {os.path.realpath(file) for file in tested.paths}):
        raise LowRankError(
            f"{counted(len(both), 'file')} with images to test on, {both[0]} first, would be trained on as well: "
            f"leave {option('test')} out, and a share of the images is held out ({option('val_split')})."
        )
    stores = {**found.stores, "test": tested.with_classes(other.classes, found.classes, problems)}
    problems = {**found.problems, "test": problems}
    return LabelledImages(found.name, found.classes, stores, problems, other.tested, other.unlabelled)


def _ignored_images(found: LabelledImages, source: Path, *, only_test: bool) -> Iterator[str]:
    """Sentences about test images that are not used, with the option that uses them, and about unlabelled ones."""
    if len(found.tested) > 1:
        tested, *unused = found.tested
        place = source / unused[0]
        given = option("data" if only_test else "test", str(place))
        hint = f" ({given} tests on {unused[0]})" if place.is_dir() else ""
        verb = "is" if len(unused) == 1 else "are"
        yield f"{found.name} is tested on {tested}; {' and '.join(unused)} {verb} not used{hint}."
    if found.unlabelled:
        verb = "has" if len(found.unlabelled) == 1 else "have"
        instead = f"{found.tested[0]} is" if found.tested else "other images are"
        names = " and ".join(found.unlabelled)
        yield f"{names} of {found.name} {verb} no class folders: {instead} tested on instead."


@dataclass(frozen=True)
class Reading:
    """The options of `open_data` that say how rows become a split."""

    bad: Bad = "skip"
    limit: int | None = None
    image_size: tuple[int, int] | None = None
    default_size: tuple[int, int] | None = None
    channels: int | None = None
    resident_bytes: int = RESIDENT_BYTES
    progress: bool = False

    def sized_for(self, store: ImageStore, rows: Tensor) -> Reading:
        """With `default_size` as the size of all images, if these are large or differ in size."""
        if self.image_size is not None or self.default_size is None:
            return self
        sizes = {size for size, _ in store.headers(rows)}
        fits = len(sizes) == 1 and min(next(iter(sizes))) <= LARGE_SIDE
        return self if fits else replace(self, image_size=self.default_size)

    def split(self, store: ImageStore, rows: Tensor, problems: Problems, which: str) -> Split:
        """Some rows of a store, at most `limit`: held in memory if they fit and have one size, else streamed."""
        if self.bad == "refuse":
            problems.refuse()
        if self.limit is not None:
            rows = rows[stratified(store.labels[rows], self.limit, seed=0)]
        headers = store.headers(rows) or [store.first_readable(rows, which)]
        # They are grey if all images of a sample are.
        channels = self.channels or (1 if all(grey for _, grey in headers) else 3)
        sizes = {self.image_size} if self.image_size else {found for found, _ in headers}
        size: Size | None = (channels, *sizes.pop()) if len(sizes) == 1 else None
        streamed = StreamedSplit(store, rows, size, channels, problems, self.bad)
        if size is None or len(rows) * prod(size) > self.resident_bytes:
            return streamed
        what = f"Decoding images {which}" if self.progress else ""
        decode = partial(streamed.decode, one_size=self.image_size is None, what=what)
        return ResidentSplit(decode, size, partial(store.fingerprint, rows), store)


def _both_splits(found: LabelledImages, reading: Reading, share: float | None) -> Data:
    """Both splits of a set; the training images decide whether it is grey, and of which size."""
    name, problems = found.name, found.problems
    if "train" not in found.stores:
        raise LowRankError(f"{name} has images to test on and none to train on: add train/CLASS/*.")
    if "test" in found.stores and share is not None:
        raise LowRankError(
            f"{name} has test images: leave {option('val_split')} out, or hold images out of the "
            f"training set ({setting('holdout', 0.1)})."
        )
    details = _unused(found)
    train = test = found.stores["train"]
    train_rows = _class_rows(found, "train")
    if "test" in found.stores:
        test, test_rows = found.stores["test"], _class_rows(found, "test")
    else:
        share = share or VAL_SPLIT
        limit = {} if reading.limit is None else {"limit": reading.limit}
        details["val_split"] = {"share": share, "seed": VAL_SEED, **limit}
        number = round(share * len(train_rows))
        if not 0 < number < len(train_rows):
            raise LowRankError(
                f"{name} has no test images, and {share:g} of its {counted(len(train_rows), 'image')} leaves none "
                f"to train or test on: set another share ({option('val_split', 0.5)})."
            )
        rest, chosen = split_off(train.labels[train_rows], number, seed=VAL_SEED)
        train_rows, test_rows = train_rows[rest], train_rows[chosen]
        untrained = set(train.labels[test_rows].tolist()) - set(train.labels[train_rows].tolist())
        problems["train"].add_all(("untrained class", found.classes[label]) for label in sorted(untrained))
    sized = reading.sized_for(train, train_rows)
    if sized is not reading:
        details["sized_by"] = "network"
    trained = sized.split(train, train_rows, problems["train"], "to train on")
    tested = replace(sized, channels=trained.channels).split(test, test_rows, problems["test"], "to test on")
    return Data(name, found.classes, trained, tested, details)


def _only_tested(found: LabelledImages, reading: Reading) -> Data:
    """For evaluation: the test images, or all of a set without any. There is nothing to train on."""
    name = "test" if "test" in found.stores else "train"
    store, rows = found.stores[name], _class_rows(found, name)
    tested = reading.sized_for(store, rows).split(store, rows, found.problems[name], "to test on")
    return Data(found.name, found.classes, tested.subset(torch.arange(0)), tested, _unused(found))


def _class_rows(found: LabelledImages, split: str) -> Tensor:
    """The rows whose label names a class, the others being problems; refuses a store without a readable image."""
    store, problems = found.stores[split], found.problems[split]
    right = (store.labels >= 0) & (store.labels < len(found.classes))
    wrong = (~right & (store.labels != UNKNOWN_CLASS)).nonzero()[:, 0]
    if len(wrong) > MOST_WRONG:
        raise LowRankError(
            f"{len(wrong):,} of {counted(len(right), 'label')}, {store.where(int(wrong[0]))} first, are none of "
            f"the {counted(len(found.classes), 'class')}: is this the column of labels?"
        )
    for row in wrong.tolist():
        label = int(store.labels[row])
        problems.add("wrong label", f"{store.where(row)}: {'none' if label == NO_LABEL else label}")
    rows = right.nonzero()[:, 0]
    if not len(rows):
        raise LowRankError(f"there is no image to read, problems: {problems}.")
    store.first_readable(rows, f"of {found.name}")
    return rows


def _unused(found: LabelledImages) -> dict[str, Any]:
    """For the record: the split that is tested on, where others could have been."""
    first, *others = found.tested or ("",)
    return {"tested_split": first, "unused_splits": others} if others else {}
