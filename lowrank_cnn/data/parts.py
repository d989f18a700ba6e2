"""What a worker process makes: its part of a batch, decoded, cropped and mirrored, as uint8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lowrank_cnn.data.decode import (
    UNDECODABLE,
    BadImageError,
    crop_at,
    decode_image,
    fit,
    resize_shorter,
    stack,
)
from lowrank_cnn.data.store import Store
from lowrank_cnn.data.types import generator
from lowrank_cnn.errors import require

if TYPE_CHECKING:
    from PIL.Image import Image

_TRIES = 64


@dataclass(frozen=True)
class Framing:
    """How an image becomes a window: brought to a size where there is one, scaled, then cropped."""

    window: tuple[int, int]
    size: tuple[int, int] | None
    resize: int | None
    pad: int
    mirror: bool
    fill: tuple[int, ...]

    @property
    def at_least(self) -> int:
        """How far a decoder may scale the image down."""
        return max(self.resize or 0, *(self.size or (0, 0)))

    def __call__(self, image: Image, draws: list[float] | None) -> Image:
        """The centre window, or with three numbers of 0 to 1 a random one that may be mirrored."""
        if self.size:
            image = fit(image, *self.size)
        if self.resize:
            image = resize_shorter(image, self.resize)
        height, width = self.window
        pad = self.pad if draws else 0
        top = _offset(image.height + 2 * pad - height, draws[0] if draws else None) - pad
        left = _offset(image.width + 2 * pad - width, draws[1] if draws else None) - pad
        image = crop_at(image, top, left, height, width, fill=self.fill)
        if draws and self.mirror and draws[2] < 0.5:
            pillow = require("PIL.Image", extra="data", purpose="mirroring images")
            image = image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT)
        return image


def _offset(margin: int, draw: float | None) -> int:
    return margin // 2 if draw is None else int(draw * (margin + 1))


def _spread_from(rows: Tensor, place: int) -> Iterator[int]:
    """Some of the rows, this place first, the others far enough apart to leave a damaged stretch behind."""
    stride = len(rows) // _TRIES + 1
    for step in range(min(_TRIES, len(rows))):
        yield int(rows[(place + step * stride) % len(rows)])


class Part(NamedTuple):
    """Images [n, h, w, C] and labels, the problems met, and what the whole run fails by, if anything."""

    images: Tensor
    labels: Tensor
    found: list[tuple[str, str]]
    failure: str


@dataclass(frozen=True)
class Parts(Dataset):
    """One process's images of an epoch.

    Every batch takes `per_lane` rows from each of the `lanes`, those in `mine` by this process, which makes
    them in so many `parts`. `draw` seeds the crops of training; None stands for evaluation, where bad images
    are left out. In training another row of the lane takes the place of a bad one: every batch keeps its size.
    """

    store: Store
    lanes: Tensor
    mine: range
    per_lane: int
    parts: int
    channels: int
    framing: Framing
    draw: tuple[str | int, ...] | None

    @property
    def batches(self) -> int:
        return -(-self.lanes.shape[1] // self.per_lane)

    def __getitem__(self, key: tuple[int, int]) -> Part:
        batch, part = key
        draws = self._draws(batch)
        places = list(self._places(batch, part))
        found: list[tuple[str, str]] = []
        images = [
            image
            for lane, place, number in places
            if (image := self._first_good(lane, place, draws[number] if draws else None, found))
        ]
        pixels = stack([image for image, _ in images], *self.framing.window, self.channels)
        labels = torch.tensor([label for _, label in images], dtype=torch.int64)
        short = draws is not None and len(images) < len(places)
        return Part(pixels, labels, found, "too many images are bad" if short else "")

    def _places(self, batch: int, part: int) -> Iterator[tuple[int, int, int]]:
        """The lane, the place in it, and the number in the global batch, of each image of a part."""
        count, first = len(self.mine), batch * self.per_lane
        for lane in self.mine[count * part // self.parts : count * (part + 1) // self.parts]:
            for place in range(first, min(first + self.per_lane, self.lanes.shape[1])):
                yield lane, place, lane * self.per_lane + place - first

    def _draws(self, batch: int) -> list[list[float]] | None:
        """Three numbers for every image of the global batch, the same in every process."""
        if self.draw is None:
            return None
        images = len(self.lanes) * self.per_lane
        return torch.rand(images, 3, generator=generator(*self.draw, batch), dtype=torch.float64).tolist()

    def _first_good(
        self, lane: int, place: int, draws: list[float] | None, found: list[tuple[str, str]]
    ) -> tuple[bytes, int] | None:
        """The image at this place and its label, or in training those of another row that can be decoded."""
        for row in self._candidates(lane, place) if draws else [int(self.lanes[lane, place])]:
            try:
                return self._image(row, draws), int(self.store.labels[row])
            except BadImageError as error:
                found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
        return None

    def _candidates(self, lane: int, place: int) -> Iterator[int]:
        """The row at this place, then others spread over its lane, then over all lanes."""
        length = self.lanes.shape[1]
        yield from _spread_from(self.lanes[lane], place)
        yield from _spread_from(self.lanes.flatten(), lane * length + place)

    def _image(self, row: int, draws: list[float] | None) -> bytes:
        data = self.store.read(row)
        image = decode_image(data, channels=self.channels, at_least=self.framing.at_least)
        return self.framing(image, draws).tobytes()
