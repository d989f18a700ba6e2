"""What was gained: runs of one network gathered over their seeds, with their timings and their dense twin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from typing import Any

from lowrank_cnn.models import list_models
from lowrank_cnn.report.comparing import compare_all, identity, is_twin
from lowrank_cnn.report.records import NetworkResult, Records, Run, TimedNetwork
from lowrank_cnn.system.text import counted, si

_PHRASES: dict[str, Callable[[str], str]] = {
    "epochs": lambda value: counted(int(value), "epoch") if value.isdigit() else f"{value} epochs",
    "norm": lambda value: "no norm" if value == "None" else f"{value} norm",
    "pool": lambda value: "max pool" if value == "None" else f"{value} pool",
    "begun_from": lambda value: f"begun from {value}",
    "init": lambda value: f"{value} init",
    "image": str,
    "params": lambda value: f"{value} parameters",
    "macs": lambda value: f"{value} MACs",
}
"""Settings that read better as a phrase than as name=value."""
_ALWAYS = ("begun_from",)
"""Settings that no reader may miss."""


def gather(records: Records) -> list[NetworkResult]:
    """The entries of all records, each compared with its dense twin."""
    runs = _in_order(_name_data_apart(_mark_shared(records.runs)))
    timings = _by_network(records.timings)
    entries = [_entry(list(group), timings) for _, group in groupby(runs, key=_key)]
    entries = _told_apart(_best_recipe_first(entries)) + _timed_only(records.timings, entries)
    return _compared_data_first(compare_all(entries))


def _compared_data_first(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """The page opens with the first data set: one that shows low-rank networks beside a dense twin."""
    compared = {entry.data for entry in entries if "top1" in entry.ratios and not is_twin(entry)}
    return sorted(entries, key=lambda entry: entry.data not in compared)


def _name_data_apart(runs: Sequence[Run]) -> list[Run]:
    """Data sets of one name but of different images get different names: their runs are never averaged."""
    known: dict[str, dict[str, str]] = {}
    for run in runs:
        alike = known.setdefault(run.data, {})
        alike.setdefault(run.images, f"{run.data} ({len(alike) + 1}: {_images_in_words(run)})")
    return [run if len(known[run.data]) == 1 else replace(run, data=known[run.data][run.images]) for run in runs]


def _mark_shared(runs: Sequence[Run]) -> list[Run]:
    """Mark runs that overlap in time on the same hardware: side by side, each takes longer than alone."""
    marked = list(runs)
    last: dict[str, tuple[float, int]] = {}
    for begin, end, hardware, i in sorted(_spans(runs)):
        before, j = last.get(hardware, (-1.0, i))
        if begin < before:
            marked[i], marked[j] = (replace(marked[k], shared=True) for k in (i, j))
        last[hardware] = max((end, i), (before, j))
    return marked


def _spans(runs: Sequence[Run]) -> Iterator[tuple[float, float, str, int]]:
    """When each run began and ended, and on what; runs that do not say so are left out."""
    for i, run in enumerate(runs):
        try:
            begin = datetime.fromisoformat(str(run.environment.get("date"))).timestamp()
        except (ValueError, OverflowError, OSError):
            continue
        hardware = " ".join(str(run.environment.get(name)) for name in ("gpu", "cpu", "cores"))
        yield begin, begin + (run.seconds or 0.0), hardware, i


def _images_in_words(run: Run) -> str:
    return f"{run.images[:8]}" if " " not in run.images else " + ".join(run.images.split()[1:]) + " images"


def comparable(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """Those trained by a recipe that trained other networks too; all of a data set that has no such recipe.

    What a single network was put through, an ablation say, is no choice between accuracy and cost.
    """
    networks: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        networks.setdefault((entry.data, entry.recipe), set()).add(entry.network.label)
    compared = {data for (data, _), names in networks.items() if len(names) > 1}
    return [e for e in entries if e.data not in compared or len(networks[e.data, e.recipe]) > 1]


def _key(run: Run) -> tuple[Any, ...]:
    return (run.data, run.recipe, *identity(run.network), _cost(run), run.settings)


def _cost(record: Run | TimedNetwork) -> str:
    """A key for foreign networks: different ones may have the same name, that of their class."""
    return "" if record.network.ours else f"{record.macs} {record.params}"


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """The paper's order of networks within each data set and recipe."""
    order = {name: f"{place:03d}" for place, name in enumerate(list_models())}

    def place(run: Run) -> tuple[Any, ...]:
        settings = tuple((name, _natural(value)) for name, value in run.settings)
        return run.data, run.recipe, order.get(run.network.name, "999"), _key(run)[:-1], settings, run.seed or 0

    return sorted(runs, key=place)


def _best_recipe_first(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """Within each data set, the recipes by the best accuracy that each of them led to."""
    best: dict[tuple[str, str], float] = {}
    for entry in entries:
        best[entry.data, entry.recipe] = max(best.get((entry.data, entry.recipe), 0.0), entry.top1 or 0.0)
    return sorted(entries, key=lambda e: (e.data, -best[e.data, e.recipe], e.recipe))


def _entry(runs: list[Run], timings: Mapping[str, Sequence[TimedNetwork]]) -> NetworkResult:
    run = runs[0]
    candidates = timings.get(_network_name(run), ())
    timed = tuple(timing for timing in candidates if _same_network(run, timing))
    return NetworkResult(run.network, run.data, run.recipe, tuple(runs), timed)


def _by_network(timings: Sequence[TimedNetwork]) -> dict[str, list[TimedNetwork]]:
    """Timings by the name of the network, or of the one that it was converted from where that is not ours."""
    found: dict[str, list[TimedNetwork]] = {}
    for timing in timings:
        found.setdefault(_network_name(timing), []).append(timing)
    return found


def _network_name(record: Run | TimedNetwork) -> str:
    return record.network.name if record.network.ours else record.network.base or record.network.name


def _told_apart(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """Entries that would read alike, with the settings in which they differ."""
    groups: dict[tuple[str, ...], list[NetworkResult]] = {}
    for entry in entries:
        groups.setdefault((entry.network.label, entry.data, entry.recipe), []).append(entry)
    found = {key: _distinct(alike) for key, alike in groups.items()}
    told = {key: iter(words) for key, words in found.items()}
    return [replace(e, variant=next(told[e.network.label, e.data, e.recipe])) for e in entries]


def _distinct(alike: Sequence[NetworkResult]) -> list[str]:
    """What tells entries of one name apart: their settings, and what else it takes."""
    facts = [_facts(entry) for entry in alike]
    words: list[str] = []
    for shown in range(4):
        told = [entry.settings | dict(known[:shown]) for entry, known in zip(alike, facts, strict=True)]
        words = variants(told)
        if len(set(words)) == len(words):
            break
    return words


def _facts(entry: NetworkResult) -> list[tuple[str, str]]:
    """The image size and the cost: networks that are not ours may share a name, that of their class."""
    size = "x".join(map(str, entry.network.image[-2:]))
    return [("image", f"{size} pixels"), ("params", si(entry.params or 0)), ("macs", si(entry.macs or 0))]


def variants(alike: Sequence[Mapping[str, str]]) -> list[str]:
    """For each of several settings that read alike: those in which it differs from the others, in words."""
    names = dict.fromkeys(name for settings in alike for name in settings)
    values = {name: {settings.get(name) for settings in alike} for name in names}
    differ = [name for name in names if name in _ALWAYS or len(values[name]) > 1]
    return [", ".join(filter(None, (_phrase(name, s[name]) for name in differ if name in s))) for s in alike]


def _phrase(name: str, value: str) -> str:
    """A setting in words; nothing for one that was not set."""
    if name in _PHRASES:
        return _PHRASES[name](value)
    return "" if value == "None" else f"{name}={value}"


def _natural(value: str) -> tuple[str | int, ...]:
    """To sort by: 9 epochs come before 10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", value))


def _same_network(run: Run, timing: TimedNetwork) -> bool:
    """Whether a timing is of this very network: on images of the same size too, where both say."""
    built, timed = run.network, timing.network
    same = all(getattr(built, name) == getattr(timed, name) for name in ("name", "scheme", "width", "stride"))
    if not timed.ours:
        same = (built.base or built.name) == (timed.base or timed.name) and run.macs == timing.macs
    sizes_known = built.image and timed.image
    return same and (not sizes_known or built.image[-2:] == timed.image[-2:])


def _timed_only(timings: Sequence[TimedNetwork], entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    used = {timing for entry in entries for timing in entry.timings}

    def key(timing: TimedNetwork) -> tuple[str, ...]:
        return (*identity(timing.network), _cost(timing))

    rest = sorted((timing for timing in timings if timing not in used), key=key)
    groups = (list(group) for _, group in groupby(rest, key=key))
    return [NetworkResult(group[0].network, timings=tuple(group)) for group in groups]
