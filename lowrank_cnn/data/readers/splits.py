"""From stored images to a split: held in memory where they are few and of one size, streamed otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from lowrank_cnn.data.readers.parquet import Missing
from lowrank_cnn.data.readers.read import decode_rows, look_around
from lowrank_cnn.data.readers.store import Store, fingerprint_of_rows, labelled_rows
from lowrank_cnn.data.resident import ResidentSplit
from lowrank_cnn.data.stream.streamed import StreamedSplit
from lowrank_cnn.data.types import Bad, Data, Problems, Size, Split, stratified
from lowrank_cnn.system.errors import LowRankError

RESIDENT_BYTES = 2**31


@dataclass(frozen=True)
class Options:
    """How a source is opened; `open_data` explains each."""

    bad: Bad = "skip"
    limit: int | None = None
    image_size: int | None = None
    channels: int | None = None
    missing: Missing = "refuse"
    resident_bytes: int = RESIDENT_BYTES

    def __post_init__(self) -> None:
        for name in ("bad", "missing"):
            if (value := getattr(self, name)) not in ("skip", "refuse"):
                raise LowRankError(f"{name} must be skip or refuse, not {value!r:.60}.")
        for name in ("limit", "image_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise LowRankError(f"{name} must be a whole number of at least 1, not {value!r:.60}.")
        if self.channels not in (None, 1, 3):
            raise LowRankError(f"channels must be 1 (grey) or 3 (colour), not {self.channels!r:.60}.")


def make_split(
    store: Store, classes: int, problems: Problems, options: Options, *, channels: int | None = None
) -> Split:
    """The rows of a store with a right label, at most `limit`, as the kind of split that suits them."""
    rows = labelled_rows(store, classes, problems)
    if options.bad == "refuse":
        problems.refuse()
    if options.limit is not None:
        rows = rows[stratified(store.labels[rows], options.limit, seed=0)]
    size, channels = survey(store, rows, problems, options, channels)
    if size is None or len(rows) * size[0] * size[1] * size[2] > options.resident_bytes:
        return StreamedSplit(store, rows, size, channels, problems, options.bad)
    any_size = options.image_size is not None
    decode = partial(decode_rows, store, rows, size=size, any_size=any_size, bad=options.bad, problems=problems)
    return ResidentSplit(decode, size, partial(fingerprint_of_rows, store, rows))


def survey(
    store: Store, rows: torch.Tensor, problems: Problems, options: Options, channels: int | None
) -> tuple[Size | None, int]:
    """The common size, or None, and the number of channels: grey only where all images looked at are."""
    looks = look_around(store, rows)
    if not looks:
        raise LowRankError(f"there is no image to read, problems: {problems}.")
    grey = all(look.grey for look in looks)
    channels = options.channels or channels or (1 if grey else 3)
    if options.image_size is not None:
        return (channels, options.image_size, options.image_size), channels
    sizes = {(look.height, look.width) for look in looks}
    return (channels, *sizes.pop()) if len(sizes) == 1 else None, channels


def limited(data: Data, options: Options) -> Data:
    """A set that is in memory already, with the options that change it applied."""
    channels, height, width = data.train.size or (data.train.channels, None, None)
    side = options.image_size
    if (options.channels or channels, side or height, side or width) != (channels, height, width):
        raise LowRankError(
            f"{data.name} has images of {channels}x{height}x{width}, which image_size and channels do not change."
        )
    return replace(data, train=_fewer(data.train, options.limit), test=_fewer(data.test, options.limit))


def _fewer(split: Split, limit: int | None) -> Split:
    return split if limit is None else split.subset(stratified(split.labels, limit, seed=0))
