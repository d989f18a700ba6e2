"""Divide a budget of multiply-accumulates, parameters or time among the layers of a network.

A layer's *curve* lists what may replace it, from cheap to dense: each step has a cost and the share of the layer
that it keeps (`energy`). For trained filters that share is measured; for fresh ones it is the share of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from lowrank_cnn.core.clock import measure
from lowrank_cnn.core.errors import LowRankError, check_number
from lowrank_cnn.core.modules import InputSize, arguments
from lowrank_cnn.method.chains import groups_of, outputs_of
from lowrank_cnn.method.count import count
from lowrank_cnn.method.rewrite import copy_with, rewrite
from lowrank_cnn.method.schemes import Scheme

Convs = Mapping[str, nn.Conv2d]
Choice = Mapping[str, Scheme | None]
SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Basis filters that a fresh layer may have, as shares of its own filters."""


@dataclass(frozen=True)
class Step:
    """One choice for a layer: the scheme that replaces it (None: it stays dense), its cost, and what it keeps."""

    scheme: Scheme | None
    cost: int
    energy: float


Options = Iterable[tuple[Scheme, float]]
"""What may replace a layer, and the share of it that each keeps."""


class Offer(NamedTuple):
    """A layer's best step: where on its curve it leads, the log energy it gains per cost, and its cost."""

    index: int
    gain: float
    price: float


Curve = list[Step]
Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Budget:
    """The largest allowed cost of a network ("macs", "params" or "latency"), as a share of its current cost."""

    kind: str
    share: float

    @classmethod
    def of(cls, **asked: float | None) -> Budget | None:
        """The one budget that the caller set; None if none was set."""
        given = {kind: share for kind, share in asked.items() if share is not None}
        if len(given) > 1:
            raise LowRankError(f"ask for one of {', '.join(asked)}, not for {' and '.join(given)}.")
        for kind, share in given.items():
            check_number(kind, share, above=0, most=1)
            return cls(kind, float(share))
        return None


def within(
    model: nn.Module, curves: Curves, rest: int, budget: Budget, input_size: InputSize
) -> dict[str, Scheme]:
    """Choose a scheme for each layer so that the network keeps most within the budget; other layers stay dense."""
    if budget.kind == "latency":
        return schemes_of(by_latency(model, curves, budget.share, input_size))
    total = rest + sum(curve[-1].cost for curve in curves.values())
    least = (rest + sum(curve[0].cost for curve in curves.values())) / total
    if budget.share < least:
        raise LowRankError(
            f"{budget.kind}={budget.share:g} is below {least:.3f}, what the fewest filters and all else cost."
        )
    allowed = budget.share * total
    left = allowed - rest
    while True:  # a strided first half can cost more than estimated: retry with a budget lowered by the excess
        chosen = allocate(curves, left)
        schemes = schemes_of(chosen)
        spent = getattr(count(rewrite(model, schemes), input_size), budget.kind) if schemes else 0
        if spent <= allowed:
            return schemes
        left = estimated(curves, chosen) - max(1, spent - allowed)


def allocate(curves: Curves, budget: float) -> dict[str, Scheme | None]:
    """Spend a budget where it keeps most of the product of all layers' energies.

    A chain of layers passes the product of the energies that its layers pass. Layers compete by the logarithm of
    energy gained per cost, each with its best affordable step.
    """
    place = dict.fromkeys(curves, 0)
    left = budget - sum(curve[0].cost for curve in curves.values())
    if left < 0:
        raise LowRankError("the budget is below what the fewest filters cost: allow more.")
    offers: dict[str, Offer | None] = {}
    while True:
        for name, curve in curves.items():
            known = offers.get(name, Offer(0, 0, float("inf")))
            if known is not None and known.price > left:
                offers[name] = _offer(curve, place[name], left)
        open_offers = {name: offer for name, offer in offers.items() if offer is not None}
        if not open_offers:
            return {name: curves[name][index].scheme for name, index in place.items()}
        best = max(open_offers, key=lambda name: open_offers[name].gain)
        place[best], left = open_offers[best].index, left - open_offers.pop(best).price
        del offers[best]


def _offer(curve: Curve, place: int, left: float) -> Offer | None:
    """The affordable step with the largest gain per cost, which may lie further along the curve."""
    here, best = curve[place], None
    for index in range(place + 1, len(curve)):
        price = curve[index].cost - here.cost
        gain = (_log(curve[index].energy) - _log(here.energy)) / max(1, price)
        if price <= left and gain > (best.gain if best else 0):
            best = Offer(index, gain, price)
    return best


def _log(energy: float) -> float:
    return math.log(max(energy, 1e-9))


def estimated(curves: Curves, chosen: Choice) -> int:
    """The cost of these choices according to the curves."""
    return sum(next(s.cost for s in curve if s.scheme == chosen[name]) for name, curve in curves.items())


def schemes_of(chosen: Choice) -> dict[str, Scheme]:
    """The scheme of each layer that does not stay dense."""
    return {name: scheme for name, scheme in chosen.items() if scheme is not None}


def layer_curves(
    model: nn.Module, convs: Convs, kind: str, input_size: InputSize, options: Callable[[str], Options]
) -> tuple[dict[str, Curve], int]:
    """The curve of each conv that runs on one image of this size, and the cost of everything else.

    Steps that keep no more than a cheaper one are left out.
    """
    found = count(model, input_size)
    dense = {row.name: row.macs for row in found.layers if row.name in convs}
    if kind == "params":
        dense = {name: sum(p.numel() for p in convs[name].parameters()) for name in dense}
    curves = {}
    for name, whole in dense.items():
        conv, steps = convs[name], []
        for scheme, kept in options(name):
            pixels = whole / conv.weight.numel()
            cost = scheme.params(conv) if kind == "params" else round(pixels * scheme.macs(conv))
            steps.append(Step(scheme, cost, kept))
        cheaper = sorted((step for step in steps if step.cost < whole), key=lambda step: step.cost)
        best = accumulate((step.energy for step in cheaper), max, initial=-1.0)
        # The share of a layer of zeros is no number: it keeps its steps, and none gains anything.
        rising = [step for step, before in zip(cheaper, best, strict=False) if not step.energy <= before]
        curves[name] = [*rising, Step(None, whole, 1.0)]
    whole = found.params if kind == "params" else found.macs
    return curves, whole - sum(dense.values())


def fresh_options(conv: nn.Conv2d, schemes: Sequence[Scheme]) -> Options:
    """What may replace a layer that is trained from scratch, with its share of the weights."""
    several = (one for scheme in schemes for one in _fewer_filters(conv, scheme))
    return [(one, min(1.0, one.params(conv) / conv.weight.numel())) for one in several]


def _fewer_filters(conv: nn.Conv2d, scheme: Scheme) -> dict[Scheme, None]:
    """The scheme with its own number of basis filters, and with fewer and fewer where something mixes them."""
    filters, groups = outputs_of(conv), groups_of(conv)
    if filters // groups < len(scheme.shapes) or (isinstance(conv, nn.Conv3d) and 3 not in scheme.dimensions):
        return {}
    schemes = {scheme: None}
    if scheme.mixes:
        units = [max(groups, round(share * filters / groups) * groups) for share in SHARES]
        most = scheme.stages((3,) * scheme.dimensions[0], filters, channel_groups=groups)[0].filters
        schemes |= {replace(scheme, m=m): None for m in units if len(scheme.shapes) <= m < most}
    return schemes


def by_latency(
    model: nn.Module, curves: Curves, share: float, input_size: InputSize, rounds: int = 5
) -> dict[str, Scheme | None]:
    """The largest MAC budget, found by halving, whose network takes at most `share` of the dense one's time."""
    low, high = sum(c[0].cost for c in curves.values()), sum(c[-1].cost for c in curves.values())
    found = None
    for index in range(rounds):
        budget = low if index == 0 else (low + high) / 2
        chosen = allocate(curves, budget)
        if _time_ratio(model, chosen, input_size) <= share:
            found, low = chosen, budget
        elif index == 0:
            break
        else:
            high = budget
    if found is None:
        raise LowRankError(
            f"even the fewest filters take more than {share:.0%} of the dense network's time here; a thinner "
            "network may take less (`thin`)."
        )
    return found


@torch.no_grad()
def _time_ratio(model: nn.Module, chosen: Choice, input_size: InputSize) -> float:
    """The time of the network with these filters over that of the dense one, run in turns on one image."""
    dense = copy_with(model).eval()
    small = rewrite(model, schemes_of(chosen)).eval()
    like = next(model.parameters())
    args, kwargs = arguments(input_size, device=like.device, dtype=like.dtype)
    runs = {"dense": lambda: dense(*args, **kwargs), "small": lambda: small(*args, **kwargs)}
    times = measure(runs, repeats=7, cuda=like.is_cuda)
    return times["small"].ms / times["dense"].ms
