"""How many basis filters a trained layer needs: the share of it that m of them keep, as a curve over m."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import InputSize
from lowrank_cnn.method.activations import output_error, outputs, refit, seen, window_covariance
from lowrank_cnn.method.budget import Convs, Curve, Step, dense_costs, step_cost
from lowrank_cnn.method.chains import FactoredConv2d, FactoredLayer, groups_of
from lowrank_cnn.method.factorize import CPFactors, cp_factors
from lowrank_cnn.method.rewrite import copy_with, replacement
from lowrank_cnn.method.schemes import (
    SCHEMES,
    Scheme,
    fit_layer,
)

Keeps = Callable[[int], float]
"""The share of a layer that m basis filters keep."""
_STEPS = 96
"""Steps into which the range of m is divided when layers compete for a budget."""
_FITTED = 12
"""Steps at which a basis and its join are really fitted; the energy between them is interpolated."""
WHOLE = 8
"""Under a budget, filter groups are multiples of this, as fast kernels need."""
_UNITS = 16
"""A layer with fewer units to choose from than this is not rounded to whole units: that would be too coarse."""
BELOW = 1 / 3
"""The share of a layer's MACs below which CP is tried in place of a separable pair."""
_MOST_WORK = 3e8
"""Weights times components up to which CP is tried under a budget: beyond, a fit takes minutes."""


def by_energy(
    convs: Convs,
    scheme: Scheme,
    energy: float,
    measured: Mapping[str, Keeps] | None = None,
    *,
    allow_costlier: bool = False,
) -> dict[str, Scheme]:
    """For each layer the fewest filters that keep `energy`.

    A layer that would not get cheaper is left out, unless `allow_costlier`: then it gets at most the filters that
    improve the fit.
    """
    chosen = {}
    for name, conv in convs.items():
        keeps = measured[name] if measured else keeper(conv, scheme)
        most = scheme.useful_rank(conv) * groups_of(conv) if allow_costlier else dearest(conv, scheme)
        if allow_costlier or (most and keeps(most) >= energy):
            m = 1 + bisect_left(range(1, most), energy, key=keeps)
            chosen[name] = replace(scheme, m=m + -m % groups_of(conv))
    return chosen


def curves_of(
    model: nn.Module,
    convs: Convs,
    scheme: Scheme,
    input_size: InputSize,
    *,
    kind: str = "macs",
    keeps: Mapping[str, Keeps] | None = None,
) -> tuple[dict[str, Curve], int]:
    """Each layer's choices for one image of this size, and the cost of all other layers.

    `keeps` replaces the share of squared weights that a layer keeps by a measured one.
    """
    dense, rest = dense_costs(model, convs, kind, input_size)
    given = keeps or {}
    return {name: _curve(convs[name], scheme, cost, kind, given.get(name)) for name, cost in dense.items()}, rest


def sizes_of(conv: nn.Conv2d, scheme: Scheme, steps: int) -> list[int]:
    """Numbers of basis filters to try, from few to the most with which the layer is still cheaper than dense."""
    most, unit = dearest(conv, scheme), _unit(conv, scheme)
    few = [m for m in range(groups_of(conv), unit, groups_of(conv)) if m <= most]  # below one whole unit
    return [*(few if steps == _STEPS else few[:1]), *_spread(most // unit, steps, unit)]


def dearest(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The most basis filters with which a layer is still cheaper than dense and gains by more; zero for none."""
    cheaper = bisect_left(
        range(1, scheme.useful_rank(conv) + 1),
        conv.weight.numel(),
        key=lambda n: replace(scheme, m=n * groups_of(conv)).macs(conv),
    )
    return cheaper * groups_of(conv)


def keeper(conv: nn.Conv2d, scheme: Scheme) -> Keeps:
    """The share of squared weights that m basis filters keep, as a function of m."""
    kept = scheme.spectrum(conv)
    if kept is None:
        return lambda m: replace(scheme, m=m).energy(conv)
    return lambda m: float(kept[min(max(1, m // groups_of(conv)), len(kept)) - 1])


def weights_keeper(conv: nn.Conv2d, scheme: Scheme) -> Keeps:
    """`keeper`, interpolated between a few numbers of filters where every one of them takes a fit."""
    keeps = keeper(conv, scheme)
    if scheme.spectrum(conv) is not None:
        return keeps
    return between([(m, keeps(m)) for m in dict.fromkeys(sizes_of(conv, scheme, _FITTED))])


def between(points: Sequence[tuple[int, float]]) -> Keeps:
    """Linear interpolation through (0, 0) and these points, constant after the last."""
    known = [(0, 0.0), *points]

    def value(m: int) -> float:
        m = min(m, known[-1][0])
        index = bisect_left(known, m, key=lambda point: point[0])
        (left, low), (right, high) = known[max(0, index - 1)], known[index]
        return high if right <= left else low + (high - low) * (m - left) / (right - left)

    return value


def better_by_cp(
    convs: Mapping[str, nn.Conv2d], schemes: Mapping[str, Scheme]
) -> tuple[dict[str, Scheme], dict[str, CPFactors]]:
    """Separable schemes, and CP for the layers that it fits better at the same MACs; the factors of these."""
    chosen, fits = dict(schemes), {}
    for name, separable in schemes.items():
        conv = convs[name]
        m = _components(conv, separable.macs(conv))
        if conv.groups > 1 or separable.relative_cost(conv) >= BELOW or m < 1:
            continue
        found = cp_factors(conv.weight, m) if conv.weight.numel() * m <= _MOST_WORK else None
        assert isinstance(separable.m, int)
        if found is not None and found.energy > keeper(conv, separable)(separable.m):
            chosen[name], fits[name] = replace(SCHEMES["cp"], m=m), found
    return chosen, fits


def _curve(conv: nn.Conv2d, scheme: Scheme, dense: int, kind: str, keeps: Keeps | None) -> Curve:
    sizes = sizes_of(conv, scheme, _STEPS)
    keeps = keeps or weights_keeper(conv, scheme)
    schemes = [(m, replace(scheme, m=m)) for m in sizes]
    steps = [Step(one, step_cost(conv, one, dense, kind), keeps(m)) for m, one in schemes]
    return [*(step for step in steps if step.cost < dense), Step(None, dense, 1.0)]


def _unit(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The step of m that fills whole groups of filters; a smaller one for small layers, where it is too coarse."""
    parts = math.lcm(*((share / sum(scheme.shares)).denominator for share in scheme.shares))
    unit = math.lcm(WHOLE * parts, groups_of(conv))
    return unit if dearest(conv, scheme) >= _UNITS * unit else groups_of(conv)


def _spread(most: int, steps: int, unit: int) -> list[int]:
    """Whole multiples of the unit, evenly up to the most."""
    return sorted({unit * max(1, round(most * i / steps)) for i in range(1, steps + 1)}) if most else []


def _components(conv: nn.Conv2d, most: int) -> int:
    """The most components that cost no more MACs per pixel than this."""
    if conv.groups > 1:
        return 0
    sizes = range(1, most + 1)
    return bisect_right(sizes, most, key=lambda m: replace(SCHEMES["cp"], m=m).macs(conv))


# Measure how much of a network's output, or of its score, remains when one layer is decomposed.

Score = Callable[[nn.Module], float]
"""The quality of a network, such as its accuracy: positive, and higher for a better network."""
_TRIED = 6
"""Numbers of basis filters that are tried for a layer; between them, the share kept is interpolated."""


@torch.no_grad()
def measured_keeps(
    model: nn.Module,
    convs: Mapping[str, nn.Conv2d],
    scheme: Scheme,
    batches: Sequence[Tensor],
    score: Score | None = None,
    *,
    refitting: bool = True,
) -> dict[str, Keeps]:
    """For each layer, what the network keeps with m basis filters in that layer alone.

    By images it is one less the relative squared error of the output, each layer refitted as in the end (unless
    `refitting` is off); by a `score` it is the score over that of the original.
    """
    right = outputs(model, batches) if batches else None
    whole = _scored(score, model) if score else 1.0
    if not 0 < whole < math.inf:
        raise LowRankError(f"evaluate scores the network itself with {whole}: a score is positive.")
    keeps = {}
    for name, conv in convs.items():
        points = []
        given = seen(model, conv, batches) if batches and refitting else []
        for m in dict.fromkeys(sizes_of(conv, scheme, _TRIED)):
            layer = data_fitted(name, conv, replace(scheme, m=m), given)
            trial = copy_with(model, {conv: layer})
            if score is not None:
                kept = _scored(score, trial) / whole
            else:
                assert right is not None
                kept = 1 - output_error(outputs(trial, batches), right)
            points.append((m, min(max(kept, 1e-9), 1.0)))
        rising = accumulate((kept for _, kept in points), max)  # more filters never count for less
        keeps[name] = between([(m, kept) for (m, _), kept in zip(points, rising, strict=True)])
    return keeps


@torch.no_grad()
def data_fitted(name: str, conv: nn.Conv2d, scheme: Scheme, given: Sequence[tuple[Tensor, Tensor]]) -> nn.Module:
    """A replacement fitted to the weights of a conv and, where they are given, to its inputs and outputs."""
    layer = replacement(conv, scheme)
    inputs = [x for x, _ in given]
    covariance = window_covariance(layer, inputs) if given and scheme.weighs_inputs else None  # type: ignore[arg-type]
    fit_layer(name, conv, layer, covariance)
    if given and isinstance(layer, FactoredConv2d | FactoredLayer):
        refit(layer, inputs, [y for _, y in given])
    return layer


def _scored(score: Score, model: nn.Module) -> float:
    value = score(copy_with(model))
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise LowRankError(f"evaluate gives a number, more for a better network, not {value!r}.")
    return float(value)
