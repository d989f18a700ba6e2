"""How a source is opened, checked before anything is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lowrank_cnn.data.readers.parquet import Missing
from lowrank_cnn.data.types import Bad
from lowrank_cnn.system.errors import LowRankError

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
