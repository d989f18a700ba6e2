"""The interface that parquet shards and image folders share: numbered rows of encoded images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lowrank_cnn.data.fingerprint import Contents, digest_of, fingerprint_of_subset
from lowrank_cnn.data.image_progress import ImageProgress
from lowrank_cnn.data.images.decode import BadImageError
from lowrank_cnn.data.types import Problems
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted

NO_LABEL = torch.iinfo(torch.int64).min
UNKNOWN_CLASS = NO_LABEL + 1
"""The label of an image whose class is counted as a problem already."""
WRONG_LABEL = "wrong label"
MOST_WRONG = 10**5
"""More wrong labels than this mean a wrong column, and naming each would take more memory than the images."""


class ImageStore(Protocol):
    """Numbered rows of encoded images with their labels (NO_LABEL if a row has none)."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def paths(self) -> Sequence[str | Path]:
        """The files that hold the images."""
        ...

    def read(self, row: int) -> bytes:
        """The bytes of an image file; raises `BadImageError` if they cannot be read."""
        ...

    @property
    def contents(self) -> Contents:
        """What tells whether images were changed since they were listed."""
        ...

    def file_of(self, row: int) -> int:
        """The place in `paths` of the file that holds a row."""
        ...

    def where(self, row: int) -> str:
        """A name by which the user finds the row."""
        ...

    def shuffled(self, draw: torch.Generator) -> Tensor:
        """All rows in a random order that is still cheap to read."""
        ...

    def fingerprint(self) -> str:
        """The identity of all images (`data.fingerprint`), without decoding any."""
        ...

    def version(self) -> str:
        """A text that changes whenever a file is written again, for caches."""
        ...

    def keep(self, places: int, rows: int) -> None:
        """Announce that rows will be read at this many places, each mixing this many neighbours."""
        ...


def labelled_rows(store: ImageStore, classes: int, problems: Problems) -> Tensor:
    """The rows whose label names a class; the others are counted as problems."""
    right = (store.labels >= 0) & (store.labels < classes)
    wrong = (~right & (store.labels != UNKNOWN_CLASS)).nonzero()[:, 0]
    if len(wrong) > MOST_WRONG:
        raise LowRankError(
            f"{len(wrong):,} of {counted(len(right), 'label')}, {store.where(int(wrong[0]))} first, are none of "
            f"the {counted(classes, 'class')}: is this the column of labels?"
        )
    for row in wrong.tolist():
        label = int(store.labels[row])
        problems.add(WRONG_LABEL, f"{store.where(row)}: {'none' if label == NO_LABEL else label}")
    return right.nonzero()[:, 0]


def fingerprint_of_rows(store: ImageStore, rows: Tensor) -> str:
    """The identity of some rows of a store, with their labels."""
    return fingerprint_of_subset(store.fingerprint(), torch.stack([rows, store.labels[rows]]))


def read_watched(store: ImageStore, row: int) -> bytes:
    """The bytes of an image, and its digest among the fresh ones if it may have changed."""
    data = store.read(row)
    store.contents.look(row, store.file_of(row), data)
    return data


def note_contents(store: ImageStore, fresh: Mapping[int, int]) -> None:
    """Remember the digests of images that were read; refuses an image that had other contents before."""
    digests = store.contents.digests
    for row, digest in fresh.items():
        if digest and digests[row] not in (0, digest):
            raise LowRankError(
                f"{store.where(row)} was changed while it was in use: bring the old image back and go on with "
                "--resume, or start a new run."
            )
        digests[row] = digest or digests[row]


def changed_images(store: ImageStore, rows: Tensor, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
    """The images that have other contents than before, and the number of those of which nobody can tell.

    Only images whose files have another size or time are compared, by their digests.
    """
    now = store.contents
    stamps, digests = before["stamps"], before["digests"].tolist()
    if stamps.shape != now.stamps.shape or len(digests) != len(now.digests):
        return ["some images"], 0
    written = (stamps != now.stamps).tolist()
    suspects = [row for row in rows.tolist() if written[store.file_of(row)]] if any(written) else []
    unknown = {row for row in suspects if not digests[row]}
    changed = []
    with ImageProgress("Comparing images that were written since", len(suspects)) as progress:
        for row in suspects:
            if row not in unknown and _digest(store, row) != digests[row]:
                changed.append(store.where(row))
            progress.advance(1)
    now.digests = torch.where(now.digests == 0, before["digests"], now.digests)
    return changed, len(unknown)


def _digest(store: ImageStore, row: int) -> int:
    try:
        return int(store.contents.digests[row]) or digest_of(store.read(row))
    except BadImageError:
        return 0
