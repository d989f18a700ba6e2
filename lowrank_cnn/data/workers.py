"""Worker processes: they read parts of batches and decode, crop and mirror the images, as uint8."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.decode import UNDECODABLE, BadImageError, Framing, decode_image, frame_image, stack
from lowrank_cnn.data.store import ImageStore, counting
from lowrank_cnn.data.types import Bad, Decoded, Problems, Size, generator, rank_range

OTHER_SIZE = "resized image"
_TRIES = 64
_PREFETCH = 4
_CHUNK = 256
_WORTH_WORKERS = 4096
_MOST_WORKERS = 16

Found = list[tuple[str, str]]
"""Problems, each as (kind, where)."""


class BatchPart(NamedTuple):
    """Images [n, h, w, C], their rows and the problems found.

    `digests` are those of images that were read for the first time or whose files were written since, by row.
    """

    images: Tensor
    rows: list[int]
    found: Found
    digests: dict[int, int]


@dataclass(frozen=True)
class EpochParts(Dataset):
    """One process's images of an epoch.

    Every batch takes `per_lane` rows from each lane. This process reads the lanes in `mine`, in `parts` parts for
    its workers. `draw` seeds the crops of training; it is None in evaluation, which leaves bad images out. In
    training another row replaces a bad one, so that every batch keeps its size. With `one_size`, an
    image of another size than the framing's is a problem.
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
        found: Found = []
        fresh: dict[int, int] = {}
        draws = self._draws(batch)
        made = (self._first_good(batch, number, draws, found, fresh) for number in self._numbers(batch, part))
        images = [image for image in made if image]
        pixels = stack([data for data, _ in images], *self.framing.window, self.channels)
        return BatchPart(pixels, [row for _, row in images], found, fresh)

    def _numbers(self, batch: int, part: int) -> Iterator[int]:
        """The numbers in the global batch of the images of a part."""
        length = min(self.per_lane, self.lanes.shape[1] - batch * self.per_lane)
        for lane in self.mine[slice(*rank_range(len(self.mine), part, self.parts))]:
            yield from range(lane * self.per_lane, lane * self.per_lane + length)

    def _draws(self, batch: int) -> list[list[float]] | None:
        """Three random numbers for every image of the global batch, the same in every process."""
        if self.draw is None:
            return None
        images = len(self.lanes) * self.per_lane
        return torch.rand(images, 3, generator=generator(*self.draw, batch), dtype=torch.float64).tolist()

    def _first_good(
        self, batch: int, number: int, draws: list[list[float]] | None, found: Found, fresh: dict[int, int]
    ) -> tuple[bytes, int] | None:
        """The pixels and the row of the image of this number, or in training of another that can be decoded."""
        lane, place = number // self.per_lane, batch * self.per_lane + number % self.per_lane
        own = draws[number] if draws else None
        for row in self._candidates(lane, place) if draws else [int(self.lanes[lane, place])]:
            try:
                data = self.store.read_watched(row, fresh)
                return self._frame(data, row, own, found), row
            except BadImageError as error:
                found.append((UNDECODABLE, f"{self.store.where(row)}: {error}"))
        return None

    def _candidates(self, lane: int, place: int) -> Iterator[int]:
        """The row at this place, then others spread over its lane, then over all lanes."""
        yield from _spread_from(self.lanes[lane], place)
        yield from _spread_from(self.lanes.flatten(), lane * self.lanes.shape[1] + place)

    def _frame(self, data: bytes, row: int, draws: list[float] | None, found: Found) -> bytes:
        if not self.one_size:
            return frame_image(data, self.framing, self.channels, draws)
        image = decode_image(data, channels=self.channels)
        if (image.height, image.width) != self.framing.size:
            found.append((OTHER_SIZE, f"{self.store.where(row)}: {image.height}x{image.width}"))
        return self.framing(image, draws).tobytes()

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


def decode_rows(
    store: ImageStore, rows: Tensor, *, size: Size, any_size: bool, bad: Bad, problems: Problems, what: str = ""
) -> Decoded:
    """All these rows as one tensor, without the bad ones, which are added to the problems.

    `what` is the title of a progress line; an empty one shows none. Processes decode large sets: Pillow holds the
    interpreter on small images.
    """
    _ = store.stamps  # of all files, listed here and not by each worker
    channels, height, width = size
    framing = Framing((height, width), (height, width), None, 0, False, ())
    parts = EpochParts(store, rows[None], range(1), _CHUNK, 1, channels, framing, one_size=not any_size)
    workers = min(_MOST_WORKERS, os.cpu_count() or 1) if len(rows) >= _WORTH_WORKERS else 0
    forks = workers > 1 and "fork" in multiprocessing.get_all_start_methods()
    options = {"workers": workers, "multiprocessing_context": "fork"} if forks else {}
    images = torch.empty(len(rows), *size, dtype=torch.uint8)
    kept: list[int] = []
    for part in counting(parts.load(**options), what, len(rows), lambda _: parts.per_lane):
        problems.add_all(part.found)
        if bad == "refuse":
            problems.refuse()
        images[len(kept) : len(kept) + len(part.rows)] = part.images.permute(0, 3, 1, 2)
        kept += part.rows
        store.note(part.digests)
    if not kept:
        raise LowRankError(f"none of {counted(len(rows), 'image')} can be decoded: {problems}.")
    return Decoded(images[: len(kept)], store.labels[kept], problems, lambda place: store.where(kept[place]))
