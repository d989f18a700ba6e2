"""Large sets: read from their shards or folders by worker processes, never as a whole in memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError, first_line, require
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.data.augment import Augment, cut_out, draw_moves, send_to_device
from lowrank_cnn.data.decode import (
    LARGEST,
    UNDECODABLE,
    BadImageError,
    Framing,
    ScaledCrop,
    cover_and_crop,
    decode_image,
    stack,
)
from lowrank_cnn.data.preprocess import Preprocess, Standardize, Whiten
from lowrank_cnn.data.resident import DeviceLoader
from lowrank_cnn.data.store import ImageStore, sample_rows
from lowrank_cnn.data.types import Bad, Problems, Size, generator, rank_range
from lowrank_cnn.data.workers import BatchPart, EpochParts, Found

DEPTH = 2
WINDOW = 256
_LANES = 16
_SAMPLE = 1024

Batch = tuple[Found, tuple[Tensor, ...]]
"""The problems found, and images and labels; neither if there are too few images."""


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
class StreamedLoader(DeviceLoader):
    """Batches of a streamed split, each process reading its own part through its own workers.

    With `decode="gpu"` these only read, and the device decodes (`gpu_decode`): the same crops of the same images,
    but not bit for bit the same pixels.
    """

    split: StreamedSplit

    def __post_init__(self) -> None:
        super().__post_init__()
        split, device = self.split, self._device
        if isinstance(self.preprocess, Whiten):
            raise LowRankError("whitening needs a set held in memory, and this one is streamed.")
        _ = split.store.stamps  # of all files, listed here and not by each worker
        size = None if split.size is None else split.size[1:]
        self._framing = frame(size, self.augment, train=self.train, fill=_fill(self.preprocess, split.channels))
        self._decoder = find_decoder(device) if self.decode == "gpu" else None
        if self._decoder and (split.channels != 3 or (self.train and self._framing.pad)):
            raise LowRankError(
                "decode='gpu' is for photographs in colour that are not padded: set pad to 0 and "
                "read the images in colour, or decode them on the CPU."
            )
        # One for all epochs: memory that was freed in one stream serves no other.
        self._stream = torch.cuda.Stream(device) if self._decoder and device.type == "cuda" else None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        parts = self._training_parts(epoch) if self.train else self._evaluation_parts()
        workers = min(self.workers, parts.parts) if self.train else self.workers
        loaded = parts.load(start, workers=workers, pin_memory=self._device.type == "cuda")
        ready = self._ready(parts, iter(loaded), epoch, start)
        problems = self.split.problems
        with contextlib.closing(prefetch(ready, self._stream) if self._decoder else ready) as made:
            for found, batch in made:
                problems.add_all(found)
                if self.train and not batch:
                    raise LowRankError(f"too many images are bad: {problems}.")
                if self.split.bad == "refuse":
                    problems.refuse()
                if batch:
                    images, labels = batch
                    yield images, labels

    def _ready(
        self, parts: EpochParts, loaded: Iterator[BatchPart], epoch: int, start: int
    ) -> Generator[Batch, None, None]:
        """For every batch its problems, and its images and labels; none if training would get too few images."""
        least = self.batch_size // self.world if self.train else 1
        for batch in range(start, parts.batches):
            read = list(itertools.islice(loaded, parts.parts))
            for part in read:
                parts.store.note(part.digests)
            if self._decoder:
                read = [decode_parts(parts, batch, read, self._decoder, self._device)]
            found = [problem for part in read for problem in part.found]
            rows = [row for part in read for row in part.rows]
            if len(rows) < least:
                yield found, ()
                continue
            # Pieces in pinned memory are joined on the device.
            sent = [part.images.to(self._device, non_blocking=True) for part in read]
            images = self._finish(torch.cat(sent) if len(sent) > 1 else sent[0], epoch, batch)
            yield found, (images, send_to_device(parts.store.labels[rows], self._device))

    def _training_parts(self, epoch: int) -> EpochParts:
        """The parts that this process reads in an epoch: its lanes, divided among its workers."""
        lanes = lane_count(self.batch_size, self.world, self.workers)
        used = self._batches * self.batch_size
        rows = epoch_lanes(self.split.store, self.split.rows, lanes=lanes, used=used, seed=self.seed, epoch=epoch)
        mine = range(*rank_range(lanes, self.rank, self.world))
        return self._parts(rows, mine, self.batch_size // lanes, draw=("crops", self.seed, epoch))

    def _evaluation_parts(self) -> EpochParts:
        """The rows that this process evaluates, in their order, as one lane."""
        first, end = rank_range(len(self.split), self.rank, self.world)
        return self._parts(self.split.rows[first:end][None], range(1), self.batch_size // self.world, draw=None)

    def _parts(
        self, lanes: Tensor, mine: range, per_lane: int, *, draw: tuple[str | int, ...] | None
    ) -> EpochParts:
        parts = min(max(1, self.workers), len(mine))
        self.split.store.keep(ceil_div(len(mine), parts), WINDOW if draw else per_lane)
        channels, encoded = self.split.channels, self._decoder is not None
        return EpochParts(self.split.store, lanes, mine, per_lane, parts, channels, self._framing, draw, encoded)

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


def frame(size: tuple[int, int] | None, augment: Augment, *, train: bool, fill: tuple[int, ...]) -> Framing:
    """How images become windows; `size` is their common size, or None."""
    augment = augment if size else augment.for_any_size()
    smallest = size or (augment.resize or 0, augment.resize or 0)
    window = augment.window(*smallest, train=train)
    return Framing(window, size, augment.resize, augment.pad, augment.mirror, fill)


def _fill(preprocess: Preprocess | None, channels: int) -> tuple[int, ...]:
    """The colour of padding, which preprocessing maps to zero."""
    if isinstance(preprocess, Standardize):
        return tuple(round(value) for value in preprocess.mean.tolist())
    return (0,) * channels


def prefetch(
    batches: Generator[Batch, None, None], stream: torch.cuda.Stream | None, *, depth: int = DEPTH
) -> Generator[Batch, None, None]:
    """The same batches, with up to `depth` of them prepared while one is in use.

    A thread prepares them, on a GPU in a stream of its own. An error is raised in the place of its batch. Closed
    early, the thread ends after the batch that it prepares.
    """

    def make() -> tuple[Batch, Any] | None:
        """The next batch and the event that it is ready by; None at the end."""
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            made = next(batches, None)
            return None if made is None else (made, stream.record_event() if stream else None)

    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        if stream:  # what batches are made with was put on the device by the stream in use
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        pending = deque(thread.submit(make) for _ in range(depth))
        while made := pending.popleft().result():
            pending.append(thread.submit(make))
            batch, ready = made
            for tensor in batch[1] if ready else ():
                # The stream in use waits until the tensor is ready, and its memory until this stream has read it.
                current = torch.cuda.current_stream(tensor.device)
                current.wait_event(ready)
                tensor.record_stream(current)
            yield batch
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
        batches.close()


# Decode photographs on the GPU that trains on them, for machines with few cores beside it.
#
# Workers read the bytes and draw the same crops as when they decode. nvJPEG, through torchvision, decodes a batch,
# on the decoding engines of the GPU if it has any. Its pixels differ slightly from libjpeg's: it repeats colours
# over the pixels that share them, where libjpeg interpolates, and it never decodes at a reduced scale. So it
# decodes only if asked to. A worker frames images that are not plain colour JPEGs; this process frames what nvJPEG
# refuses.

DECODED_AT_ONCE, SCALED_AT_ONCE = LARGEST, 2**24
"""Pixels held whole at a time, and those held as floats: what bounds the memory that large photographs take."""

Jpeg = tuple[Tensor, ScaledCrop]
Decoder = Callable[[list[Tensor]], list[Tensor]]
"""From the bytes of JPEGs to uint8 [3, H, W] on the device; a RuntimeError where any is refused."""


def find_decoder(device: torch.device) -> Decoder:
    """torchvision's nvJPEG, once it has shown that it works here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise LowRankError(f"decode='gpu' needs a CUDA device, and this run is on {device}.")
    try:
        vision: Any = require("torchvision.io", extra="zoo", purpose="decode='gpu'")
        pillow = require("PIL.Image", extra="data", purpose="decoding images")
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        decode = partial(_by_nvjpeg, vision, device)
        pillow.new("RGB", (64, 64)).save(probe := io.BytesIO(), "JPEG")
        decode([torch.frombuffer(bytearray(probe.getvalue()), dtype=torch.uint8)])
    except (RuntimeError, OSError, AttributeError) as error:  # a build for another torch fails in various ways
        raise LowRankError(f"decode='gpu' does not work with this torchvision: {first_line(error)}") from error
    return decode


def _by_nvjpeg(vision: Any, device: torch.device, jpegs: list[Tensor]) -> list[Tensor]:
    # It writes in a stream of its own to memory that this stream may still be reading for the batch before.
    torch.cuda.current_stream(device).synchronize()
    return vision.decode_jpeg(jpegs, mode=vision.ImageReadMode.RGB, device=device)


def decode_parts(
    parts: EpochParts, batch: int, read: Sequence[BatchPart], decode: Decoder, device: torch.device
) -> BatchPart:
    """The parts of a batch as one, its images on the device: decoded, scaled, cut out and mirrored there."""
    size = parts.framing.window

    def on_device(pixels: Tensor) -> Tensor:
        return pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)

    decoded = iter(decode_windows([jpeg for part in read for jpeg in part.jpegs()], size, decode))
    images: list[Tensor] = []
    rows: list[int] = []
    found: Found = [problem for part in read for problem in part.found]
    for part in read:
        framed = iter(on_device(part.images))
        for number, crop, row in zip(part.numbers, part.crops, part.rows, strict=True):
            pixels, place = next(decoded if crop else framed), row
            if pixels is None:
                if (again := parts.framed(batch, number, found)) is None:
                    continue
                pixels, place = on_device(stack([again.data], *size, parts.channels))[0], again.row
            images.append(pixels)
            rows.append(place)
    whole = torch.stack(images).permute(0, 2, 3, 1) if images else stack([], *size, parts.channels)
    return BatchPart(whole, rows, found, {})


@torch.no_grad()
def decode_windows(jpegs: list[Jpeg], size: tuple[int, int], decode: Decoder) -> list[Tensor | None]:
    """The window [3, h, w] of every JPEG; None for those that are refused.

    JPEGs that are too large together are decoded in halves, and so are those of which one was refused.
    """
    data, crops = [jpeg for jpeg, _ in jpegs], [crop for _, crop in jpegs]
    if not jpegs:
        return []
    if len(jpegs) == 1 or sum(crop.pixels for crop in crops) <= DECODED_AT_ONCE:
        try:
            decoded = decode(data)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError:
            if len(jpegs) == 1:
                return [None]
        else:
            return _cut_out(decoded, crops, size)
    halves = jpegs[: len(jpegs) // 2], jpegs[len(jpegs) // 2 :]
    return [window for half in halves for window in decode_windows(half, size, decode)]


def _cut_out(decoded: list[Tensor], crops: list[ScaledCrop], size: tuple[int, int]) -> list[Tensor | None]:
    """The windows of decoded images; None for an image of another size than its header says."""
    pairs = enumerate(zip(decoded, crops, strict=True))
    images = {index: image for index, (image, crop) in pairs if image.shape == (3, *crop.whole)}
    if not images:
        return [None] * len(crops)
    _scale(images, crops)
    cut = []
    for index, image in images.items():
        top, left = crops[index].corner
        cut.append(image[:, top : top + size[0], left : left + size[1]])
    stacked = torch.stack(cut)
    mirrored = send_to_device(torch.tensor([crops[index].mirrored for index in images]), stacked.device)
    rows = dict(zip(images, torch.where(mirrored[:, None, None, None], stacked.flip(3), stacked), strict=True))
    return [rows.get(index) for index in range(len(crops))]


def _scale(images: dict[int, Tensor], crops: list[ScaledCrop]) -> None:
    """Bring images to their scale, in place: those of one size together, as photographs of a set often are."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index in images:
        if crops[index].scaled != crops[index].whole:
            alike[tuple(crops[index].whole)].append(index)  # torch makes lists of tuples that it pins
    for members in alike.values():
        at_once = max(1, SCALED_AT_ONCE // crops[members[0]].pixels)
        for first in range(0, len(members), at_once):
            some = members[first : first + at_once]
            pixels, to = torch.stack([images[index] for index in some]).float(), crops[some[0]].scaled
            pixels = functional.interpolate(pixels, to, mode="bilinear", antialias=True)
            images.update(zip(some, pixels.round_().to(torch.uint8), strict=True))
