"""Large sets: never in memory as a whole, but read from shards or folders by worker processes.

Workers decode, crop and mirror the images of a part of each batch, as bytes. The loader preprocesses them.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.augment import Augment, cut_out, draw_moves, send_to_device
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, Framing, cover_and_crop, decode_image, stack
from lowrank_cnn.data.preprocess import Standardize, Whiten
from lowrank_cnn.data.resident import Loader
from lowrank_cnn.data.store import ImageStore, counting, sample_rows
from lowrank_cnn.data.types import Bad, Decoded, Problems, Size, Split, generator, rank_range

OTHER_SIZE = "resized image"
WINDOW = 256
_LANES = 16
_SAMPLE = 1024
_TRIES = 64
_PREFETCH = 4
_CHUNK = 256
_WORTH_WORKERS = 4096
_MOST_WORKERS = 16


@dataclass(frozen=True, eq=False)
class StreamedSplit(Split):
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
            with suppress(BadImageError):
                yield self._decode(int(self.rows[index]))[None]

    def decode(self, *, one_size: bool, what: str) -> Decoded:
        """All images as one tensor, without the bad ones, which are added to the problems.

        With `one_size`, an image of another size is a problem as well. `what` is the title of a progress line; an
        empty one shows none. Processes decode large sets: Pillow holds the interpreter on small images.
        """
        assert self.size is not None
        store, (channels, height, width) = self.store, self.size
        _ = store.stamps  # of all files, listed here and not by each worker
        framing = Framing((height, width), (height, width), None, 0, False, ())
        parts = EpochParts(store, self.rows[None], range(1), _CHUNK, 1, channels, framing, one_size=one_size)
        workers = min(_MOST_WORKERS, os.cpu_count() or 1) if len(self) >= _WORTH_WORKERS else 0
        forks = workers > 1 and "fork" in multiprocessing.get_all_start_methods()
        options = {"workers": workers, "multiprocessing_context": "fork"} if forks else {}
        images = torch.empty(len(self), *self.size, dtype=torch.uint8)
        kept: list[int] = []
        for part in counting(parts.load(**options), what, len(self), lambda _: _CHUNK):
            self.note(part)
            images[len(kept) : len(kept) + len(part.rows)] = part.images.permute(0, 3, 1, 2)
            kept += part.rows
        if not kept:
            raise LowRankError(f"none of {counted(len(self), 'image')} can be decoded: {self.problems}.")
        labels = store.labels[kept]
        return Decoded(images[: len(kept)], labels, self.problems, lambda place: store.where(kept[place]))

    def note(self, part: BatchPart) -> None:
        """Remember the problems and digests of images that were read, and refuse what is to be refused."""
        self.problems.add_all(part.found)
        if self.bad == "refuse":
            self.problems.refuse()
        self.store.note(part.digests)

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
        mean = self._prepare.mean.tolist() if isinstance(self._prepare, Standardize) else []
        fill = tuple(map(round, mean))  # the colour that preprocessing maps to zero
        self._framing = frame(split.size and split.size[1:], self.augment, train=self.train, fill=fill)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        parts = self._parts(epoch)
        workers = min(self.workers, parts.parts) if self.train else self.workers
        loaded = iter(parts.load(start, workers=workers, pin_memory=self._device.type == "cuda"))
        for batch in range(start, parts.batches):
            read = list(itertools.islice(loaded, parts.parts))
            for part in read:
                self.split.note(part)
            rows = [row for part in read for row in part.rows]
            if self.train and len(rows) < self.batch_size // self.world:
                raise LowRankError(f"too many images are bad: {self.split.problems}.")
            if rows:
                # Pieces in pinned memory are joined on the device.
                sent = [part.images.to(self._device, non_blocking=True) for part in read]
                images = self._finish(torch.cat(sent) if len(sent) > 1 else sent[0], epoch, batch)
                yield images, send_to_device(parts.store.labels[rows], self._device)

    def _parts(self, epoch: int) -> EpochParts:
        """What this process reads in an epoch: in training its lanes, divided among its workers; else its rows."""
        split, draw = self.split, None
        if self.train:
            # A divisor of the batch and a multiple of the processes, larger for many workers.
            wanted = max(_LANES, 2 ** (self.world * self.workers - 1).bit_length())
            lanes = math.lcm(math.gcd(self.batch_size, wanted), self.world)
            rows = self._epoch_lanes(epoch, lanes)
            mine, per_lane = range(*rank_range(lanes, self.rank, self.world)), self.batch_size // lanes
            draw = ("crops", self.seed, epoch)
        else:
            first, end = rank_range(len(split), self.rank, self.world)
            rows, mine, per_lane = split.rows[first:end][None], range(1), self.batch_size // self.world
        parts = min(max(1, self.workers), len(mine))
        split.store.keep(ceil_div(len(mine), parts), WINDOW if self.train else per_lane)
        return EpochParts(split.store, rows, mine, per_lane, parts, split.channels, self._framing, draw)

    def _epoch_lanes(self, epoch: int, lanes: int) -> Tensor:
        """Rows of an epoch as [lanes, images of a lane]: a pure function of the seed and the epoch.

        The rows, in a random order that keeps shards together, are cut into lanes, and mixed further within
        windows of each lane. Every global batch takes the same number of images from each lane. A process owns
        neighbouring lanes, and so reads its own shards. While all processes together have no more workers than
        lanes, the global batches depend neither on the number of processes nor on that of workers.
        """
        store, draw = self.split.store, generator("shards", self.seed, epoch)
        wanted = torch.zeros(len(store.labels), dtype=torch.bool)
        wanted[self.split.rows] = True
        order = store.shuffled(draw)
        cut = order[wanted[order]][: self._batches * self.batch_size].view(lanes, -1)
        window = torch.arange(cut.shape[1]) // WINDOW
        keys = window + torch.rand(cut.shape, generator=draw, dtype=torch.float64)
        return cut.gather(1, keys.argsort(1))

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


def frame(size: Size | None, augment: Augment, *, train: bool, fill: tuple[int, ...]) -> Framing:
    """How images become windows; `size` is their common height and width, or None."""
    augment = augment if size else augment.for_any_size()
    height, width = size or (augment.resize or 0, augment.resize or 0)
    window = augment.window(height, width, train=train)
    return Framing(window, (height, width) if size else None, augment.resize, augment.pad, augment.mirror, fill)


class BatchPart(NamedTuple):
    """Images [n, h, w, C], their rows, problems, and digests by row where a file is new or was written since."""

    images: Tensor
    rows: list[int]
    found: list[tuple[str, str]]
    digests: dict[int, int]


@dataclass(frozen=True)
class EpochParts(Dataset):
    """One process's images of an epoch.

    Every batch takes `per_lane` rows from each lane. This process reads the lanes in `mine`, in `parts` parts for
    its workers. `draw` seeds the crops of training, where another row replaces a bad one: every batch keeps its
    size. It is None in evaluation. With `one_size`, an image of another size than the framing's is a problem.
    """

    store: ImageStore
    lanes: Tensor
    mine: range
    per_lane: int
    parts: int
    channels: int
    framing: Framing
    draw: tuple[str | int, ...] | None = None
    one_size: bool = False

    @property
    def batches(self) -> int:
        return ceil_div(self.lanes.shape[1], self.per_lane)

    def __getitem__(self, key: tuple[int, int]) -> BatchPart:
        batch, part = key
        first, draws = batch * self.per_lane, None
        if self.draw is not None:  # three numbers for every image of the global batch, the same in every process
            shape, draw = (len(self.lanes), self.per_lane, 3), generator(*self.draw, batch)
            draws = torch.rand(shape, generator=draw, dtype=torch.float64).tolist()
        read = BatchPart(torch.empty(0), [], [], {})
        images = []
        for lane in self.mine[slice(*rank_range(len(self.mine), part, self.parts))]:
            for place in range(first, min(first + self.per_lane, self.lanes.shape[1])):
                if image := self._first_good(lane, place, draws and draws[lane][place - first], read):
                    images.append(image)
        return read._replace(images=stack(images, *self.framing.window, self.channels))

    def _first_good(self, lane: int, place: int, draws: list[float] | None, read: BatchPart) -> bytes | None:
        """The pixels of the image at this place, or in training of the first other one that can be decoded.

        The others are spread over its lane, then over all lanes. `read` gets the row, problems and the digest.
        """
        near, anywhere = self.lanes[lane], self.lanes.flatten()
        others = itertools.chain(_spread_from(near, place), _spread_from(anywhere, lane * len(near) + place))
        for row in others if draws else [int(near[place])]:
            try:
                data = self.store.read_watched(row, read.digests)
                at_least = None if self.one_size else self.framing.at_least
                image = decode_image(data, channels=self.channels, at_least=at_least)
            except BadImageError as error:
                read.found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
                continue
            if self.one_size and (image.height, image.width) != self.framing.size:
                read.found.append((OTHER_SIZE, f"{self.store.where(row)}: {image.height}x{image.width}"))
            read.rows.append(row)
            return self.framing(image, draws).tobytes()
        return None

    def load(self, start: int = 0, *, workers: int = 0, **options: Any) -> Iterable[BatchPart]:
        """Every part from this batch on. Workers take turns: each reads the same lanes in every batch."""
        keys = [(batch, part) for batch in range(start, self.batches) for part in range(self.parts)]
        if not workers or not keys:
            return (self[key] for key in keys)
        # Without a generator of its own, a DataLoader draws from that of dropout: a resumed run would draw twice.
        options |= {"num_workers": workers, "prefetch_factor": _PREFETCH, "generator": torch.Generator()}
        return loaded(DataLoader(self, batch_size=None, sampler=keys, **options))


def _spread_from(rows: Tensor, place: int) -> Iterator[int]:
    """Some of the rows: first this place, then others far apart, to leave a damaged part of a file."""
    stride = len(rows) // _TRIES + 1
    for step in range(min(_TRIES, len(rows))):
        yield int(rows[(place + step * stride) % len(rows)])


def loaded(loader: DataLoader) -> Iterator[Any]:
    """The items of a DataLoader; an error of its processes is one sentence, without their tracebacks."""
    try:
        yield from loader
    except (LowRankError, RuntimeError) as error:
        text = str(error.args[0]) if error.args else ""
        if "DataLoader worker" not in text:
            raise
        if isinstance(error, LowRankError):  # torch puts the whole traceback into its text
            raise type(error)(text.strip().splitlines()[-1].partition(": ")[2]) from error
        raise LowRankError(
            "a process that reads images was killed, by the system if memory ran out: use fewer "
            f"{option('workers')}."
        ) from error
