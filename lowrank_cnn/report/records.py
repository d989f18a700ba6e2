"""What a report shows: training runs and timings, and what they add up to for each network.

Records are files that anybody may have edited. A value of the wrong type or out of its range becomes None.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowrank_cnn.core.numbers import deviation, mean
from lowrank_cnn.data.small_sets import CLASSES as CIFAR10_CLASSES
from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.models import list_models
from lowrank_cnn.train.run_folder import Epoch

LONGEST_TEXT = 200


def mapping(value: object) -> dict[str, Any]:
    """A JSON object, or an empty one."""
    return dict(value) if isinstance(value, Mapping) else {}


def items(value: object) -> list[Any]:
    """A JSON array, or an empty one."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def text(value: object) -> str | None:
    """A string (or a number written as one), cut where it is absurdly long."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).strip()[:LONGEST_TEXT] or None


def number(value: object, *, least: float = 0.0, most: float = 1e18) -> float | None:
    """The number if it is finite and within its bounds, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not least <= value <= most:  # false for NaN as well
        return None
    return float(value)


def whole(value: object) -> int | None:
    """A count."""
    read = number(value)
    return None if read is None else int(read)


def share(value: object) -> float | None:
    """An accuracy, from 0 to 1."""
    return number(value, most=1.0)


def sizes(value: object) -> tuple[int, ...]:
    """The size of an image, or nothing where one of its numbers is not one."""
    read = [whole(item) for item in items(value)]
    return tuple(item for item in read if item is not None) if all(read) else ()


def first(values: Mapping[str, Any], *names: str) -> Any:
    """The first of several spellings that is there."""
    return next((values[name] for name in names if values.get(name) is not None), None)


MOST_CLASSES = 1000
MOST_WORST = 20
LARGEST_THUMBNAIL = 20_000
_PICTURE = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+")

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class WrongAnswer:
    """A test image that a network got wrong; `thumbnail` is a data URI where the record carries the image."""

    image: str
    true: str
    predicted: str
    probability: float | None
    loss: float | None
    thumbnail: str | None = None


@dataclass(frozen=True)
class AnswerDetails:
    """What `result["details"]` of a record holds, as counts that can be added up over runs.

    `per_class` has the images and the right answers of each class. `confusion` counts images by true and predicted
    class; it is empty where the record has no matrix. `pairs` are a class, what it was taken for, and how often.
    `bins` have the images, the sum of their confidences and the right answers, by rising confidence.
    """

    classes: tuple[str, ...]
    per_class: Rows
    confusion: Rows = ()
    pairs: tuple[tuple[str, str, int], ...] = ()
    bins: Rows = ()
    worst: tuple[WrongAnswer, ...] = ()

    @property
    def calibration_error(self) -> float | None:
        """The distance of confidence from accuracy, averaged over images; None without any."""
        images = sum(n for n, _, _ in self.bins)
        return sum(abs(confidence - right) for _, confidence, right in self.bins) / images if images else None


def read_details(values: Mapping[str, Any]) -> AnswerDetails | None:
    """The details in an untrusted record; None if it has none."""
    rows = [mapping(row) for row in items(values.get("per_class"))[:MOST_CLASSES]]
    if not rows:
        return None
    return AnswerDetails(
        classes=tuple(text(row.get("class")) or "unnamed" for row in rows),
        per_class=tuple(_counts(row, "accuracy") for row in rows),
        confusion=_matrix(values.get("confusion"), len(rows)),
        pairs=tuple(filter(None, map(_pair, items(values.get("most_confused"))))),
        bins=tuple(
            _counts(mapping(row), "confidence", "accuracy")
            for row in items(mapping(values.get("calibration")).get("bins"))
        ),
        worst=tuple(filter(None, map(_wrong, items(values.get("worst"))[:MOST_WORST]))),
    )


def _counts(row: Mapping[str, Any], *shares: str) -> tuple[float, ...]:
    """A number of images, with the counts that each share amounts to."""
    n = whole(row.get("n")) or 0
    return n, *(n * (share(row.get(name)) or 0.0) for name in shares)


def _matrix(value: object, classes: int) -> Rows:
    rows = [[whole(cell) or 0 for cell in items(row)] for row in items(value)]
    square = [len(row) for row in rows] == [classes] * classes
    return tuple(map(tuple, rows)) if square else ()


def _pair(value: object) -> tuple[str, str, int] | None:
    row = mapping(value)
    true, predicted, n = text(row.get("true")), text(row.get("predicted")), whole(row.get("n"))
    return (true, predicted, n) if true and predicted and n else None


def _wrong(value: object) -> WrongAnswer | None:
    row = mapping(value)
    image, true, predicted = (text(row.get(name)) for name in ("image", "true", "predicted"))
    if not (image and true and predicted):
        return None
    given = row.get("thumbnail")
    shown = isinstance(given, str) and len(given) <= LARGEST_THUMBNAIL and _PICTURE.fullmatch(given)
    picture = given if shown else None
    return WrongAnswer(image, true, predicted, share(row.get("probability")), number(row.get("loss")), picture)


def pool_answers(details: Sequence[AnswerDetails]) -> AnswerDetails:
    """The answers of several runs together; those of other classes or bins than the first run's are left out."""
    first = details[0]
    alike = [one for one in details if _shape(one) == _shape(first)]
    confusion = _summed([one.confusion for one in alike])
    worst = sorted((image for one in alike for image in one.worst), key=lambda image: image.loss or 0.0)
    hardest = {image.image: image for image in worst}  # of an image that several runs got wrong, the largest loss
    return AnswerDetails(
        classes=first.classes,
        per_class=_summed([one.per_class for one in alike]),
        confusion=confusion,
        pairs=_most_confused(first.classes, confusion) if confusion else first.pairs,
        bins=_summed([one.bins for one in alike]),
        worst=tuple(sorted(hardest.values(), key=lambda image: -(image.loss or 0.0))[:MOST_WORST]),
    )


def _shape(details: AnswerDetails) -> tuple[object, ...]:
    return details.classes, len(details.confusion), len(details.bins)


def _summed(tables: Sequence[Rows]) -> Rows:
    """Tables of one shape, added cell by cell."""
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))


def _most_confused(classes: Sequence[str], confusion: Rows) -> tuple[tuple[str, str, int], ...]:
    wrong = [
        (classes[i], classes[j], int(n))
        for i, row in enumerate(confusion)
        for j, n in enumerate(row)
        if n and i != j
    ]
    return tuple(sorted(wrong, key=lambda pair: -pair[2]))


CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True)
class NetworkId:
    """Which network a record is about: its name, and the options that change its cost.

    `base` is the name of the network that it was converted from, if it was.
    """

    name: str
    scheme: str | None = None
    width: float = 1.0
    norm: str | None = None
    stride: int | None = None
    image: tuple[int, ...] = ()
    base: str | None = None

    @property
    def ours(self) -> bool:
        """Whether the name identifies the network; others are named after their class, which many share."""
        return self.name in list_models()

    @property
    def label(self) -> str:
        options = [
            self.scheme,
            f"width {self.width:g}" if self.width != 1 else None,
            f"stride {self.stride}" if self.stride else None,
        ]
        return " ".join(filter(None, [self.name, *options]))


@dataclass(frozen=True)
class Run:
    """A training run: what was trained on what, and the result so far.

    `images` identifies the images: the digest of the data where the record has one. `settings` are the fields of
    the recipe, and the norm and the initialisation of the network. `n` is the number of test images. `dense` is
    the cost of a network that is not ours before it was converted, or its own if it never was; None if unknown.
    """

    path: str
    network: NetworkId
    data: str
    images: str
    recipe: str
    seed: int | None
    status: str
    watched: str
    top1: float | None
    top5: float | None
    macs: int | None
    params: int | None
    seconds: float | None
    history: tuple[Epoch, ...]
    settings: tuple[tuple[str, str], ...] = ()
    n: int | None = None
    dense: Mapping[str, int] | None = field(hash=False, default=None)
    config: Mapping[str, Any] = field(hash=False, default_factory=dict)
    environment: Mapping[str, Any] = field(hash=False, default_factory=dict)
    shared: bool = False
    """Whether another run was under way on the same kind of device at the same time."""
    details: AnswerDetails | None = None
    sealed: bool = True
    """Whether the record has a checksum. Older records have none, and an edited one loses it."""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def overfit(self) -> float | None:
        """Accuracy on the augmented training images of the last epoch, minus accuracy on the test images."""
        trained = self.history[-1].train_accuracy if self.history else None
        return None if trained is None or self.top1 is None else trained - self.top1


def by_seed(runs: Iterable[Run], quantity: str) -> list[float]:
    """The known values of a quantity, one per seed: runs that repeat a seed are averaged, not counted twice."""
    known: dict[int | None, list[float]] = {}
    for run in runs:
        if (value := getattr(run, quantity)) is not None:
            known.setdefault(run.seed, []).append(value)
    return [math.fsum(values) / len(values) for values in known.values()]


@dataclass(frozen=True)
class TimedNetwork:
    """How long a network takes for a batch on one kind of device, and how long each of its layers takes."""

    path: str
    network: NetworkId
    device: str
    runtime: str
    batch: int
    ms: float
    macs: int | None
    params: int | None
    layers: tuple[LayerTime, ...]
    dense: Mapping[str, int] | None = field(hash=False, default=None)
    environment: Mapping[str, Any] = field(hash=False, default_factory=dict)

    @property
    def ms_per_image(self) -> float:
        return self.ms / self.batch

    @property
    def hardware(self) -> str:
        return text(self.environment.get(self.device.lower())) or self.device


@dataclass(frozen=True)
class NetworkResult:
    """A network trained on a data set by a recipe, over all of its seeds; or one that was only timed."""

    network: NetworkId
    data: str = ""
    recipe: str = ""
    runs: tuple[Run, ...] = ()
    timings: tuple[TimedNetwork, ...] = ()
    variant: str = ""
    """What sets it apart from others of the same network, data and recipe."""
    ratios: dict[str, float] = field(default_factory=dict, hash=False)
    """Shares of the dense twin's MACs, parameters and times; `top1` is the difference in percentage points."""
    twin: str = ""
    """The label of the dense network that it is compared with; empty where none was trained."""
    otherwise: tuple[str, ...] = ()
    """How the twin was trained otherwise, in words."""
    gap_half_width: float | None = None
    """Half the 95% interval over seeds of `ratios["top1"]`, in percentage points; None for single seeds."""

    @property
    def label(self) -> str:
        return f"{self.network.label}, {self.variant}" if self.variant else self.network.label

    @cached_property
    def settings(self) -> dict[str, str]:
        return dict(self.runs[0].settings) if self.runs else {}

    @cached_property
    def scored(self) -> tuple[Run, ...]:
        """Finished runs; if there are none, the unfinished ones."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @property
    def seeds(self) -> int:
        """How many different seeds the accuracy is the mean of."""
        return len(by_seed(self.scored, "top1"))

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.scored)

    @property
    def top1(self) -> float | None:
        return mean(by_seed(self.scored, "top1"))

    @property
    def top1_spread(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two seeds."""
        return deviation(by_seed(self.scored, "top1"))

    @property
    def top5(self) -> float | None:
        return mean(by_seed(self.scored, "top5"))

    @property
    def seconds(self) -> float | None:
        return mean(self._known("seconds"))

    @property
    def shared(self) -> bool:
        """Whether a run shared its device with another, which makes its time incomparable."""
        return any(run.shared for run in self.scored)

    @property
    def macs(self) -> int | None:
        return next((r.macs for r in (*self.runs, *self.timings) if r.macs), None)

    @property
    def params(self) -> int | None:
        return next((r.params for r in (*self.runs, *self.timings) if r.params), None)

    @property
    def dense(self) -> Mapping[str, int] | None:
        """What a network that is not ours cost before it was converted; None where that is not known."""
        return next((record.dense for record in self.runs or self.timings if record.dense is not None), None)

    @property
    def n(self) -> int | None:
        """The number of images that its accuracy was measured on: the fewest, where runs differ."""
        return min(self._known("n"), default=None)

    def time(self, device: str, batch: int | None = None) -> TimedNetwork | None:
        """The fastest way, per image, that it was run on a kind of device."""
        fitting = [t for t in self.timings if t.device == device and batch in (None, t.batch)]
        return min(fitting, key=lambda timing: timing.ms_per_image, default=None)

    def _known(self, quantity: str) -> list[Any]:
        return [value for run in self.scored if (value := getattr(run, quantity)) is not None]


@dataclass(frozen=True)
class SkippedFile:
    """A file that the report does not show, and why."""

    path: str
    reason: str


@dataclass
class Records:
    """What `read_records` found: training runs, timings, and the files that it skipped, each with the reason.

    `elsewhere` are files that another command shows, each with that command.
    """

    runs: list[Run] = field(default_factory=list)
    timings: list[TimedNetwork] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    elsewhere: list[SkippedFile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs or self.timings)

    def add(self, record: Run | TimedNetwork) -> None:
        """Put a record where its kind belongs."""
        if isinstance(record, Run):
            self.runs.append(record)
        else:
            self.timings.append(record)


_NAMES = {"cifar10": "CIFAR-10", "ilsvrc12": "ILSVRC", "imagenet1k": "ILSVRC", "places205": "Places"}
_WHOLE = {"CIFAR-10": (50_000, 10_000), "ILSVRC": (1_281_167, 50_000), "Places": (2_448_873, 20_500)}
_NEARLY = 0.99
"""Of the images: a few may be damaged, and were left out."""


def data_label(name: str) -> str:
    """One name per data set, without its owner on the Hub."""
    return _NAMES.get(re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower()), name)


def trained_label(data: str, recipe: str) -> str:
    """A data set and the recipe trained on it, once where both have one name (`digits`)."""
    return ", ".join(dict.fromkeys(filter(None, (data_label(data), recipe))))


def data_name(data: Mapping[str, Any]) -> str:
    """A data set is called by its folder, which may be any; CIFAR-10 is known by its classes and their images.

    A part of a known set is another: its accuracies stand beside no published ones.
    """
    name, sizes = text(data.get("name")) or "unnamed data", [whole(data.get(split)) for split in ("train", "test")]
    if tuple(items(data.get("classes"))) == CIFAR10_CLASSES and tuple(sizes) == _WHOLE["CIFAR-10"]:
        return "cifar10"
    full = _WHOLE.get(data_label(name))
    if full is None or all(size is None or size >= _NEARLY * n for size, n in zip(sizes, full, strict=True)):
        return name
    return f"a part of {data_label(name)} ({' + '.join(f'{size or 0:,}' for size in sizes)} images)"


def data_identity(data: Mapping[str, Any]) -> str:
    """What tells data apart, whatever it is called: its digest, or else its classes and numbers of images."""
    if digest := text(data.get("digest")):
        return digest
    classes = repr([str(name) for name in items(data.get("classes"))])
    known = zlib.crc32(classes.encode()), *(whole(data.get(split)) for split in ("train", "test"))
    return " ".join(map(str, known))
