"""Compare a low-rank network with its dense twin: find the twin, and the share of its cost that is left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowrank_cnn.method.counting import count
from lowrank_cnn.models import create_model
from lowrank_cnn.models.twins import baseline_of
from lowrank_cnn.report.records import CPU, GPU, NetworkId, NetworkResult, by_seed
from lowrank_cnn.system.errors import LowRankError, MissingExtra
from lowrank_cnn.system.statistics import pooled_deviation, student_t

OWN = {
    "epochs": "for another number of epochs",
    "drop_epochs": "with drops of the learning rate at other epochs",
    "dropout": "with another share of dropout",
}
"""What networks trained in the same way may still have of their own: a smaller one needs less dropout."""


def twin_id(built: NetworkId) -> NetworkId:
    """The network a low-rank one is compared with: its dense base, with the same options."""
    name = built.base or built.name
    return replace(built, name=baseline_of(name), scheme=None, base=None)


def twin_known(entry: NetworkResult) -> bool:
    """Whether the dense form of a network is known. Records of foreign networks may lack it."""
    return twin_id(entry.network).ours or entry.dense is not None


def is_twin(entry: NetworkResult) -> bool:
    """Whether a network is its own dense twin."""
    return twin_known(entry) and entry.network == twin_id(entry.network)


def identity(built: NetworkId) -> tuple[str, ...]:
    """What tells networks of our own apart."""
    options = (built.scheme, built.norm, built.stride, built.image)
    return (built.name, f"{built.width:g}", *map(str, options))


FREE = ((), ("dropout",), tuple(OWN))
"""Settings in which a twin may differ, from the best twin to the last resort."""


def compare_all(entries: Sequence[NetworkResult]) -> list[NetworkResult]:
    """The entries, each with its share of what its dense twin costs, and how far it is from its accuracy."""
    trained: dict[tuple[Any, ...], list[NetworkResult]] = {}
    for entry in entries:
        for free in FREE:
            trained.setdefault(_way(entry, identity(entry.network), free), []).append(entry)
    recipes: dict[tuple[str, str], list[list[float]]] = {}
    for entry in entries:
        recipes.setdefault((entry.data, entry.recipe), []).append(by_seed(entry.scored, "top1"))
    spreads = {key: pooled_deviation(values) for key, values in recipes.items()}
    return [_compared(entry, _find_twin(entry, trained), spreads) for entry in entries]


def _way(entry: NetworkResult, network: tuple[str, ...], free: tuple[str, ...]) -> tuple[Any, ...]:
    """A network on the data and in the way that an entry was trained, but for some settings."""
    settings = frozenset(item for item in entry.settings.items() if item[0] not in free)
    return network, entry.data, entry.recipe, free, settings


def _compared(
    entry: NetworkResult, twin: NetworkResult | None, spreads: Mapping[tuple[str, str], tuple[float | None, int]]
) -> NetworkResult:
    theirs = twin.settings if twin else entry.settings
    otherwise = tuple(words for name, words in OWN.items() if theirs.get(name) != entry.settings.get(name))
    reach = _half_width(entry, twin, *spreads[entry.data, entry.recipe]) if twin else None
    found = {"twin": twin.label if twin else "", "otherwise": otherwise, "gap_half_width": reach}
    return replace(entry, ratios=_ratios(entry, twin), **found)


def _half_width(entry: NetworkResult, twin: NetworkResult, deviation: float | None, freedom: int) -> float | None:
    """Half the 95% interval of the gap to the twin, by the spread over seeds of all networks of the recipe."""
    if deviation is None or twin is entry or not (entry.seeds and twin.seeds):
        return None
    try:
        return 100 * student_t(0.975, freedom) * deviation * math.sqrt(1 / entry.seeds + 1 / twin.seeds)
    except MissingExtra:
        return None


def _ratios(entry: NetworkResult, twin: NetworkResult | None) -> dict[str, float]:
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


def _find_twin(
    entry: NetworkResult, trained: Mapping[tuple[Any, ...], Sequence[NetworkResult]]
) -> NetworkResult | None:
    """The twin trained with the same settings; if there is none, one that differs in a few of them."""
    if not twin_known(entry):
        return None
    network = identity(twin_id(entry.network))
    found = (twin for free in FREE for twin in trained.get(_way(entry, network, free), ()))
    return next((twin for twin in found if _costs_as_told(twin, entry)), None)


def _costs_as_told(twin: NetworkResult, entry: NetworkResult) -> bool:
    """Networks that are not ours may share a name: the twin is the one whose cost the entry tells."""
    return entry.dense is None or entry.dense.get("macs") == twin.macs


def _time_ratio(entry: NetworkResult, twin: NetworkResult, device: str) -> float | None:
    """Each side at its fastest, on batches of the same size."""
    ours = entry.time(device)
    theirs = ours and twin.time(device, ours.batch)
    return ours.ms / theirs.ms if ours and theirs else None


def _counted_twin(entry: NetworkResult) -> dict[str, int] | None:
    """The cost of a twin that was never trained. The options come from a file: any may be nonsense."""
    if entry.dense is not None:
        return dict(entry.dense)
    built = twin_id(entry.network)
    if not entry.runs or not built.ours or len(built.image) != 3 or not 0 < built.width <= 16:
        return None
    options = {"norm": built.norm, "stride": built.stride, "num_classes": entry.runs[0].config.get("num_classes")}
    try:
        with torch.device("meta"):
            model = create_model(built.name, in_channels=built.image[0], width=built.width, **options)
            cost = count(model, built.image)
    except (LowRankError, TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return {"macs": cost.macs, "params": cost.params}
