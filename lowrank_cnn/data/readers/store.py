"""Where encoded images lie: what parquet shards and image folders have in common."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowrank_cnn.data.fingerprint import fingerprint_of_subset
from lowrank_cnn.data.types import Problems

NO_LABEL = torch.iinfo(torch.int64).min
WRONG_LABEL = "wrong label"


class ImageStore(Protocol):
    """Numbered rows of encoded images with their labels (NO_LABEL where there is none)."""

    @property
    def labels(self) -> Tensor: ...

    def read(self, row: int) -> bytes:
        """The bytes of an image file; raises `BadImageError` where they cannot be had."""
        ...

    def where(self, row: int) -> str:
        """A name for the row by which the user finds it."""
        ...

    def shuffled(self, draw: torch.Generator) -> Tensor:
        """All rows in a random order that is still cheap to read."""
        ...

    def fingerprint(self) -> str:
        """The identity of all images (`data.fingerprint`), without decoding any."""
        ...

    def keep(self, places: int, rows: int) -> None:
        """Announce that reading goes on at so many places, each mixing so many neighbouring rows."""
        ...


def labelled_rows(store: ImageStore, classes: int, problems: Problems) -> Tensor:
    """The rows whose label names a class; the others are counted as problems."""
    right = (store.labels >= 0) & (store.labels < classes)
    for row in (~right).nonzero()[:, 0].tolist():
        label = int(store.labels[row])
        problems.add(WRONG_LABEL, f"{store.where(row)}: {'none' if label == NO_LABEL else label}")
    return right.nonzero()[:, 0]


def fingerprint_of_rows(store: ImageStore, rows: Tensor) -> str:
    """The identity of some rows of a store, with their labels."""
    return fingerprint_of_subset(store.fingerprint(), torch.stack([rows, store.labels[rows]]))
