"""How many basis filters each layer of a decomposed network gets: by what is kept, or by what may be spent."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from lowrank_cnn.method.converting import rewrite
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.factorize import crossed_factors, crossed_weight, kept_energy, separable_energy
from lowrank_cnn.method.scheme import Scheme
from lowrank_cnn.system.clock import measure
from lowrank_cnn.system.errors import LowRankError

Convs = Mapping[str, nn.Conv2d]
Curves = Mapping[str, "Curve"]
_STEPS = 96
"""Into how many steps the range of m is divided where layers compete for a budget."""
_FITTED = 12
"""At how many of them a basis and its join are fitted; the energy between is interpolated."""
WHOLE = 8
"""Filters come in so many to a group under a budget: fast kernels take no others."""
_UNITS = 16
"""Where a layer can have fewer, whole units would be too coarse a choice."""
_SWEEPS = 2
"""A rough fit is enough to compare numbers of filters."""


@dataclass(frozen=True)
class Step:
    """A choice for one layer: m basis filters (None: the dense conv), their MACs, and the energy they keep."""

    m: int | None
    macs: int
    energy: float


Curve = list[Step]
"""The choices for one layer, from cheap to dense."""


def by_energy(convs: Convs, scheme: Scheme, energy: float) -> dict[str, Scheme]:
    """For each layer the fewest filters that keep `energy`; a layer that would not get cheaper is left out."""
    chosen = {}
    for name, conv in convs.items():
        keeps, most = _keeper(conv, scheme), dearest(conv, scheme)
        if most and keeps(most) >= energy:
            m = 1 + bisect_left(range(1, most), energy, key=keeps)
            chosen[name] = replace(scheme, m=m + -m % conv.groups)
    return chosen


def by_macs(curves: Curves, budget: float) -> dict[str, int | None]:
    """Spend `budget` MACs where they keep most of the product of all layers' energies.

    What passes through a chain of layers is the product of what each lets pass, so layers compete by the
    logarithm of energy gained per MAC, each with the best step that it can still pay for.
    """
    place = dict.fromkeys(curves, 0)
    left = budget - sum(curve[0].macs for curve in curves.values())
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
            return {name: curves[name][index].m for name, index in place.items()}
        best = max(open_offers, key=lambda name: open_offers[name].gain)
        place[best], left = open_offers[best].index, left - open_offers.pop(best).price
        del offers[best]


@dataclass(frozen=True)
class Offer:
    """A layer's best step: where on its curve it leads, the log energy it gains per MAC, and its MACs."""

    index: int
    gain: float
    price: float


def _offer(curve: Curve, place: int, left: float) -> Offer | None:
    """The step from here that gains most per MAC, of those that can be paid; a short curve may climb late."""
    here, best = curve[place], None
    for index in range(place + 1, len(curve)):
        price = curve[index].macs - here.macs
        gain = (_log(curve[index].energy) - _log(here.energy)) / max(1, price)
        if price <= left and gain > (best.gain if best else 0):
            best = Offer(index, gain, price)
    return best


def _log(energy: float) -> float:
    return math.log(max(energy, 1e-9))


def estimated(curves: Curves, chosen: Mapping[str, int | None]) -> int:
    """The MACs of these choices, as the curves have them."""
    return sum(step.macs for name, curve in curves.items() for step in curve if step.m == chosen[name])


def curves_of(
    model: nn.Module, convs: Convs, scheme: Scheme, input_size: Sequence[int]
) -> tuple[dict[str, Curve], int]:
    """Each layer's choices for one image of this size, and the MACs of everything that is not theirs."""
    cost = count(model, input_size)
    dense = {row.name: row.macs for row in cost.layers if row.name in convs}
    curves = {name: _curve(convs[name], scheme, macs) for name, macs in dense.items()}
    return curves, cost.macs - sum(dense.values())


def by_latency(
    model: nn.Module, curves: Curves, scheme: Scheme, share: float, input_size: Sequence[int], rounds: int = 5
) -> dict[str, int | None]:
    """The largest MAC budget, found by halving, whose network takes at most `share` of the dense one's time."""
    low, high = sum(c[0].macs for c in curves.values()), sum(c[-1].macs for c in curves.values())
    found = None
    for index in range(rounds):
        budget = low if index == 0 else (low + high) / 2
        chosen = by_macs(curves, budget)
        if _time_ratio(model, chosen, scheme, input_size) <= share:
            found, low = chosen, budget
        elif index == 0:
            break
        else:
            high = budget
    if found is None:
        raise LowRankError(f"even the fewest filters take more than {share:.0%} of the dense network's time here.")
    return found


def schemes_of(chosen: Mapping[str, int | None], scheme: Scheme) -> dict[str, Scheme]:
    """The scheme of each layer that does not stay dense."""
    return {name: replace(scheme, m=m) for name, m in chosen.items() if m is not None}


def dearest(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The most basis filters with which a layer is still cheaper than dense and gains by more; zero for none."""
    useful = _rank(conv, scheme)
    cheaper = bisect_left(
        range(1, useful + 1), conv.weight.numel(), key=lambda n: _cost(conv, scheme, n * conv.groups)
    )
    return cheaper * conv.groups


def _rank(conv: nn.Conv2d, scheme: Scheme) -> int:
    """With so many basis filters per channel group a fit is as near as the scheme allows."""
    depth, filters = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    first = replace(scheme, m=1000 * len(scheme.shapes)).stages(conv.kernel_size, conv.out_channels)[0]  # type: ignore[arg-type]
    if scheme.name == "separable":
        lying = first.kernel[0] == 1
        (height, width), taps = conv.kernel_size, first.groups[0].taps
        return min(depth * taps, filters * (height if lying else width))
    return max(-(-min(filters, depth * g.taps) * first.filters // g.filters) for g in first.groups)


def _cost(conv: nn.Conv2d, scheme: Scheme, m: int) -> int:
    """Weights, and so MACs per output pixel, of m basis filters and what follows; strides between included."""
    depth, groups = conv.in_channels // conv.groups, conv.groups
    basis, last = replace(scheme, m=m).stages(conv.kernel_size, conv.out_channels, channel_groups=groups)  # type: ignore[arg-type]
    first = basis.weights(depth)
    if scheme.name == "separable":
        first *= conv.stride[0] if basis.kernel[0] == 1 else conv.stride[1]
    return first + last.weights(m // groups)


def _keeper(conv: nn.Conv2d, scheme: Scheme) -> Callable[[int], float]:
    """The share of energy that m basis filters keep, as a function of m."""
    weight = conv.weight.detach().double()
    if scheme.name == "separable":
        kept = separable_energy(weight, lying_first=scheme.shapes[0][0].startswith("1x"), groups=conv.groups)
        return lambda m: float(kept[min(max(1, m // conv.groups), len(kept)) - 1])
    return lambda m: _crossed_energy(weight, conv, replace(scheme, m=m))


def _crossed_energy(weight: Tensor, conv: nn.Conv2d, scheme: Scheme) -> float:
    basis, _ = scheme.stages(conv.kernel_size, conv.out_channels)  # type: ignore[arg-type]
    filters, join = crossed_factors(weight, basis, sweeps=_SWEEPS)
    return kept_energy(weight, crossed_weight(filters, join))


def _curve(conv: nn.Conv2d, scheme: Scheme, dense_macs: int) -> Curve:
    pixels, most, unit = dense_macs / conv.weight.numel(), dearest(conv, scheme), _unit(conv, scheme)
    few = [m for m in range(conv.groups, unit, conv.groups) if m <= most]  # for what buys no whole unit
    sizes = [*few, *_spread(most // unit, _STEPS, unit)]
    keeps = _keeper(conv, scheme)
    if scheme.name != "separable":
        fitted = [*few[:1], *_spread(most // unit, _FITTED, unit)]
        keeps = _between([(m, keeps(m)) for m in dict.fromkeys(fitted)])
    steps = [Step(m, round(pixels * _cost(conv, scheme, m)), keeps(m)) for m in sizes]
    return [*steps, Step(None, dense_macs, 1.0)]


def _unit(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The least m whose groups of filters are all whole; in small layers, where that is coarse, any m will do."""
    shares = [share for _, share in scheme.shapes] if scheme.name != "separable" else [Fraction(1)]
    parts = math.lcm(*((share / sum(shares)).denominator for share in shares))
    unit = math.lcm(WHOLE * parts, conv.groups)
    return unit if dearest(conv, scheme) >= _UNITS * unit else conv.groups


def _spread(most: int, steps: int, unit: int) -> list[int]:
    """Whole multiples of the unit, evenly up to the most."""
    return sorted({unit * max(1, round(most * i / steps)) for i in range(1, steps + 1)}) if most else []


def _between(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Through these points by straight lines, and from none at all to the first."""
    known = [(0, 0.0), *points]

    def value(m: int) -> float:
        index = min(bisect_left(known, m, key=lambda point: point[0]), len(known) - 1)
        (left, low), (right, high) = known[max(0, index - 1)], known[index]
        return high if right <= left else low + (high - low) * (m - left) / (right - left)

    return value


@torch.no_grad()
def _time_ratio(
    model: nn.Module, chosen: Mapping[str, int | None], scheme: Scheme, input_size: Sequence[int]
) -> float:
    """The time of the network with these filters over that of the dense one, run in turns on one image."""
    dense = copy.deepcopy(model).eval()
    small = rewrite(model, schemes_of(chosen, scheme)).eval()
    like = next(model.parameters())
    image = torch.randn(1, *input_size, device=like.device, dtype=like.dtype)
    times = measure({"dense": lambda: dense(image), "small": lambda: small(image)}, repeats=7, cuda=image.is_cuda)
    return times["small"].ms / times["dense"].ms
