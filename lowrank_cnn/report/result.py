"""A network of the records: its runs over all seeds, with its timings, beside its dense twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lowrank_cnn.report.records import NetworkId, Run, TimedNetwork, by_seed
from lowrank_cnn.system.statistics import deviation, mean


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
        """Finished runs, or those on the way where none has finished."""
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
