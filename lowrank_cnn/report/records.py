"""The records that a report shows: training runs and timings, read from files that may hold anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.models import list_models
from lowrank_cnn.report.fields import text
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
class SkippedFile:
    """A file that the report does not show, and why."""

    path: str
    reason: str


@dataclass
class Records:
    """What `read_records` found: training runs, timings, and the files that it skipped, each with the reason."""

    runs: list[Run] = field(default_factory=list)
    timings: list[TimedNetwork] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs or self.timings)

    def add(self, record: Run | TimedNetwork) -> None:
        """Put a record where its kind belongs."""
        if isinstance(record, Run):
            self.runs.append(record)
        else:
            self.timings.append(record)
