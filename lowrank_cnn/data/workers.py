"""What a worker process makes: its part of a batch, decoded, cropped and mirrored, as uint8.

If a GPU decodes, a worker passes plain colour JPEGs on as they are, and frames all other images itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, Framing, ScaledCrop, frame_image, stack
from lowrank_cnn.data.store import ImageStore, read_watched, shuffled_rows
from lowrank_cnn.data.types import generator, rank_range

TOO_MANY = "too many images are bad"
_TRIES = 64

Trouble = tuple[list[tuple[str, str]], str]
"""The problems found, and the error that ends the run, or an empty text."""


def _spread_from(rows: Tensor, place: int) -> Iterator[int]:
    """Some of the rows: first this place, then others far apart, to leave a damaged part of a file."""
    stride = len(rows) // _TRIES + 1
    for step in range(min(_TRIES, len(rows))):
        yield int(rows[(place + step * stride) % len(rows)])


@dataclass(frozen=True)
class EncodedImages:
    """The JPEGs of a part, one behind the other, and a crop for each of its images; None where a worker framed it.

    `places` are the positions of the images among all that the part was to hold.
    """

    data: Tensor
    lengths: list[int]
    crops: list[ScaledCrop | None]
    places: list[int]

    @classmethod
    def of(cls, images: dict[int, BatchImage]) -> EncodedImages:
        """From the images of a part by their places."""
        jpegs = [image.data for image in images.values() if image.crop]
        joined = bytearray().join(jpegs)
        data = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        return cls(data, [len(jpeg) for jpeg in jpegs], [image.crop for image in images.values()], list(images))

    def jpegs(self) -> list[tuple[Tensor, ScaledCrop]]:
        """Every JPEG with its crop; no byte is copied."""
        crops = [crop for crop in self.crops if crop]
        return list(zip(self.data.split(self.lengths), crops, strict=True)) if crops else []

    def pin_memory(self) -> EncodedImages:
        """Called by torch's DataLoader on what it loads for a GPU."""
        return replace(self, data=self.data.pin_memory())


class BatchPart(NamedTuple):
    """Images [n, h, w, C] and labels, the problems found, and the error that ends the run, if any.

    If some images are still `encoded`, `images` holds only the others; `labels` are those of all. Labels are a
    list, since a tensor takes some fraction of a millisecond to receive from another process. `digests` are those
    of the images, by row, that were read for the first time or whose files were written since.
    """

    images: Tensor
    labels: list[int]
    found: list[tuple[str, str]]
    failure: str
    encoded: EncodedImages | None = None
    digests: Mapping[int, int] = {}


def trouble_of(parts: Sequence[BatchPart]) -> Trouble:
    """The problems of several parts, and the first error."""
    failure = next((part.failure for part in parts if part.failure), "")
    return [problem for part in parts for problem in part.found], failure


class BatchImage(NamedTuple):
    """The pixels of one image, or a JPEG and the crop of it to make, and the label."""

    data: bytes
    crop: ScaledCrop | None
    label: int


@dataclass(frozen=True)
class EpochParts(Dataset):
    """One process's images of an epoch.

    Every batch takes `per_lane` rows from each lane. This process reads the lanes in `mine`, in `parts` parts for
    its workers. `draw` seeds the crops of training; it is None in evaluation, which leaves bad images out. In
    training another row replaces a bad one, so that every batch keeps its size. With `encoded`, plain JPEGs stay
    encoded.
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
        return ceil_div(self.lanes.shape[1], self.per_lane)

    def __getitem__(self, key: tuple[int, int]) -> BatchPart:
        draws, keys = self._draws(key[0]), list(self._places(*key))
        found: list[tuple[str, str]] = []
        images = {
            place: image
            for place, (lane, at, number) in enumerate(keys)
            if (image := self._first_good(lane, at, draws[number] if draws else None, found))
        }
        framed = [image.data for image in images.values() if not image.crop]
        pixels = stack(framed, *self.framing.window, self.channels)
        labels = [image.label for image in images.values()]
        failure = TOO_MANY if draws is not None and len(images) < len(keys) else ""
        encoded = EncodedImages.of(images) if self.encoded else None
        return BatchPart(pixels, labels, found, failure, encoded, self.store.contents.take())

    def framed(self, batch: int, part: int, place: int, found: list[tuple[str, str]]) -> BatchImage | None:
        """One image of a part again, framed on the CPU: for an image that the GPU could not decode."""
        draws = self._draws(batch)
        lane, at, number = list(self._places(batch, part))[place]
        return replace(self, encoded=False)._first_good(lane, at, draws[number] if draws else None, found)

    def _places(self, batch: int, part: int) -> Iterator[tuple[int, int, int]]:
        """The lane, the place in it, and the number in the global batch, of each image of a part."""
        first = batch * self.per_lane
        for lane in self.mine[slice(*rank_range(len(self.mine), part, self.parts))]:
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
    ) -> BatchImage | None:
        """The image at this place and its label, or in training those of another row that can be decoded."""
        for row in self._candidates(lane, place) if draws else [int(self.lanes[lane, place])]:
            try:
                return BatchImage(*self._image(row, draws), int(self.store.labels[row]))
            except BadImageError as error:
                found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
        return None

    def _candidates(self, lane: int, place: int) -> Iterator[int]:
        """The row at this place, then others spread over its lane, then over all lanes."""
        length = self.lanes.shape[1]
        yield from _spread_from(self.lanes[lane], place)
        yield from _spread_from(self.lanes.flatten(), lane * length + place)

    def _image(self, row: int, draws: list[float] | None) -> tuple[bytes, ScaledCrop | None]:
        data = read_watched(self.store, row)
        if self.encoded and (crop := self.framing.scaled_crop(data, draws)):
            return data, crop
        return frame_image(data, self.framing, self.channels, draws), None


_LANES = 16
WINDOW = 256


def lane_count(batch_size: int, world: int, workers: int) -> int:
    """A divisor of the batch and a multiple of the processes, larger for many workers."""
    wanted = _LANES
    while wanted < world * workers:
        wanted *= 2
    return math.lcm(math.gcd(batch_size, wanted), world)


def epoch_lanes(store: ImageStore, rows: Tensor, *, lanes: int, used: int, seed: int, epoch: int) -> Tensor:
    """Rows of an epoch as [lanes, used / lanes]: a pure function of the seed and the epoch.

    The rows, in a random order that keeps shards together, are cut into lanes, and mixed further within windows of
    each lane. Every global batch takes the same number of images from each lane. A process owns neighbouring
    lanes, and so reads its own shards; its workers share these lanes. While all processes together have no more
    workers than lanes, the global batches depend neither on the number of processes nor on that of workers.
    """
    draw = generator("shards", seed, epoch)
    cut = shuffled_rows(store, rows, draw)[:used].view(lanes, -1)
    window = torch.arange(cut.shape[1]) // WINDOW
    keys = window + torch.rand(cut.shape, generator=draw, dtype=torch.float64)
    return cut.gather(1, keys.argsort(1))
