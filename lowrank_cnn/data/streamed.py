"""Large sets: read from their shards or folders by worker processes, never as a whole in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.data.augment import Augment, cut_out, draw_moves, send_to_device
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, Framing, cover_and_crop, decode_image, stack
from lowrank_cnn.data.preprocess import Preprocess, Standardize, Whiten
from lowrank_cnn.data.resident import Loader
from lowrank_cnn.data.store import ImageStore, sample_rows
from lowrank_cnn.data.types import Bad, Problems, Size, generator, rank_range
from lowrank_cnn.data.workers import EpochParts

WINDOW = 256
_LANES = 16
_SAMPLE = 1024


@dataclass(frozen=True, eq=False)
class StreamedSplit:
    """Rows of a store, decoded when they are needed; bad ones are counted and left out."""

    store: ImageStore
    rows: Tensor
    size: Size | None
    channels: int
    problems: Problems = field(default_factory=Problems)
    bad: Bad = "skip"

    @property
    def labels(self) -> Tensor:
        return self.store.labels[self.rows]

    @property
    def fingerprint(self) -> str:
        return self.store.fingerprint(self.rows)

    def contents(self) -> dict[str, Tensor]:
        return self.store.contents()

    def changed(self, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
        return self.store.changed(self.rows, before)

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, index: Tensor) -> StreamedSplit:
        return replace(self, rows=self.rows[index])

    def describe(self, index: int) -> str:
        return self.store.where(self._evaluated_row(index))

    def _evaluated_row(self, index: int) -> int:
        """The row of the image at this place of an evaluation, which leaves undecodable images out."""
        bad = {where for kind, where in self.problems.found if kind == UNDECODABLE}
        if not bad:
            return int(self.rows[index])
        named = ((row, self.store.where(row)) for row in self.rows.tolist())
        good = (row for row, name in named if not any(where.startswith(f"{name}: ") for where in bad))
        return next(itertools.islice(good, index, None))

    def picture(self, index: int) -> Tensor:
        return self._decode(self._evaluated_row(index))

    def pixels(self) -> Iterator[Tensor]:
        for index in sample_rows(len(self), _SAMPLE).tolist():
            try:
                yield self._decode(int(self.rows[index]))[None]
            except BadImageError:
                continue

    def _decode(self, row: int) -> Tensor:
        image = decode_image(self.store.read(row), channels=self.channels)
        image = cover_and_crop(image, *self.size[1:]) if self.size else image
        return stack([image.tobytes()], image.height, image.width, self.channels)[0].permute(2, 0, 1)


@dataclass(eq=False, repr=False)
class StreamedLoader(Loader):
    """Batches of a streamed split, each process reading its own part through its own workers."""

    split: StreamedSplit

    def __post_init__(self) -> None:
        super().__post_init__()
        split = self.split
        if isinstance(self.preprocess, Whiten):
            raise LowRankError("whitening needs a set held in memory, and this one is streamed.")
        _ = split.store.stamps  # of all files, listed here and not by each worker
        size = None if split.size is None else split.size[1:]
        self._framing = frame(size, self.augment, train=self.train, fill=_fill(self.preprocess, split.channels))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        parts = self._parts(epoch)
        workers = min(self.workers, parts.parts) if self.train else self.workers
        loaded = iter(parts.load(start, workers=workers, pin_memory=self._device.type == "cuda"))
        problems = self.split.problems
        for batch in range(start, parts.batches):
            read = list(itertools.islice(loaded, parts.parts))
            for part in read:
                parts.store.note(part.digests)
                problems.add_all(part.found)
            rows = [row for part in read for row in part.rows]
            if self.train and len(rows) < self.batch_size // self.world:
                raise LowRankError(f"too many images are bad: {problems}.")
            if self.split.bad == "refuse":
                problems.refuse()
            if rows:
                # Pieces in pinned memory are joined on the device.
                sent = [part.images.to(self._device, non_blocking=True) for part in read]
                images = self._finish(torch.cat(sent) if len(sent) > 1 else sent[0], epoch, batch)
                yield images, send_to_device(parts.store.labels[rows], self._device)

    def _parts(self, epoch: int) -> EpochParts:
        """What this process reads in an epoch: in training its lanes, divided among its workers; else its rows."""
        split, draw = self.split, None
        if self.train:
            lanes, used = lane_count(self.batch_size, self.world, self.workers), self._batches * self.batch_size
            rows = epoch_lanes(split.store, split.rows, lanes=lanes, used=used, seed=self.seed, epoch=epoch)
            mine, per_lane = range(*rank_range(lanes, self.rank, self.world)), self.batch_size // lanes
            draw = ("crops", self.seed, epoch)
        else:
            first, end = rank_range(len(split), self.rank, self.world)
            rows, mine, per_lane = split.rows[first:end][None], range(1), self.batch_size // self.world
        parts = min(max(1, self.workers), len(mine))
        split.store.keep(ceil_div(len(mine), parts), WINDOW if self.train else per_lane)
        return EpochParts(split.store, rows, mine, per_lane, parts, split.channels, self._framing, draw)

    @torch.no_grad()
    def _finish(self, images: Tensor, epoch: int, batch: int) -> Tensor:
        """uint8 [n, h, w, C] on the device, preprocessed and cut out."""
        ready = self._prepare(images.permute(0, 3, 1, 2))
        if self.train and self.augment.cutout:
            window, draw = self._framing.window, generator("cutouts", self.seed, epoch, batch)
            moves = draw_moves(self.batch_size, padded=window, window=window, mirror=False, draw=draw)
            mine = slice(self.rank * len(images), (self.rank + 1) * len(images))
            ready = cut_out(ready, send_to_device(moves[:, mine], self._device), cutout=self.augment.cutout)
        return self._batch(ready.to(self.dtype))


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
    cut = store.shuffled_rows(rows, draw)[:used].view(lanes, -1)
    window = torch.arange(cut.shape[1]) // WINDOW
    keys = window + torch.rand(cut.shape, generator=draw, dtype=torch.float64)
    return cut.gather(1, keys.argsort(1))


def frame(size: Size | None, augment: Augment, *, train: bool, fill: tuple[int, ...]) -> Framing:
    """How images become windows; `size` is their common height and width, or None."""
    augment = augment if size else augment.for_any_size()
    height, width = size or (augment.resize or 0, augment.resize or 0)
    window = augment.window(height, width, train=train)
    return Framing(window, (height, width) if size else None, augment.resize, augment.pad, augment.mirror, fill)


def _fill(preprocess: Preprocess | None, channels: int) -> tuple[int, ...]:
    """The colour of padding, which preprocessing maps to zero."""
    if isinstance(preprocess, Standardize):
        return tuple(round(value) for value in preprocess.mean.tolist())
    return (0,) * channels
