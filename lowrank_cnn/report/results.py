"""Results: the runs of each network over their seeds, with its timings, compared with its dense twin."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from lowrank_cnn.core.errors import MissingExtra
from lowrank_cnn.core.numbers import deviation, mean, pooled_deviation, student_t
from lowrank_cnn.core.text import counted, si
from lowrank_cnn.models import family_of, list_models
from lowrank_cnn.models.build import baseline_of
from lowrank_cnn.paper.audit import Accuracies, LayerTimes
from lowrank_cnn.paper.published import Published, rows
from lowrank_cnn.report.records import CPU, GPU, NetworkId, Records, Run, TimedNetwork, data_label, settings_of
from lowrank_cnn.report.style import DENSE, LOW_RANK, THIN
from lowrank_cnn.train.recipes import get_recipe


def by_seed(runs: Iterable[Run], quantity: str) -> list[float]:
    """The known values of a quantity, one per seed: runs that repeat a seed are averaged, not counted twice."""
    known: dict[int | None, list[float]] = defaultdict(list)
    for run in runs:
        if (value := getattr(run, quantity)) is not None:
            known[run.seed].append(value)
    return [math.fsum(values) / len(values) for values in known.values()]


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
    gap_half_width: float | None = None
    """Half the interval over seeds of `ratios["top1"]`: all of a data set and recipe hold together with 95%."""

    @property
    def label(self) -> str:
        return f"{self.network.label}, {self.variant}" if self.variant else self.network.label

    @property
    def trained(self) -> str:
        """The data set and the recipe, once where both have one name (`digits`)."""
        return ", ".join(dict.fromkeys(filter(None, (data_label(self.data), self.recipe))))

    @cached_property
    def settings(self) -> dict[str, str]:
        return dict(self.runs[0].settings) if self.runs else {}

    @cached_property
    def scored(self) -> tuple[Run, ...]:
        """Finished runs; if there are none, the unfinished ones."""
        return tuple(run for run in self.runs if run.finished) or self.runs

    @property
    def seeds(self) -> int:
        return len(by_seed(self.scored, "top1"))

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.scored)

    @property
    def top1(self) -> float | None:
        return mean(by_seed(self.scored, "top1"))

    @property
    def top1_spread(self) -> float | None:
        return deviation(by_seed(self.scored, "top1"))

    @property
    def top5(self) -> float | None:
        return mean(by_seed(self.scored, "top5"))

    @property
    def seconds(self) -> float | None:
        return mean([run.seconds for run in self.scored if run.seconds is not None])

    @property
    def macs(self) -> int | None:
        return next((r.macs for r in (*self.runs, *self.timings) if r.macs), None)

    @property
    def params(self) -> int | None:
        return next((r.params for r in (*self.runs, *self.timings) if r.params), None)

    @property
    def dense(self) -> Mapping[str, int] | None:
        """The cost of its dense twin, as its records state it; None if it is unknown."""
        return next((record.dense for record in self.runs or self.timings if record.dense is not None), None)

    @property
    def n(self) -> int | None:
        """The number of images that its accuracy was measured on: the fewest, where runs differ."""
        return min((run.n for run in self.scored if run.n is not None), default=None)

    def time(self, device: str, batch: int | None = None) -> TimedNetwork | None:
        """The fastest way, per image, that it was run on a kind of device."""
        fitting = [t for t in self.timings if t.device == device and batch in (None, t.batch)]
        return min(fitting, key=lambda timing: timing.ms_per_image, default=None)


OWN = {
    "epochs": "for another number of epochs",
    "drop_epochs": "with drops of the learning rate at other epochs",
    "dropout": "with another share of dropout",
    "lr": "at another learning rate",
}
"""What networks trained in the same way may still have of their own: `compare` tries rates for each."""


def twin_id(built: NetworkId) -> NetworkId:
    """The network a low-rank one is compared with: its dense base, with the same options."""
    name = built.base or built.name
    return replace(built, name=baseline_of(name), scheme=None, base=None, thin=False)


def twin_known(entry: NetworkResult) -> bool:
    """Whether the dense form of a network is known. Records of foreign networks may lack it."""
    return twin_id(entry.network).ours or entry.dense is not None


def is_twin(entry: NetworkResult) -> bool:
    return twin_known(entry) and entry.network == twin_id(entry.network)


def kind_of(entry: NetworkResult) -> str:
    """Dense, thin or low-rank: each has one colour in all charts."""
    return DENSE if is_twin(entry) else THIN if entry.network.thin else LOW_RANK


def identity(built: NetworkId) -> tuple[str, ...]:
    options = (built.scheme, built.norm, built.stride, built.image)
    return (built.name, f"{built.width:g}", *map(str, options))


FREE = ((), ("dropout",), tuple(OWN))
"""Settings in which a twin may differ, from the best twin to the last resort."""


def compare_all(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """The entries, each with its share of what its dense twin costs, and how far it is from its accuracy."""
    trained: dict[tuple[Any, ...], list[NetworkResult]] = defaultdict(list)
    recipes: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for entry in entries:
        for free in FREE:
            trained[_way(entry, entry.network, free)].append(entry)
        recipes[entry.data, entry.recipe].append(by_seed(entry.scored, "top1"))
    spreads = {key: pooled_deviation(values) for key, values in recipes.items()}
    twins = [(entry, _find_twin(entry, trained), (entry.data, entry.recipe)) for entry in entries]
    several = Counter(key for entry, twin, key in twins if twin is not None and twin is not entry)
    return [_compared(entry, twin, *spreads[key], several[key]) for entry, twin, key in twins]


def _way(entry: NetworkResult, network: NetworkId, free: tuple[str, ...]) -> tuple[Any, ...]:
    """A network on the data and with the settings of an entry, apart from the free ones."""
    settings = frozenset(item for item in entry.settings.items() if item[0] not in free)
    return identity(network), entry.data, entry.recipe, free, settings


def _compared(
    entry: NetworkResult, twin: NetworkResult | None, spread: float | None, freedom: int, several: int
) -> NetworkResult:
    """An entry beside its twin, one of `several`. `spread` is the deviation over seeds of all of the recipe."""
    base: Mapping[str, Any] = {"macs": twin.macs, "params": twin.params} if twin else entry.dense or {}
    costs = {"macs": entry.macs, "params": entry.params}
    ratios = {name: cost / base[name] for name, cost in costs.items() if cost and base.get(name)}
    if twin is None:
        return replace(entry, ratios=ratios)
    for device in (CPU, GPU):  # each side at its fastest, on batches of the same size
        ours = entry.time(device)
        if ours and (theirs := twin.time(device, ours.batch)):
            ratios[device] = ours.ms / theirs.ms
    if entry.top1 is not None and twin.top1 is not None:
        ratios["top1"] = 100 * (entry.top1 - twin.top1)
    half_width = None
    if spread is not None and twin is not entry and entry.seeds and twin.seeds:
        with contextlib.suppress(MissingExtra):
            reach = 100 * student_t(1 - 0.025 / several, freedom) * spread  # Bonferroni
            half_width = reach * math.sqrt(1 / entry.seeds + 1 / twin.seeds)
    otherwise = tuple(words for name, words in OWN.items() if twin.settings.get(name) != entry.settings.get(name))
    return replace(entry, ratios=ratios, twin=twin.label, otherwise=otherwise, gap_half_width=half_width)


def _find_twin(
    entry: NetworkResult, trained: Mapping[tuple[Any, ...], Sequence[NetworkResult]]
) -> NetworkResult | None:
    """The twin trained with the same settings; if there is none, one that differs in a few of them."""
    if not twin_known(entry):
        return None
    network = twin_id(entry.network)
    dense = None if network.ours else entry.dense  # foreign networks may share a name: the cost must be as stated
    found = (twin for free in FREE for twin in trained.get(_way(entry, network, free), ()))
    return next((twin for twin in found if dense is None or dense.get("macs") == twin.macs), None)


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


def gather(records: Records) -> list[NetworkResult]:
    """The entries of all records, each compared with its dense twin."""
    runs = _in_order(_name_data_apart(records.runs))
    entries = []
    for run, *seeds in (tuple(group) for _, group in groupby(runs, key=_key)):
        timed = tuple(timing for timing in records.timings if _same_network(run, timing))
        entries.append(NetworkResult(run.network, run.data, run.recipe, (run, *seeds), timed))
    entries = _told_apart(entries) + _timed_only(records.timings, entries)
    return _in_page_order(compare_all(entries))


def _in_page_order(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """First the data sets that show low-rank networks beside a dense twin; in each, the best recipe first."""
    compared = {entry.data for entry in entries if "top1" in entry.ratios and not is_twin(entry)}
    best: dict[tuple[str, str], float] = defaultdict(float)
    for entry in entries:
        best[entry.data, entry.recipe] = max(best[entry.data, entry.recipe], entry.top1 or 0.0)
    return sorted(
        entries, key=lambda e: (e.data not in compared, not e.data, e.data, -best[e.data, e.recipe], e.recipe)
    )


def _name_data_apart(runs: Sequence[Run]) -> list[Run]:
    """Data sets of one name but of different images get different names: their runs are never averaged."""
    known: dict[str, dict[str, str]] = defaultdict(dict)
    for run in runs:
        others, counts = known[run.data], [str(n) for n in (dict(run.settings).get("images"), run.n) if n]
        words = f"{' + '.join(counts)} images" if counts else "set 1"
        if words in others.values() and run.images not in others:
            words = f"{words.removesuffix('set 1')} set {len(others) + 1}".strip()
        others.setdefault(run.images, words)
    apart = {data: sets for data, sets in known.items() if len(sets) > 1}
    told = {(data, key): f"{data} ({words})" for data, sets in apart.items() for key, words in sets.items()}
    return [replace(run, data=told.get((run.data, run.images), run.data)) for run in runs]


def comparable(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """Without ablations, recipes of a single network, unless a data set has no other recipe."""
    networks: dict[tuple[str, str], set[str]] = defaultdict(set)
    for entry in entries:
        networks[entry.data, entry.recipe].add(entry.network.label)
    compared = {data for (data, _), names in networks.items() if len(names) > 1}
    return [e for e in entries if e.data not in compared or len(networks[e.data, e.recipe]) > 1]


def _network_key(record: Run | TimedNetwork) -> tuple[str, ...]:
    """Of foreign networks, different ones may have the same name, that of their class: their costs differ."""
    cost = "" if record.network.ours else f"{record.macs} {record.params}"
    return (*identity(record.network), cost)


def _key(run: Run) -> tuple[Any, ...]:
    return (run.data, run.recipe, *_network_key(run), run.settings)


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """The paper's order of networks within each data set and recipe."""
    order = {name: f"{place:03d}" for place, name in enumerate(list_models())}

    def place(run: Run) -> tuple[Any, ...]:
        settings = tuple((name, _natural(value)) for name, value in run.settings)
        return run.data, run.recipe, order.get(run.network.name, "999"), _key(run)[:-1], settings, run.seed or 0

    return sorted(runs, key=place)


def _told_apart(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """Entries that would read alike, with the settings in which they differ."""
    groups: dict[tuple[str, ...], list[NetworkResult]] = defaultdict(list)
    for entry in entries:
        groups[entry.network.label, entry.data, entry.recipe].append(entry)
    told = {key: iter(_distinct(alike)) for key, alike in groups.items()}
    return [replace(e, variant=next(told[e.network.label, e.data, e.recipe])) for e in entries]


def _distinct(alike: Sequence[NetworkResult]) -> list[str]:
    """Words that distinguish entries of one name: settings, and where these are equal, image size and cost."""
    words: list[str] = []
    for n in range(4):
        words = _differences([entry.settings | dict(_facts(entry)[:n]) for entry in alike])
        if len(set(words)) == len(words):
            break
    return words


def _facts(entry: NetworkResult) -> list[tuple[str, str]]:
    size = "x".join(map(str, entry.network.image[-2:]))
    return [("image", f"{size} pixels"), ("params", si(entry.params or 0)), ("macs", si(entry.macs or 0))]


def _differences(alike: Sequence[Mapping[str, str]]) -> list[str]:
    """For each of several settings: those in which it differs from the others, in words; `begun_from` always."""
    values: dict[str, set[str | None]] = {name: {s.get(name) for s in alike} for s in alike for name in s}
    differ = [name for name in sorted(values) if name == "begun_from" or len(values[name]) > 1]
    return [", ".join(filter(None, (_phrase(name, s[name]) for name in differ if name in s))) for s in alike]


def _phrase(name: str, value: str) -> str:
    if name in _PHRASES:
        return _PHRASES[name](value)
    return "" if value in ("None", "") else f"{name}={value}"


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
    rest = sorted((timing for timing in timings if timing not in used), key=_network_key)
    groups = (list(group) for _, group in groupby(rest, key=_network_key))
    return [NetworkResult(group[0].network, timings=tuple(group)) for group in groups]


RECIPES = {
    "vgg-ilsvrc": "vgg-paper",
    "googlenet-ilsvrc": "googlenet-paper",
    "nin-cifar10": "nin-paper",
    "vgg-places": "vgg-paper",
}

FREE_SETTINGS = ("dropout", "precision", "epochs", "images")
"""Settings that a network or a machine has for itself; a run may be longer than the recipe, and no shorter."""


def accuracies(runs: Iterable[Run]) -> Accuracies:
    """The accuracies of finished runs that the audit can compare with the paper's tables, one value per seed."""
    found: dict[tuple[str, str, str], tuple[float, ...]] = {}
    told = [run for run in runs if run.finished]
    for row in (row for row in rows() if row.table in RECIPES):
        images: dict[str, list[Run]] = defaultdict(list)
        for run in (run for run in told if _is_of(run, row)):
            images[run.images].append(run)
        # Runs that saw different images are not mixed.
        chosen = max(images.values(), key=lambda group: len({run.seed for run in group}), default=[])
        for measure in ("top1", "top5", "overfit"):
            if values := by_seed(chosen, measure):
                found[row.table, row.network, measure] = tuple(values)
    return found


def of_paper(runs: Iterable[Run]) -> bool:
    """Whether a network of the paper was trained on a data set of the paper."""
    names, data = list_models(paper=True), {data_label(row.dataset) for row in rows()}
    return any((run.network.base or run.network.name) in names and data_label(run.data) in data for run in runs)


def layer_times(timings: Iterable[TimedNetwork]) -> list[LayerTimes]:
    fastest: dict[tuple[str, str], TimedNetwork] = {}
    for timing in sorted(timings, key=lambda timing: -timing.ms_per_image):
        if timing.layers:
            fastest[timing.network.label, timing.device] = timing
    return [
        LayerTimes(network, device, *zip(*((float(layer.macs), layer.ms) for layer in timing.layers), strict=True))
        for (network, device), timing in sorted(fastest.items())
    ]


def _is_of(run: Run, row: Published) -> bool:
    """Whether a run trained the network of a row, as published, on the images of its table, by its recipe."""
    built, recipe = run.network, RECIPES[row.table]
    if built.name != row.network or run.recipe != recipe or data_label(run.data) != data_label(row.dataset):
        return False
    own_stride = family_of(row.network).VARIANTS[row.network].stride
    if built.width != 1 or built.scheme or built.base or (built.stride or own_stride) != row.stride:
        return False
    told, taught = dict(run.settings), get_recipe(recipe)
    wanted = dict(settings_of(taught.to_dict(), taught.network()))
    epochs = told.get("epochs", "")
    if "begun_from" in told or any(told.get(name) != wanted[name] for name in wanted.keys() - FREE_SETTINGS):
        return False
    return epochs.isdecimal() and int(epochs) >= taught.epochs
