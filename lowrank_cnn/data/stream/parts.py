"""What a worker process makes: its part of a batch, decoded, cropped and mirrored, as uint8.

Where a device decodes, a worker frames only what is no plain colour JPEG, and hands the others on as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lowrank_cnn.data.images.decode import UNDECODABLE, BadImageError, stack
from lowrank_cnn.data.images.encoded import Encoded, Window, join, window_of
from lowrank_cnn.data.images.framing import Framing, framer
from lowrank_cnn.data.readers.store import ImageStore
from lowrank_cnn.data.types import generator

TOO_MANY = "too many images are bad"
_TRIES = 64

Trouble = tuple[list[tuple[str, str]], str]
"""The problems met, and what the whole run fails by, if anything."""


def _spread_from(rows: Tensor, place: int) -> Iterator[int]:
    """Some of the rows, this place first, the others far enough apart to leave a damaged stretch behind."""
    stride = len(rows) // _TRIES + 1
    for step in range(min(_TRIES, len(rows))):
        yield int(rows[(place + step * stride) % len(rows)])


class Part(NamedTuple):
    """Images [n, h, w, C] and labels, the problems met, and what the whole run fails by, if anything.

    Where some are still `encoded`, `images` are only the others; labels are those of all. They are a list, since
    to receive a tensor from another process takes some fraction of a millisecond.
    """

    images: Tensor
    labels: list[int]
    found: list[tuple[str, str]]
    failure: str
    encoded: Encoded | None = None


def trouble_of(parts: Sequence[Part]) -> Trouble:
    """That of several parts together."""
    failure = next((part.failure for part in parts if part.failure), "")
    return [problem for part in parts for problem in part.found], failure


class Sample(NamedTuple):
    """The pixels of one image, or a JPEG and the window it is to become, and its label."""

    data: bytes
    window: Window | None
    label: int


@dataclass(frozen=True)
class Parts(Dataset):
    """One process's images of an epoch.

    Every batch takes `per_lane` rows from each of the `lanes`, those in `mine` by this process, which makes
    them in so many `parts`. `draw` seeds the crops of training; None stands for evaluation, where bad images
    are left out. In training another row of the lane takes the place of a bad one: every batch keeps its size.
    With `encoded`, plain JPEGs are not decoded.
    """

    store: ImageStore
    lanes: Tensor
    mine: range
    per_lane: int
    parts: int
    channels: int
    framing: Framing
    draw: tuple[str | int, ...] | None
    encoded: bool = False

    @property
    def batches(self) -> int:
        return -(-self.lanes.shape[1] // self.per_lane)

    def __getitem__(self, key: tuple[int, int]) -> Part:
        draws, keys = self._draws(key[0]), list(self._places(*key))
        found: list[tuple[str, str]] = []
        samples = {
            place: sample
            for place, (lane, at, number) in enumerate(keys)
            if (sample := self._first_good(lane, at, draws[number] if draws else None, found))
        }
        framed = [sample.data for sample in samples.values() if not sample.window]
        pixels = stack(framed, *self.framing.window, self.channels)
        labels = [sample.label for sample in samples.values()]
        failure = TOO_MANY if draws is not None and len(samples) < len(keys) else ""
        return Part(pixels, labels, found, failure, _joined(samples) if self.encoded else None)

    def framed(self, batch: int, part: int, place: int, found: list[tuple[str, str]]) -> Sample | None:
        """One image of a part once more, framed by the CPU whatever it is."""
        draws = self._draws(batch)
        lane, at, number = list(self._places(batch, part))[place]
        return replace(self, encoded=False)._first_good(lane, at, draws[number] if draws else None, found)

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
    ) -> Sample | None:
        """The image at this place and its label, or in training those of another row that can be decoded."""
        for row in self._candidates(lane, place) if draws else [int(self.lanes[lane, place])]:
            try:
                return Sample(*self._image(row, draws), int(self.store.labels[row]))
            except BadImageError as error:
                found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
        return None

    def _candidates(self, lane: int, place: int) -> Iterator[int]:
        """The row at this place, then others spread over its lane, then over all lanes."""
        length = self.lanes.shape[1]
        yield from _spread_from(self.lanes[lane], place)
        yield from _spread_from(self.lanes.flatten(), lane * length + place)

    def _image(self, row: int, draws: list[float] | None) -> tuple[bytes, Window | None]:
        data = self.store.read(row)
        if self.encoded and (window := window_of(data, self.framing, draws)):
            return data, window
        return framer()(data, self.framing, self.channels, draws), None


def _joined(samples: dict[int, Sample]) -> Encoded:
    jpegs = [sample.data for sample in samples.values() if sample.window]
    return join(jpegs, [sample.window for sample in samples.values()], list(samples))
