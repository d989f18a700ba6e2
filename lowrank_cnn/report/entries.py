"""What was gained: runs of one network gathered over their seeds, with their timings and their dense twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from lowrank_cnn.count import count
from lowrank_cnn.errors import LowRankError
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.report.fields import mean, spread
from lowrank_cnn.report.records import CPU, GPU, Built, Records, Run, Timing
from lowrank_cnn.report.variants import difference, natural
from lowrank_cnn.timing import BASELINES

OWN_SCHEDULE = ("epochs", "drop_epochs")
"""What networks trained in the same way may still differ in: when their learning rate dropped, and the end."""


@dataclass(frozen=True)
class Entry:
    """A network trained on a data set by a recipe, over all of its seeds; or one that was only timed."""

    built: Built
    data: str = ""
    recipe: str = ""
    runs: tuple[Run, ...] = ()
    timings: tuple[Timing, ...] = ()
    variant: str = ""
    """What sets it apart from others of the same network, data and recipe."""
    ratios: dict[str, float] = field(default_factory=dict, hash=False)
    """Shares of the dense twin's MACs, parameters and times; `top1` is the difference in percentage points."""
    fair: bool = False
    """Whether the twin was trained for as long."""

    @property
    def label(self) -> str:
        return f"{self.built.label}, {self.variant}" if self.variant else self.built.label

    @property
    def settings(self) -> dict[str, str]:
        return dict(self.runs[0].settings) if self.runs else {}

    @property
    def scored(self) -> tuple[Run, ...]:
        """Finished runs, or those on the way where none has finished."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.scored)

    @property
    def top1(self) -> float | None:
        return mean(self._known("top1"))

    @property
    def top1_spread(self) -> float | None:
        return spread(self._known("top1"))

    @property
    def top5(self) -> float | None:
        return mean(self._known("top5"))

    @property
    def seconds(self) -> float | None:
        return mean(self._known("seconds"))

    @property
    def macs(self) -> int | None:
        return next((r.macs for r in (*self.runs, *self.timings) if r.macs), None)

    @property
    def params(self) -> int | None:
        return next((r.params for r in (*self.runs, *self.timings) if r.params), None)

    def time(self, device: str, batch: int | None = None) -> Timing | None:
        """The fastest way, per image, that it was run on a kind of device."""
        fitting = [t for t in self.timings if t.device == device and batch in (None, t.batch)]
        return min(fitting, key=lambda timing: timing.ms_per_image, default=None)

    def _known(self, quantity: str) -> list[float]:
        return [value for run in self.scored if (value := getattr(run, quantity)) is not None]


def gather(records: Records) -> list[Entry]:
    """The entries of all records, each compared with its dense twin."""
    entries = [_entry(list(runs), records.timings) for _, runs in groupby(_in_order(records.runs), key=_key)]
    entries = _told_apart(_best_recipe_first(entries)) + _timed_only(records.timings, entries)
    return [_compared(entry, _find_twin(entry, entries)) for entry in entries]


def comparable(entries: Sequence[Entry]) -> list[Entry]:
    """Those trained by a recipe that trained other networks too; all of a data set that has no such recipe.

    What a single network was put through, an ablation say, is no choice between accuracy and cost.
    """
    networks: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        networks.setdefault((entry.data, entry.recipe), set()).add(entry.built.label)
    compared = {data for (data, _), names in networks.items() if len(names) > 1}
    return [e for e in entries if e.data not in compared or len(networks[e.data, e.recipe]) > 1]


def dense_twin(built: Built) -> Built:
    """The network a low-rank one is compared with: its dense base, with the same options."""
    base = next((b for b in BASELINES if built.name == b or built.name.startswith(f"{b}-")), built.name)
    return replace(built, name=base, scheme=None)


def _key(run: Run) -> tuple[Any, ...]:
    return (run.data, run.recipe, *_identity(run.built), run.settings)


def _identity(built: Built) -> tuple[str, ...]:
    options = (built.scheme, built.norm, built.stride, built.image)
    return (built.name, f"{built.width:g}", *map(str, options))


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """The paper's order of networks within each data set and recipe."""
    order = {name: f"{place:03d}" for place, name in enumerate(list_models())}

    def place(run: Run) -> tuple[Any, ...]:
        settings = tuple((name, natural(value)) for name, value in run.settings)
        return run.data, run.recipe, order.get(run.built.name, "999"), _key(run)[:-1], settings, run.seed or 0

    return sorted(runs, key=place)


def _best_recipe_first(entries: Sequence[Entry]) -> list[Entry]:
    """Within each data set, the recipes by the best accuracy that each of them led to."""
    best: dict[tuple[str, str], float] = {}
    for entry in entries:
        best[entry.data, entry.recipe] = max(best.get((entry.data, entry.recipe), 0.0), entry.top1 or 0.0)
    return sorted(entries, key=lambda e: (e.data, -best[e.data, e.recipe], e.recipe))


def _entry(runs: list[Run], timings: Sequence[Timing]) -> Entry:
    run = runs[0]
    return Entry(run.built, run.data, run.recipe, tuple(runs), _timings_of(run.built, timings))


def _told_apart(entries: Sequence[Entry]) -> list[Entry]:
    """Entries that would read alike, with the settings in which they differ."""
    told = []
    for entry in entries:
        alike = [e for e in entries if _shown(e) == _shown(entry)]
        told.append(replace(entry, variant=difference(entry.settings, [other.settings for other in alike])))
    return told


def _shown(entry: Entry) -> tuple[str, ...]:
    return entry.built.label, entry.data, entry.recipe


def _timings_of(built: Built, timings: Sequence[Timing]) -> tuple[Timing, ...]:
    return tuple(timing for timing in timings if _same_cost(built, timing.built))


def _same_cost(built: Built, timed: Built) -> bool:
    """Whether a timing is of this very network: on images of the same size too, where both say."""
    same = all(getattr(built, name) == getattr(timed, name) for name in ("name", "scheme", "width", "stride"))
    sizes_known = built.image and timed.image
    return same and (not sizes_known or built.image[-2:] == timed.image[-2:])


def _timed_only(timings: Sequence[Timing], entries: Sequence[Entry]) -> list[Entry]:
    used = {timing for entry in entries for timing in entry.timings}
    rest = sorted((t for t in timings if t not in used), key=lambda t: _identity(t.built))
    groups = (list(group) for _, group in groupby(rest, key=lambda t: _identity(t.built)))
    return [Entry(group[0].built, timings=tuple(group)) for group in groups]


def _compared(entry: Entry, twin: Entry | None) -> Entry:
    fair = twin is not None and all(twin.settings.get(k) == entry.settings.get(k) for k in OWN_SCHEDULE)
    return replace(entry, ratios=_ratios(entry, twin), fair=fair)


def _ratios(entry: Entry, twin: Entry | None) -> dict[str, float]:
    counted = None if twin else _counted_twin(entry)
    base: dict[str, Any] = {"macs": twin.macs, "params": twin.params} if twin else counted or {}
    ours = {"macs": entry.macs, "params": entry.params}
    ratios = {name: cost / base[name] for name, cost in ours.items() if cost and base.get(name)}
    if twin is None:
        return ratios
    for device in (CPU, GPU):
        if (ratio := _time_ratio(entry, twin, device)) is not None:
            ratios[device] = ratio
    if entry.top1 is not None and twin.top1 is not None:
        ratios["top1"] = 100 * (entry.top1 - twin.top1)
    return ratios


def _find_twin(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The twin trained in the same way; its schedule may be its own, where none had the very same."""
    wanted = (_identity(dense_twin(entry.built)), entry.data, entry.recipe)
    twins = [e for e in entries if (_identity(e.built), e.data, e.recipe) == wanted]
    for free in ((), OWN_SCHEDULE):
        for twin in twins:
            if all(twin.settings.get(k) == v for k, v in entry.settings.items() if k not in free):
                return twin
    return None


def _time_ratio(entry: Entry, twin: Entry, device: str) -> float | None:
    """Each side at its fastest, on batches of the same size."""
    ours = entry.time(device)
    theirs = ours and twin.time(device, ours.batch)
    return ours.ms / theirs.ms if ours and theirs else None


def _counted_twin(entry: Entry) -> dict[str, int] | None:
    """The cost of a twin that was never trained. The options come from a file: any may be nonsense."""
    built = dense_twin(entry.built)
    if not entry.runs or built.name not in list_models() or len(built.image) != 3 or not 0 < built.width <= 16:
        return None
    options = {"norm": built.norm, "stride": built.stride, "num_classes": entry.runs[0].config.get("num_classes")}
    try:
        with torch.device("meta"):
            model = create_model(built.name, in_channels=built.image[0], width=built.width, **options)
            cost = count(model, built.image)
    except (LowRankError, TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return {"macs": cost.macs, "params": cost.params}
