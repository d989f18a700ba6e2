"""What a report shows: training runs and timings, and what they add up to for each network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.models import list_models
from lowrank_cnn.report.details import AnswerDetails
from lowrank_cnn.report.fields import text
from lowrank_cnn.system.statistics import deviation, mean
from lowrank_cnn.train.record import Epoch

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
