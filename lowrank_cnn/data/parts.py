"""What a worker process makes: its part of a batch, decoded, cropped and mirrored, as uint8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, stack
from lowrank_cnn.data.framing import Framing, framer
from lowrank_cnn.data.store import Store
from lowrank_cnn.data.types import generator

_TRIES = 64


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
        return framer()(self.store.read(row), self.framing, self.channels, draws)
