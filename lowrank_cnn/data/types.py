"""The types of every source: a `Data` of two splits, `Problems` found while reading, and fingerprints."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError, option
from lowrank_cnn.core.text import counted, first_few

Size = tuple[int, ...]
"""(channels, height, width) of an image, (channels, depth, height, width) of a volume."""
Bad = Literal["skip", "refuse"]
_NAMED = 5


class Problems:
    """Bad images and labels, counted by kind (a noun); the first few of each kind are named."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], None] = {}

    def add(self, kind: str, where: str) -> None:
        """Count one problem; an image that is read again in a later epoch counts once."""
        self._seen[kind, where] = None

    def add_all(self, found: Iterable[tuple[str, str]]) -> None:
        """Count several problems, each as (kind, where)."""
        for kind, where in found:  # a worker sends lists
            self.add(kind, where)

    @property
    def found(self) -> list[tuple[str, str]]:
        """Every problem as (kind, where), in a fixed order."""
        return sorted(self._seen)

    @property
    def total(self) -> int:
        """The number of problems of all kinds."""
        return len(self._seen)

    @property
    def counts(self) -> dict[str, int]:
        """The number of problems of each kind."""
        return dict(Counter(kind for kind, _ in self._seen))

    @property
    def examples(self) -> dict[str, list[str]]:
        """The first few problems of each kind."""
        return {kind: [where for known, where in self._seen if known == kind][:_NAMED] for kind in self.counts}

    def __bool__(self) -> bool:
        return self.total > 0

    def __str__(self) -> str:
        examples = self.examples
        shown = [
            f"{counted(count, kind)} ({', '.join(examples[kind])}{', ...' if count > len(examples[kind]) else ''})"
            for kind, count in sorted(self.counts.items())
        ]
        return "; ".join(shown) or "none"

    def refuse(self) -> None:
        """Raise if there is any problem, naming the first of each kind."""
        if self:
            raise LowRankError(f"the data has bad images: {self} ({option('bad', 'skip')} leaves them out).")


class Split:
    """Images with labels: held decoded in memory, streamed from shards and folders, or a user's own Dataset."""

    size: Size | None
    """The size of an image or a volume; None if they differ."""
    channels: int
    """1 for grey images, 3 for colour."""
    labels: Tensor
    """One class number per image, int64 on the CPU."""
    problems: Problems
    """The problems of the images that were read so far."""
    fingerprint: str
    """The identity of the images and labels, without decoding an image."""

    def __len__(self) -> int:
        return len(self.labels)

    def contents(self) -> dict[str, Tensor]:
        """For a checkpoint: stamps and digests that tell whether images were changed since; may be empty."""
        return {}

    def changed(self, before: Mapping[str, Tensor]) -> tuple[list[str], int]:
        """The images that have other contents than before, and how many cannot be compared."""
        return [], 0

    def subset(self, index: Tensor) -> Split:
        """The images at these positions."""
        raise NotImplementedError

    def describe(self, index: int) -> str:
        """The file or row of the image at this position."""
        raise NotImplementedError

    def picture(self, index: int) -> Tensor | None:
        """The image at this position as uint8 [C, H, W]; None if the user's own code has prepared it."""
        return None

    def pixels(self) -> Iterator[Tensor]:
        """uint8 images in chunks [n, C, H, W]: all that are in memory, or a sample of a streamed set."""
        raise NotImplementedError


@dataclass(frozen=True)
class Data:
    """A named set of images: its classes, the images to train on and those to test on.

    `details` go into the record of a run: `val_split` is the share of images held out for testing, and `sized_by`
    says that images were resized to the network's own size. A set with several splits to test on has
    `tested_split` and `unused_splits`.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    details: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:  # without numbers of images: to count them, bad ones are looked for first
        return f"{self.name}, {counted(len(self.classes), 'class')} ({first_few(self.classes)})"

    @cached_property
    def digest(self) -> str:
        """The identity of the set: its classes and the fingerprints of both splits.

        It does not depend on the folder's place or name, or on the image size; it does on `limit` and `holdout`.
        """
        return fingerprint_of_parts("data", *self.classes, self.train.fingerprint, self.test.fingerprint)

    def check_labels(self, *, only_test: bool = False) -> None:
        """Refuse labels that name no class: a GPU would fail without saying which."""
        for name, split in (("test", self.test), ("training", self.train))[: 1 if only_test else 2]:
            check_class_numbers(split.labels, len(self.classes), f"{self.name} has a {name} image")

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


@dataclass(frozen=True)
class Decoded:
    """Images as uint8 [n, C, H, W], their labels, the problems found, and the name of each image."""

    images: Tensor
    labels: Tensor
    problems: Problems = field(default_factory=Problems)
    describe: Callable[[int], str] = "image {}".format


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


def check_class_numbers(labels: Tensor, classes: int, what: str) -> None:
    """Refuse a label that names no class; `what` begins the sentence."""
    for wrong in labels[(labels < 0) | (labels >= classes)][:1].tolist():
        raise LowRankError(
            f"{what} of class number {wrong}, and {counted(classes, 'class')}, numbered from 0 to {classes - 1}."
        )


def generator(*keys: int | str) -> torch.Generator:
    """A CPU generator seeded by all keys together, so that streams of neighbouring seeds do not overlap."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def rank_range(n: int, rank: int, world: int) -> tuple[int, int]:
    """The stretch of n things that is one process's, or one worker's: together they are all, each once."""
    return n * rank // world, n * (rank + 1) // world


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
    rest = torch.ones(len(labels), dtype=torch.bool).index_fill(0, chosen, False)
    return rest.nonzero()[:, 0], chosen


def places_by_name(theirs: Sequence[str], ours: Sequence[str]) -> list[int | None]:
    """The place of each of their classes among ours; None for one that we do not have.

    Classes of one name, as ILSVRC's two cranes, are matched in their order.

    >>> places_by_name(["crane", "dog", "crane"], ["crane", "cat", "crane", "dog"])
    [0, 3, 2]
    """
    places: dict[str, deque[int]] = defaultdict(deque)
    for place, name in enumerate(ours):
        places[name].append(place)
    return [places[name].popleft() if places[name] else None for name in theirs]


def fingerprint_of_parts(*parts: str) -> str:
    """One fingerprint from several texts, in their order."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little") + part.encode(errors="surrogateescape"))
    return hashed.hexdigest()[:32]


def hash_of(tensor: Tensor) -> str:
    """SHA-256 of the values of a tensor."""
    return hashlib.sha256(tensor.cpu().contiguous().numpy().data).hexdigest()


def digest_of(data: Any) -> int:
    """63 bits of a hash of some bytes, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 or 1


def evenly_spaced(n: int, most: int) -> Iterable[int]:
    """At most this many positions of 0 to n - 1, the first and the last among them."""
    if n <= most:
        return range(n)
    return (place * (n - 1) // (most - 1) for place in range(most))
