"""The cards at the top of the page: low-rank networks beside their dense twins, with costs and certainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowrank_cnn.paper.claims import COMPARABLE
from lowrank_cnn.report.comparing import is_twin
from lowrank_cnn.report.datasets import trained_label
from lowrank_cnn.report.gathering import comparable
from lowrank_cnn.report.records import CPU, GPU, NetworkResult
from lowrank_cnn.system.text import TIMES, percent, points

MOST_CARDS = 4
MOST_ACCURATE, CHEAPEST = "Most accurate low-rank network", f"Cheapest within {COMPARABLE:g} point"
COSTS = {GPU: "GPU time", CPU: "CPU time", "macs": "MACs", "params": "parameters"}
"""What a network costs; a measured time tells more than a count."""


@dataclass(frozen=True)
class Card:
    """One low-rank network beside its dense twin, in words."""

    title: str
    network: str
    twin: str
    data: str
    difference: str
    accuracy: str
    cost: str
    sure: str
    mood: str
    """good, bad or quiet: how the certainty is coloured."""
    gain: bool
    """Surely more accurate, or cheaper and surely as good."""


def cards(results: Sequence[NetworkResult]) -> list[Card]:
    """By data set and its best recipe: the most accurate low-rank network, and the cheapest comparable one."""
    found: list[Card] = []
    for group in _compared(results):
        best = max(group, key=lambda result: result.ratios["top1"])
        near = [result for result in group if result.ratios["top1"] >= -COMPARABLE and _cost(result) < 1]
        cheapest = min(near, key=_cost, default=best)
        if cheapest is not best:
            found += [_card(MOST_ACCURATE, best), _card(CHEAPEST, cheapest)]
        else:
            found.append(_card(f"{MOST_ACCURATE}, and {CHEAPEST.lower()}" if near else MOST_ACCURATE, best))
    return found[:MOST_CARDS]


def headline(found: Sequence[Card]) -> str:
    """The title of the page: it speaks of a gain only where every card shows one."""
    if not found:
        return "Networks trained and timed"
    return (
        "What low rank gained"
        if all(card.gain for card in found)
        else "Low-rank networks beside their dense twins"
    )


def _compared(results: Sequence[NetworkResult]) -> list[list[NetworkResult]]:
    """The low-rank networks with a trained twin, by data set; of each the first recipe, which is the best."""
    groups: dict[str, dict[str, list[NetworkResult]]] = {}
    for result in comparable(results):
        if "top1" in result.ratios and not is_twin(result) and "macs" in result.ratios:
            groups.setdefault(result.data, {}).setdefault(result.recipe, []).append(result)
    return [next(iter(recipes.values())) for recipes in groups.values()]


def _cost(result: NetworkResult) -> float:
    return next(result.ratios[name] for name in COSTS if name in result.ratios)


def _card(title: str, result: NetworkResult) -> Card:
    gap, reach = result.ratios["top1"], result.gap_half_width
    costs = [f"{TIMES}{result.ratios[name]:.2f} {words}" for name, words in COSTS.items() if name in result.ratios]
    sure, mood = certainty(gap, reach)
    interval = "" if reach is None else f"95% interval {points(gap - reach)} to {points(gap + reach)}: "
    otherwise = f"; the twin was trained {' and '.join(result.otherwise)}" if result.otherwise else ""
    return Card(
        title=title,
        network=result.label,
        twin=result.twin,
        data=trained_label(result.data, result.recipe),
        difference=f"{points(gap)} points",
        accuracy=f"{percent(result.top1)} top-1",
        cost=", ".join(costs),
        sure=f"{interval}{sure}{otherwise}.",
        mood=mood,
        gain=mood == "good" and (gap - (reach or 0) > 0 or _cost(result) < 1),
    )


def certainty(gap: float, reach: float | None) -> tuple[str, str]:
    """What an interval over seeds says about a gap in accuracy, and its mood."""
    if reach is None:
        return "Too few seeds: the gap may be chance", "quiet"
    if gap - reach > 0:
        return "surely more accurate", "good"
    if gap - reach >= -COMPARABLE:
        return f"surely no loss of more than {COMPARABLE:g} point", "good"
    if gap + reach < 0:
        return "surely less accurate", "bad"
    return "the seeds do not decide", "quiet"
