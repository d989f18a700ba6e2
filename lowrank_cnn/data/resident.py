"""Sets that fit the memory: decoded once, held on the device, an epoch permuted and augmented in one pass.

Small sets are held as the network sees them, preprocessed. Larger ones are held as bytes, and preprocessed after
each crop, which gives the same batches: ILSVRC at 160 pixels is 98 GB as bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, check_number
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted
from lowrank_cnn.data.augment import (
    Augment,
    ByteScale,
    alternating,
    apply_moves,
    centre_crop,
    draw_moves,
    resize_shorter,
    scaled,
    send_to_device,
)
from lowrank_cnn.data.preprocess import Preprocess, Standardize
from lowrank_cnn.data.store import ImageStore
from lowrank_cnn.data.types import (
    Decoded,
    Problems,
    Size,
    Split,
    check_labels,
    digest_of,
    evenly_spaced,
    fingerprint_of_parts,
    generator,
    hash_of,
    rank_range,
)

MOST_PREPARED_BYTES = 2**32
"""Sets that would take more as floats are held as bytes."""
_CHUNK_BYTES = 2**29
_PREPARE_IMAGES = 4096
_SAMPLED = 256  # images of a fingerprint
_MOST_WORKERS = 1024  # more would bring the machine down


@dataclass(eq=False, repr=False)
class ResidentSplit(Split):
    """A split in memory, decoded when it is first used: evaluating never decodes the training set."""

    decode: Callable[[], Decoded]
    size: Size
    identify: Callable[[], str] | None = None
    store: ImageStore | None = None

    @classmethod
    def of(cls, images: Any, labels: Any, problems: Problems | None = None) -> ResidentSplit:
        """A split of tensors or arrays: uint8 images [n, C, H, W] and whole numbers [n] as labels.

        >>> split = ResidentSplit.of(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> len(split), split.size
        (2, (3, 8, 8))
        """
        images, labels = (
            torch.as_tensor(given) if hasattr(given, "__array_interface__") else given
            for given in (images, labels)
        )
        if not isinstance(images, Tensor):
            kind = type(images).__name__
            raise LowRankError(
                f"images are one uint8 tensor or array [n, C, H, W], not a {kind}: use torch.stack."
            )
        shape = list(images.shape)
        if images.dtype != torch.uint8 or len(shape) != 4:
            raise LowRankError(f"images are uint8 [n, C, H, W], not {images.dtype} {shape}.")
        if shape[1] > 4 >= shape[3]:
            raise LowRankError(
                f"images are [n, C, H, W]; {shape} looks like [n, H, W, C]: use .permute(0, 3, 1, 2)."
            )
        check_labels(labels)
        if len(images) != len(labels):
            raise LowRankError(f"{counted(len(images), 'image')} cannot have {counted(len(labels), 'label')}.")
        decoded = Decoded(images, labels.long(), problems or Problems())
        return cls(lambda: decoded, tuple(shape[1:]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Decoded images and labels, for another process; as arrays, since shared memory can be scarce."""
        arrays = self.images.numpy(), self.labels.numpy()
        return _unpickled, (*arrays, self.problems, self.fingerprint)

    @property
    def fingerprint(self) -> str:
        """From the files if there are any, else from the pixels."""
        if self.identify:
            return self.identify()
        some = self.images[torch.tensor([*evenly_spaced(len(self), _SAMPLED)], dtype=torch.int64)]
        return fingerprint_of_parts("tensors", str(tuple(self.images.shape)), hash_of(self.labels), hash_of(some))

    def contents(self) -> dict[str, Tensor]:
        _ = self._decoded  # takes the digests of all images
        return self.store.contents() if self.store else {"pixels": self._pixels}

    def changed(self, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
        if self.store is None or "pixels" in before:  # a set sent to another process has no files any more
            same = self.store or "pixels" not in before or before["pixels"].equal(self._pixels)
            return [] if same else ["some images"], 0
        return self.store.changed(self.contents()["digests"].nonzero()[:, 0], before)

    @cached_property
    def _pixels(self) -> Tensor:
        """One digest of all images, as a tensor of one number."""
        return torch.tensor([digest_of(self.images.cpu().contiguous().numpy().data)])

    @cached_property
    def _decoded(self) -> Decoded:
        return self.decode()

    @property
    def images(self) -> Tensor:
        return self._decoded.images

    @property
    def labels(self) -> Tensor:
        return self._decoded.labels

    @property
    def problems(self) -> Problems:
        return self._decoded.problems

    @property
    def channels(self) -> int:
        return self.size[0]

    def describe(self, index: int) -> str:
        return self._decoded.describe(index)

    def picture(self, index: int) -> Tensor:
        return self.images[index]

    def pixels(self) -> Iterator[Tensor]:
        return iter(self.images.split(_PREPARE_IMAGES))

    def subset(self, index: Tensor) -> ResidentSplit:
        def chosen() -> Decoded:
            images, labels = self.images[index], self.labels[index]
            return Decoded(images, labels, self.problems, lambda place: self.describe(int(index[place])))

        def identify() -> str:
            return fingerprint_of_parts("subset", self.fingerprint, hash_of(index))

        return ResidentSplit(chosen, self.size, identify, self.store)


def _unpickled(images: Any, labels: Any, problems: Problems, fingerprint: str) -> ResidentSplit:
    return replace(ResidentSplit.of(images, labels, problems), identify=lambda: fingerprint)


@dataclass(eq=False, repr=False)
class Loader(ABC):
    """Batches as a pure function of (seed, epoch): resuming at (epoch, batch) needs no generator state.

    Training drops the last partial batch. Evaluation keeps it; a rank that has no image of it yields one batch
    fewer, so sum figures over ranks after the last batch, and not batch by batch. `make_loader` explains the
    options.
    """

    split: Any
    _: KW_ONLY
    batch_size: int
    preprocess: Preprocess | None
    augment: Augment
    seed: int
    device: torch.device | str
    rank: int = 0
    world: int = 1
    train: bool
    dtype: torch.dtype = torch.float32
    channels_last: bool = True
    workers: int = 0

    def __post_init__(self) -> None:
        check_number("workers", self.workers, least=0, most=_MOST_WORKERS, whole=True)
        if self.augment.alternate and self.train and not isinstance(self.split, ResidentSplit):
            raise LowRankError("alternate_mirror is for sets that are held in memory: set alternate_mirror=false.")
        images, batch = len(self.split), self.batch_size
        if batch < 1 or not 0 <= self.rank < self.world:
            raise LowRankError(f"no batches of {counted(batch, 'image')} for rank {self.rank} of {self.world}.")
        if batch % self.world:
            raise LowRankError(f"the global batch of {batch} does not divide over {self.world} processes.")
        if images < (batch if self.train else 1):
            raise LowRankError(f"{counted(images, 'image')} cannot fill one batch of {batch}.")
        self._batches = images // batch if self.train else ceil_div(images, batch)
        self._device = torch.device(self.device)
        preprocess = self.preprocess
        if preprocess is None:  # pixels as 0 to 1
            channels = self.split.channels
            preprocess = Standardize(torch.zeros(channels), torch.full((channels,), 255.0))
        self._prepare = preprocess.to(self._device)

    def __len__(self) -> int:
        """Batches per epoch."""
        return self._batches

    @abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """This rank's part of each global batch from `start` on, as (images, labels) on the device."""

    def _batch(self, images: Tensor) -> Tensor:
        """Images [n, C, h, w] in the layout that was chosen."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=layout)


@dataclass(eq=False, repr=False)
class ResidentLoader(Loader):
    """Batches of a resident split: the same global batches for every device and number of processes."""

    split: ResidentSplit

    def __post_init__(self) -> None:
        super().__post_init__()
        split, augment = self.split, self.augment
        self._window = augment.window(*split.size[1:], train=self.train)
        self._pad = augment.pad if self.train else 0
        # A large set is held as bytes if its pixels are preprocessed one by one.
        large = len(split) * prod(split.size) * self.dtype.itemsize > MOST_PREPARED_BYTES
        self._scale = None
        if large and isinstance(self._prepare, Standardize) and augment.resize is None:
            self._prepare.check(split.channels)
            self._scale = ByteScale(self._prepare.mean, self._prepare.std, self._pad, self.dtype)
        self._images = self._hold(split.images)
        self._labels = split.labels.to(self._device)

    @torch.no_grad()
    def _hold(self, images: Tensor) -> Tensor:
        """All images as [N, H, W, C] on the device, padded for training or cropped for evaluation."""
        pad = self._pad
        height, width = scaled(images.shape[2], images.shape[3], self.augment.resize)
        inner = (height, width) if self.train else self._window
        shape = (len(images), inner[0] + 2 * pad, inner[1] + 2 * pad, images.shape[1])
        dtype = torch.uint8 if self._scale else self.dtype
        held = torch.zeros(shape, dtype=dtype, device=self._device)
        for first in range(0, len(images), _PREPARE_IMAGES):
            part = slice(first, first + _PREPARE_IMAGES)
            done = images[part].to(self._device)
            if not self._scale:
                done = resize_shorter(self._prepare(done), self.augment.resize)
            held[part, pad : pad + inner[0], pad : pad + inner[1]] = centre_crop(done, inner).permute(0, 2, 3, 1)
        return held

    def _in_order(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(start * self.batch_size, len(self._labels), self.batch_size):
            count = min(self.batch_size, len(self._labels) - first)
            begin, end = rank_range(count, self.rank, self.world)
            if end > begin:
                mine = slice(first + begin, first + end)
                images = self._images[mine]
                images = self._scale(images) if self._scale else images
                yield self._batch(images.permute(0, 3, 1, 2)), self._labels[mine]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.train:
            yield from self._in_order(start)
            return
        draw = generator("epoch", self.seed, epoch)
        padded = (self._images.shape[1], self._images.shape[2])
        order = torch.randperm(len(self._labels), generator=draw)
        moves = draw_moves(len(order), padded=padded, window=self._window, mirror=self.augment.mirror, draw=draw)
        if self.augment.alternate:
            moves[2] = alternating(order, images=len(order), seed=self.seed, epoch=epoch)
        # The places in the epoch's order that this rank sees, from batch `start` on.
        mine = torch.arange(self._batches * self.batch_size).view(self._batches, self.world, -1)
        mine = mine[start:, self.rank].reshape(-1)
        rows, moves = (send_to_device(drawn, self._device) for drawn in (order[mine], moves[:, mine]))
        options = {"window": self._window, "cutout": self.augment.cutout, "scale": self._scale}
        # A pass takes whole batches, and the whole epoch if it is small.
        local = self.batch_size // self.world
        per_batch = prod(self._window) * self._images.shape[3] * self.dtype.itemsize * local
        chunk = max(1, _CHUNK_BYTES // per_batch) * local
        for first in range(0, len(rows), chunk):
            part = slice(first, first + chunk)
            images = apply_moves(self._images, rows[part], moves[:, part], **options)
            labels = self._labels[rows[part]]
            yield from zip(self._batch(images.permute(0, 3, 1, 2)).split(local), labels.split(local), strict=True)
