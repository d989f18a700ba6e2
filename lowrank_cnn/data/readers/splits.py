"""From stored images to a split: held in memory if they fit and have one size, else streamed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lowrank_cnn.data.readers.decoding import decode_rows, first_readable, read_headers
from lowrank_cnn.data.readers.image_store import ImageStore, fingerprint_of_rows, labelled_rows
from lowrank_cnn.data.readers.read_options import ReadOptions
from lowrank_cnn.data.resident import Decoded, ResidentSplit
from lowrank_cnn.data.stream.streamed import StreamedSplit
from lowrank_cnn.data.types import Data, Problems, Size, Split, stratified
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted

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
    """Some rows of a store, at most `limit`, as a resident or a streamed split."""
    if options.bad == "refuse":
        problems.refuse()
    if options.limit is not None:
        rows = rows[stratified(store.labels[rows], options.limit, seed=0)]
    size, channels = survey_images(store, rows, options, channels, which)
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


def survey_images(
    store: ImageStore, rows: Tensor, options: ReadOptions, channels: int | None, which: str
) -> tuple[Size | None, int]:
    """The common size or None, and the number of channels: 1 only if all sampled images are grey."""
    headers = read_headers(store, rows) or [first_readable(store, rows, which)]
    grey = all(header.grey for header in headers)
    channels = options.channels or channels or (1 if grey else 3)
    if options.image_size is not None:
        return (channels, *options.image_size), channels
    sizes = {(header.height, header.width) for header in headers}
    return (channels, *sizes.pop()) if len(sizes) == 1 else None, channels


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
    chosen = stratified(store.labels[rows], number, seed=seed)
    rest = rows.new_ones(len(rows)).bool()
    rest[chosen] = False
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
