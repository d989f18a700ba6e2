"""The types of every source: a `Data` of two splits, and the `Problems` found while reading them."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.files import open_regular
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted

MOST_SIZES = 2**16
"""File sizes are read for this many files at most: each costs a request to a network file system."""
SAMPLED_FILES = 64
SAMPLED_IMAGES = 256
_PIECE = 2**14


def fingerprint_of_parts(*parts: str) -> str:
    """One fingerprint from several texts, in their order."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part.encode(errors="surrogateescape"))
    return hashed.hexdigest()[:32]


def fingerprint_of_files(root: Path, files: Sequence[str | Path]) -> str:
    """From the names below `root`, the sizes, and pieces of some of the files: cheap on a million files.

    A copy of a set in another place, with other dates, has the same fingerprint. As content is only sampled, a run
    that continues compares `Contents` as well.
    """
    names = [os.path.relpath(file, root) for file in files]
    sizes = [_state(files[index])[0] for index in evenly_spaced(len(files), MOST_SIZES)]
    pieces = [_pieces(files[index]) for index in evenly_spaced(len(files), SAMPLED_FILES)]
    return fingerprint_of_parts("files", "\0".join(names), str(sizes), *pieces)


def version_of_files(files: Sequence[str | Path]) -> str:
    """From the places, sizes and times of change of all files: it tells when any of them was written again."""
    return fingerprint_of_parts("version", *(f"{Path(file).absolute()}/{_state(file)}" for file in files))


class Contents:
    """The size and time of each file, and a digest of each image once it is read: 8 bytes a file, 8 an image.

    `digests` are 0 for images that were not read yet. `fresh` are those that this process took since `take`.
    """

    def __init__(self, files: Sequence[str | Path], images: int) -> None:
        self.files = files
        self.digests = torch.zeros(images, dtype=torch.int64)
        self.fresh: dict[int, int] = {}

    @cached_property
    def stamps(self) -> Tensor:
        """The size and time of each file as one number, as they are when they are first asked for."""
        return torch.tensor([_stamp(file) for file in self.files], dtype=torch.int64)

    def to_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"stamps": self.stamps, "digests": self.digests}

    def look(self, row: int, file: int, data: bytes) -> None:
        """Take the digest of an image that is read for the first time, or whose file was written since."""
        # The time is that after reading: with a time before, new contents could pass for old ones.
        if not self.digests[row] or _stamp(self.files[file]) != self.stamps[file]:
            self.fresh[row] = digest_of(data)

    def take(self) -> dict[int, int]:
        """The digests that `look` took since the last call."""
        taken, self.fresh = self.fresh, {}
        return taken


def digest_of(data: Any) -> int:
    """63 bits of a hash of some bytes, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 or 1


def digest_of_pixels(images: Tensor) -> Tensor:
    """One digest of all images, as a tensor of one number."""
    return torch.tensor([digest_of(images.cpu().contiguous().numpy().data)])


def fingerprint_of_tensors(images: Tensor, labels: Tensor) -> str:
    """From the shape, all labels, and some of the images."""
    some = images[torch.tensor(list(evenly_spaced(len(images), SAMPLED_IMAGES)), dtype=torch.int64)]
    return fingerprint_of_parts("tensors", str(tuple(images.shape)), _hashed(labels), _hashed(some))


def fingerprint_of_subset(whole: str, index: Tensor) -> str:
    """Of the images at these positions of a set with this fingerprint."""
    return fingerprint_of_parts("subset", whole, _hashed(index))


def evenly_spaced(n: int, most: int) -> Iterable[int]:
    """At most this many positions of 0 to n - 1, the first and the last among them."""
    if n <= most:
        return range(n)
    return (place * (n - 1) // (most - 1) for place in range(most))


def _hashed(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().data).hexdigest()


def _stamp(path: str | Path) -> int:
    """The file's size and time of change as one number."""
    return hash(_state(path))  # of whole numbers, so it is the same in every process


def _state(path: str | Path) -> tuple[int, int]:
    """The file's size and time of change; -1 if it cannot be read, which decoding reports."""
    try:
        found = os.stat(path)  # noqa: PTH116  a Path for each of a million files takes longer than the look
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _pieces(path: str | Path) -> str:
    """A digest of the beginning, the middle and the end of a file."""
    hashed = hashlib.sha256()
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for start in (0, size // 2, max(0, size - _PIECE)):
                file.seek(start)
                hashed.update(file.read(_PIECE))
    except OSError:
        return "unreadable"
    return hashed.hexdigest()


Size = tuple[int, int, int]
Bad = Literal["skip", "refuse"]
Decode = Literal["cpu", "gpu"]
_NAMED = 5
_MOST_WORKERS = 1024


@dataclass
class Problems:
    """Bad images and labels, counted by kind (a noun); the first few of each kind are named."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    _seen: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)

    def add(self, kind: str, where: str) -> None:
        """Count one problem; an image that is read again in a later epoch counts once."""
        if (kind, where) in self._seen:
            return
        self._seen.add((kind, where))
        self.counts[kind] = self.counts.get(kind, 0) + 1
        named = self.examples.setdefault(kind, [])
        if len(named) < _NAMED:
            named.append(where)

    def add_all(self, found: Iterable[tuple[str, str]]) -> None:
        """Count several problems, each as (kind, where)."""
        for kind, where in found:
            self.add(kind, where)

    @property
    def found(self) -> list[tuple[str, str]]:
        """Every problem as (kind, where), in a fixed order."""
        return sorted(self._seen)

    @property
    def total(self) -> int:
        """Problems of all kinds."""
        return sum(self.counts.values())

    def __bool__(self) -> bool:
        return self.total > 0

    def __str__(self) -> str:
        return "; ".join(self._line(kind) for kind in sorted(self.counts)) or "none"

    def _line(self, kind: str) -> str:
        count, named = self.counts[kind], self.examples[kind]
        more = ", ..." if count > len(named) else ""
        return f"{counted(count, kind)} ({', '.join(named)}{more})"

    def refuse(self) -> None:
        """Raise if there is any problem, naming the first of each kind."""
        if self:
            raise LowRankError(f"the data has bad images: {self} (bad='skip', or --bad skip, leaves them out).")


class Split(Protocol):
    """Images with labels: held decoded in memory, or streamed from shards and folders."""

    @property
    def size(self) -> Size | None:
        """(channels, height, width), or None if the images differ in size."""
        ...

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        ...

    @property
    def labels(self) -> Tensor:
        """One class number per image, int64 on the CPU."""
        ...

    @property
    def problems(self) -> Problems:
        """The problems of the images that were read so far."""
        ...

    @property
    def fingerprint(self) -> str:
        """The identity of the images and labels (`data.fingerprint`), without decoding an image."""
        ...

    def contents(self) -> dict[str, Tensor]:
        """For a checkpoint: stamps and digests that tell whether images were changed since; may be empty."""
        ...

    def changed(self, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
        """The images that have other contents than before, and the number of those of which nobody can tell."""
        ...

    def __len__(self) -> int: ...

    def subset(self, index: Tensor) -> Split:
        """The images at these positions."""
        ...

    def describe(self, index: int) -> str:
        """The file or row of the image at this position."""
        ...

    def picture(self, index: int) -> Tensor | None:
        """The image at this position as uint8 [C, H, W]; None if the user's own code has prepared it."""
        ...

    def pixels(self) -> Iterator[Tensor]:
        """uint8 images in chunks [n, C, H, W]: all that are in memory, or a sample of a streamed set."""
        ...


@dataclass(frozen=True)
class Data:
    """A named set of images: its classes, what to train on and what to test on.

    `details` are for the record of a run: the share of images held out for testing (`val_split`), whether images
    were resized to the network's own size (`sized_by`), and of sets with both test and validation images the split
    that is tested on (`tested_split`) and the others (`unused_splits`).
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    details: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """The identity of the set: its classes and the fingerprints of both splits.

        It does not depend on the folder's place or name, or on the image size; it does on `limit` and `holdout`.
        """
        return fingerprint_of_parts("data", *self.classes, self.train.fingerprint, self.test.fingerprint)

    def check_labels(self, *, only_test: bool = False) -> None:
        """Refuse labels that name no class: a GPU would fail without saying which."""
        for name, split in (("test", self.test), ("training", self.train))[: 1 if only_test else 2]:
            highest = int(split.labels.max()) if len(split) else 0
            if highest >= len(self.classes):
                raise LowRankError(
                    f"{self.name} has a {name} image of class number {highest}, and "
                    f"{counted(len(self.classes), 'class')}, numbered from 0 to {len(self.classes) - 1}."
                )

    def holdout(self, n: int, seed: int) -> Data:
        """Take n training images, class by class in proportion, as the test set of a new `Data`.

        Decisions are made on these images; the real test set is used once, at the end.
        """
        if not 0 < n < len(self.train):
            raise LowRankError(
                f"cannot hold out {n} of the {counted(len(self.train), 'training image')} of {self.name}."
            )
        rest, chosen = split_off(self.train.labels, n, seed=seed)
        return replace(self, train=self.train.subset(rest), test=self.train.subset(chosen))


class Loader(Protocol):
    """Batches as a pure function of (seed, epoch): resuming at (epoch, batch) needs no generator state.

    Training drops the last partial batch. Evaluation keeps it; a rank that has no image of it yields one
    batch fewer, so figures are to be summed over ranks after the last batch, not batch by batch.
    """

    def __len__(self) -> int:
        """Batches per epoch."""
        ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each global batch from `start` on, as (images, labels) on the device."""
        ...


def generator(*keys: int | str) -> torch.Generator:
    """A CPU generator seeded by all keys together, so that streams of neighbouring seeds do not overlap."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def stratified(labels: Tensor, n: int, *, seed: int) -> Tensor:
    """Sorted positions of at most n labels, each class in proportion to its size to within one image."""
    n = min(n, len(labels))
    shuffled = torch.randperm(len(labels), generator=generator("stratified", seed))
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    _, sizes = torch.unique_consecutive(labels[by_class], return_counts=True)
    taken = sizes * n // max(1, len(labels))
    largest_remainder = torch.argsort(sizes * n % max(1, len(labels)), descending=True, stable=True)
    taken[largest_remainder[: n - int(taken.sum())]] += 1
    place_in_class = torch.arange(len(labels)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return by_class[place_in_class < torch.repeat_interleave(taken, sizes)].sort().values


def split_off(labels: Tensor, n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """The positions of the other labels and of n chosen ones, each class in proportion."""
    chosen = stratified(labels, n, seed=seed)
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[chosen] = False
    return rest.nonzero()[:, 0], chosen


def places_by_name(theirs: Sequence[str], ours: Sequence[str]) -> list[int | None]:
    """The place of each of their classes among ours; None for one that we do not have.

    Classes of one name, as ILSVRC's two cranes, are matched in their order.

    >>> places_by_name(["crane", "dog", "crane"], ["crane", "cat", "crane", "dog"])
    [0, 3, 2]
    """
    known = {name: place for place, name in enumerate(_told_apart(ours))}
    return [known.get(name) for name in _told_apart(theirs)]


def _told_apart(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name with the number of times that it came before."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def rank_range(n: int, rank: int, world: int) -> tuple[int, int]:
    """The stretch of n things that is one process's, or one worker's: together they are all, each once."""
    return n * rank // world, n * (rank + 1) // world


def check_workers(workers: int) -> None:
    """Refuse a number of processes that cannot be meant: thousands would bring the machine down."""
    if not 0 <= workers <= _MOST_WORKERS:
        raise LowRankError(f"workers are 0 or more processes, up to {_MOST_WORKERS}, not {workers}.")


def check_batches(images: int, *, batch_size: int, rank: int, world: int, train: bool) -> int:
    """The number of batches per epoch; refuses settings that give none."""
    if batch_size < 1 or not 0 <= rank < world:
        raise LowRankError(f"no batches of {counted(batch_size, 'image')} for rank {rank} of {world}.")
    if batch_size % world:
        raise LowRankError(f"the global batch of {batch_size} does not divide over {world} processes.")
    if images < (batch_size if train else 1):
        raise LowRankError(f"{counted(images, 'image')} cannot fill one batch of {batch_size}.")
    return images // batch_size if train else ceil_div(images, batch_size)


_MOST_CHANNELS = 4


@dataclass(frozen=True)
class Decoded:
    """Images as uint8 [n, C, H, W], their labels, and the problems found."""

    images: Tensor
    labels: Tensor
    problems: Problems = field(default_factory=Problems)
    describe: Callable[[int], str] = "image {}".format

    def __post_init__(self) -> None:
        check_uint8_images(self.images)
        check_labels(self.labels)
        if len(self.images) != len(self.labels):
            raise LowRankError(
                f"{counted(len(self.images), 'image')} cannot have {counted(len(self.labels), 'label')}."
            )


def check_uint8_images(images: object) -> None:
    """Refuse what is not a tensor of uint8 [n, C, H, W]."""
    if not isinstance(images, Tensor):
        raise LowRankError(
            f"images are one uint8 tensor or array [n, C, H, W], not a {type(images).__name__}: use torch.stack."
        )
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise LowRankError(f"images are uint8 [n, C, H, W], not {images.dtype} {list(images.shape)}.")
    if images.shape[1] > _MOST_CHANNELS >= images.shape[3]:
        raise LowRankError(
            f"images are [n, C, H, W]; {list(images.shape)} looks like [n, H, W, C]: use .permute(0, 3, 1, 2)."
        )


def check_labels(labels: object) -> None:
    """Refuse what is not one whole number per image."""
    if not isinstance(labels, Tensor):
        raise LowRankError(f"labels are one tensor of class numbers [n], not a {type(labels).__name__}.")
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.ndim != 1:
        raise LowRankError(
            f"labels are whole class numbers [n], such as int64, not {labels.dtype} {list(labels.shape)}."
        )
    if len(labels) and int(labels.min()) < 0:
        raise LowRankError(f"labels are class numbers from 0 on, not {int(labels.min())}.")
