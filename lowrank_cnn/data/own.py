"""A user's own data: any torch Dataset or DataLoader, whose items are already prepared, and its batches.

Volumes [C, D, H, W] come this way, too: those in bytes are standardized, all else is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lowrank_cnn.core.errors import LowRankError, setting
from lowrank_cnn.data.augment import send_to_device
from lowrank_cnn.data.resident import MOST_PREPARED_BYTES, Loader
from lowrank_cnn.data.streamed import loaded
from lowrank_cnn.data.types import (
    Data,
    Problems,
    Size,
    Split,
    check_class_numbers,
    check_labels,
    evenly_spaced,
    fingerprint_of_parts,
    generator,
)

_SAMPLED, _SAMPLED_VOLUMES = 8, 1024


@dataclass(frozen=True, eq=False)
class DatasetSplit(Split):
    """A Dataset whose items are (input, target), batched as its DataLoader would, or by torch's default.

    An input is a tensor; or a tuple or dictionary of them, for networks that take several.
    """

    dataset: Dataset
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    own_loader: DataLoader | None = None
    problems: Problems = field(default_factory=Problems)
    classes: int | None = None
    """How many classes there are, where targets are class numbers; None for another task."""

    @property
    def size(self) -> Size | None:
        """The shape of one input, a tensor [C, H, W] or [C, D, H, W]; None where there are several inputs."""
        if not len(self):
            raise LowRankError("the data set has no items.")
        first = self.dataset[0]
        pair = isinstance(first, tuple | list) and (len(first) == 2 or (self.collate is not None and first))
        shape = tuple(getattr(first[0], "shape", ())) if pair else ()
        image = len(shape) == 3 or (len(shape) == 4 and self.collate is None)
        plain = image and len(first) == 2  # the user's collation is then not called for this
        if not plain and self._inputs(first) is not None:
            return None
        if len(shape) not in (3, 4):
            raise LowRankError(
                "the data set needs items (image, target) with a tensor [C, H, W] as image, [C, D, H, W] as a "
                f"volume, or a tuple or dictionary of tensors, not {in_short(first)}: a transform such as "
                "ToTensor turns a picture into a tensor, and other inputs need a training loop of your own."
            )
        return shape

    @property
    def in_bytes(self) -> bool:
        """Whether these are volumes of uint8, which the recipe's preprocessing standardizes."""
        volumes = self.collate is None and self.own_loader is None and len(self.size or ()) == 4
        return volumes and torch.as_tensor(self.dataset[0][0]).dtype == torch.uint8

    @property
    def example(self) -> Any:
        """The inputs of the first item as a batch: a tuple, or a dictionary by keyword; None for one image."""
        return None if self.size else self._inputs(self.dataset[0])

    def _inputs(self, item: Any) -> Any:
        """Several inputs of a batch of one item; None where it has no tuple or dictionary of tensors."""
        if self.collate is None and not (isinstance(item, tuple | list) and len(item) == 2):
            return None
        try:
            found = (self.collate or stacked)([item])[0]
        except Exception:  # the batches that are trained on tell more
            return None
        found = tuple(found) if isinstance(found, list) else found
        parts = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else ()
        return found if parts and all(isinstance(part, Tensor) for part in parts) else None

    @property
    def channels(self) -> int:
        return self.size[0] if self.size else 0

    @property
    def labels(self) -> Tensor:
        """The class numbers where the data set lists them, else zeros: reading all items may take long."""
        found = None if self.classes is None else listed_labels(self.dataset)
        return torch.zeros(len(self), dtype=torch.int64) if found is None else found

    def for_classes(self, classes: int) -> DatasetSplit:
        """The same for cross-entropy: the first item is checked here, class numbers when a batch is read."""
        found, size = replace(self, classes=classes), self.size
        if self.collate is None:  # a collation of the user's own may make such batches of other items
            image, target = self.dataset[0]
            if size and (kind := torch.as_tensor(image).dtype) != torch.float32 and not self.in_bytes:
                raise LowRankError(
                    f"images of your own go to the network as they are, in float32, not {kind}: image.float() "
                    "converts one, and image.float() / 255 pixels."
                )
            number = torch.as_tensor(target) if isinstance(target, int) or hasattr(target, "shape") else None
            if number is None or number.ndim or number.is_floating_point() or number.is_complex():
                raise LowRankError(
                    f"the target of an image is its class number, not {target!r:.60}: take the argmax() of "
                    "one-hot targets, and a loss of your own for another task (fit(..., loss=...))."
                )
        check_labels(found.labels)
        return found

    def class_numbers(self, targets: Any, *, train: bool) -> Any:
        """The targets of a batch as int64; to train on, a collation may make probabilities of classes."""
        if self.classes is None:
            return targets
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else ()
        if shape and targets.is_floating_point() and train and shape[1:] == (self.classes,):
            return targets
        if len(shape) != 1 or targets.is_floating_point():
            raise LowRankError(f"the targets of a batch are class numbers [n], not {in_short(targets)}.")
        numbers = targets.long()
        check_class_numbers(numbers, self.classes, "the data set has an image")
        return numbers

    @property
    def fingerprint(self) -> str:
        """From the class, the length, and a few items: reading all takes long, and they may change at random."""
        some = [repr(_summary(self.dataset[index])) for index in evenly_spaced(len(self), _SAMPLED)]
        return fingerprint_of_parts("dataset", type(self.dataset).__name__, str(len(self)), *some)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def subset(self, index: Tensor) -> DatasetSplit:
        if self.own_loader is not None:
            raise LowRankError(
                "images cannot be held out where a DataLoader has a sampler of its own, which chooses them: set "
                f"{setting('holdout', 0)}, or give a Dataset."
            )
        return replace(self, dataset=Subset(self.dataset, index.tolist()))

    def describe(self, index: int) -> str:
        return f"item {index}"

    def pixels(self) -> Iterator[Tensor]:
        if not self.in_bytes:
            raise LowRankError("a data set of your own is prepared by your code: there is nothing to fit to it.")
        for index in evenly_spaced(len(self), _SAMPLED_VOLUMES):
            yield torch.as_tensor(self.dataset[index][0])[None]


@dataclass(eq=False, repr=False)
class DatasetLoader(Loader):
    """Batches of a user's data set on the device. The order of training is a function of seed and epoch.

    A TensorDataset is held on the device, unless it is large. If the user's DataLoader has a sampler of its own,
    its batches are taken as they come.
    """

    split: DatasetSplit

    def __post_init__(self) -> None:
        if self.world > 1:
            raise LowRankError("a data set of your own is trained on by one process; use open_data for several.")
        super().__post_init__()
        if self.split.own_loader is not None:
            self._batches = len(self.split.own_loader)
        self._bytes, self._held = self.split.in_bytes, None
        usual = self.split.collate is None and self.split.own_loader is None
        tensors = held_tensors(self.split.dataset) if usual else None
        if tensors is not None and sum(tensor.nbytes for tensor in tensors) <= MOST_PREPARED_BYTES:
            targets = self.split.class_numbers(tensors[1], train=self.train)
            self._held = _channels_last(tensors[0]).to(self._device), targets.to(self._device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        def move(value: Any) -> Any:
            return value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value

        def prepared(images: Any) -> Any:
            if isinstance(images, Tensor) and images.ndim == 5 and self._held is None:
                images = _channels_last(images).movedim(-1, 1)
            return self._prepare(images) if self._bytes else images

        if self._held is not None:
            inputs, targets = self._held
            n, draw = len(self.split), generator("dataset", self.seed, epoch)
            torch.empty((), dtype=torch.int64).random_(generator=draw)  # as a DataLoader, for its workers
            order = torch.randperm(n, generator=draw) if self.train else torch.arange(n)
            for rows in send_to_device(order, self._device).split(self.batch_size)[start : len(self)]:
                yield prepared(inputs[rows].movedim(-1, 1)), targets[rows]
            return
        loader = self.split.own_loader
        if loader is None:
            loader = DataLoader(
                self.split.dataset,
                batch_size=self.batch_size,
                shuffle=self.train,
                drop_last=self.train,
                collate_fn=self.split.collate or stacked,
                num_workers=self.workers or self.split.workers,
                pin_memory=self._device.type == "cuda",
                generator=generator("dataset", self.seed, epoch),
            )
        for batch in islice(loaded(loader), start, None):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise LowRankError(f"a batch of a DataLoader is (images, targets), not {in_short(batch)}.")
            images = prepared(tree_map(move, batch[0]))
            yield images, tree_map(move, self.split.class_numbers(batch[1], train=self.train))


def stacked(items: list[Any]) -> Any:
    """A batch as torch's `default_collate` makes it; images of several shapes are refused in a sentence."""
    parts = zip(*(tree_leaves(image) for image, _ in items), strict=False)
    each = (sorted({tuple(getattr(image, "shape", ())) for image in part}) for part in parts)
    if shapes := next((found for found in each if len(found) > 1), []):
        one, other = ("x".join(map(str, shape)) for shape in shapes[:2])
        raise LowRankError(
            f"the data set has images of {one} and of {other}, which make no batch: bring all to one size and "
            "number of channels, or give a DataLoader whose collate_fn does."
        )
    return default_collate(items)


def listed_labels(dataset: Dataset) -> Tensor | None:
    """The class numbers that a data set lists as `targets` or `labels`, without reading items; None without."""
    if isinstance(dataset, Subset):
        found = listed_labels(dataset.dataset)
        return None if found is None else found[torch.as_tensor(dataset.indices)]
    listed = [found for name in ("targets", "labels") if (found := getattr(dataset, name, None)) is not None]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        listed = [dataset.tensors[1]]
    try:
        labels = torch.as_tensor(listed[0])
    except (TypeError, ValueError, RuntimeError, IndexError):  # targets of another task, or none
        return None
    if labels.shape != (len(dataset),) or labels.is_floating_point():  # type: ignore[arg-type]
        return None
    return labels.long().cpu()


def _channels_last(inputs: Tensor) -> Tensor:
    """A copy [n, ..., C]: `contiguous` would leave inputs of one channel with strides of another format."""
    return inputs.movedim(1, -1).clone(memory_format=torch.contiguous_format)


def held_tensors(dataset: Dataset) -> Sequence[Tensor] | None:
    """The inputs and targets of a TensorDataset, or of a part of one; None of another data set."""
    if type(dataset) is Subset:
        whole, index = held_tensors(dataset.dataset), torch.as_tensor(dataset.indices)
        return None if whole is None else [tensor[index] for tensor in whole]
    return dataset.tensors if type(dataset) is TensorDataset and len(dataset.tensors) == 2 else None


def as_dataset(part: Any) -> Any:
    """A TensorDataset of a pair (inputs, targets) of tensors or arrays; anything else as it is."""
    pair = isinstance(part, tuple | list) and len(part) == 2 and all(hasattr(one, "ndim") for one in part)
    if not pair:
        return part
    inputs, targets = map(torch.as_tensor, part)
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise LowRankError(f"inputs and targets are as many, not {in_short(part)}.")
    return TensorDataset(inputs, targets)


def in_short(value: Any) -> str:
    """The type and shape of a value.

    >>> in_short((torch.zeros(3, 8, 8), 1))
    '(Tensor [3, 8, 8], int)'
    """
    if isinstance(value, tuple | list):
        return f"({', '.join([*map(in_short, value[:3]), *(['...'] if len(value) > 3 else [])])})"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {list(shape)}"


def _summary(item: Any) -> Any:
    """A summary of an item for the fingerprint: sums and shapes of tensors, other values as text."""
    if isinstance(item, Tensor):
        return tuple(item.shape), str(item.dtype), float(item.double().sum())
    if isinstance(item, tuple | list):
        return [_summary(part) for part in item]
    if isinstance(item, dict):
        return {key: _summary(part) for key, part in item.items()}
    return f"{item!r:.80}"


def named_classes(dataset: Dataset) -> Sequence[Any]:
    """The names that a data set, or the one that it is a part of, has for its classes; empty if it has none."""
    own: Any = getattr(dataset, "classes", None)
    if own is None and isinstance(dataset, Subset):
        return named_classes(dataset.dataset)
    names = getattr(own, "tolist", lambda: own)()
    return names if isinstance(names, tuple | list) else ()  # some hold the number of classes


def data_of(train: Any, test: Any) -> Data:
    """A `Data` of the user's Datasets or DataLoaders; where there is none to test on, the training one is used."""
    to_train, to_test = _split(train), _tested(train if test is None else test)
    details = {"prepared_by": "user", **({"tested_on": "training images"} if test is None else {})}
    names = tuple(map(str, named_classes(to_train.dataset)))
    return Data(type(to_train.dataset).__name__, names, to_train, to_test, details)


def for_classes(data: Data) -> Data:
    """The user's own data for a task of classes."""
    train, test = (
        split.for_classes(len(data.classes)) if isinstance(split, DatasetSplit) else split
        for split in (data.train, data.test)
    )
    return replace(data, train=train, test=test)


def is_dataset(value: object) -> bool:
    """Whether this is a torch Dataset or DataLoader."""
    return isinstance(value, Dataset | DataLoader)


def loader_batch(value: object) -> int | None:
    """The batch size of a user's DataLoader; None for a Dataset, or where a batch sampler has none."""
    return getattr(value.batch_sampler, "batch_size", None) if isinstance(value, DataLoader) else None


def _split(part: Any) -> DatasetSplit:
    dataset = part.dataset if isinstance(part, DataLoader) else part
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise LowRankError(
            "fit takes a Dataset with a length, whose items are read by number, or a DataLoader of it, not "
            f"{type(part).__name__}: one that can only be iterated needs a training loop of your own."
        )
    if not isinstance(part, DataLoader):
        return DatasetSplit(dataset)
    if part.batch_sampler is None:
        raise LowRankError("the DataLoader makes no batches (batch_size=None): give it a batch_size.")
    try:
        len(part)
    except (TypeError, NotImplementedError) as error:
        raise LowRankError("the sampler of the DataLoader does not say how long an epoch is (__len__).") from error
    collate = None if part.collate_fn is default_collate else part.collate_fn
    own_loader, sampler = part, part.sampler
    if part.batch_size is not None:  # the batches of an epoch have each item once, in any order
        if isinstance(sampler, SubsetRandomSampler):
            dataset, own_loader = Subset(dataset, sorted(sampler.indices)), None
        drawn = isinstance(sampler, RandomSampler) and not sampler.replacement
        if isinstance(sampler, SequentialSampler) or (drawn and sampler.num_samples == len(dataset)):  # type: ignore[arg-type]
            own_loader = None
    return DatasetSplit(dataset, collate, part.num_workers, own_loader)


def _tested(part: Any) -> DatasetSplit:
    """The split to test on: each item that the user's sampler gives, once, in the order of the data set."""
    split = _split(part)
    if (loader := split.own_loader) is None:
        return split
    if isinstance(loader.sampler, WeightedRandomSampler):  # weights say how often to train on an item
        chosen = loader.sampler.weights.nonzero()[:, 0].tolist()
    else:
        with torch.random.fork_rng(devices=[]):  # a sampler may never end: its length is that of an epoch
            single: Any = loader.sampler
            batches: Any = loader.batch_sampler if loader.batch_size is None else [islice(single, len(single))]
            chosen = sorted({int(index) for batch in islice(batches, len(batches)) for index in batch})
    return replace(split, dataset=Subset(split.dataset, chosen), own_loader=None)
