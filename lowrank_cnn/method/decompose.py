"""Fit low-rank filters to a trained network, as an alternative to training them from scratch.

Each spatial conv is replaced, under a scheme that ends in a mixing layer (`separable`, `lr-join`, a mixture with a
join), by the filters nearest to its own; the network then usually needs fine-tuning, with the ordinary trainer.
The number m of basis filters is the scheme's own, or is chosen for each layer from what is to be kept or spent.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import InputSize, known_inputs
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.method.activations import (
    Images,
    image_batches,
    output_error,
    outputs,
    refit,
    seen,
    window_covariance,
)
from lowrank_cnn.method.budget import Budget, Convs, Curve, Step, dense_costs, step_cost, within
from lowrank_cnn.method.chains import FactoredConv2d, FactoredLayer, groups_of, outputs_of
from lowrank_cnn.method.convert import cheaper_only, check_channels, nothing_cheaper, warn_of_slow_layers
from lowrank_cnn.method.factorize import CPFactors, cp_factors
from lowrank_cnn.method.rewrite import check_calls, copy_with, replacement, rewrite
from lowrank_cnn.method.schemes import SCHEMES, Fitted, Scheme, fit_layer, is_depthwise, parse_scheme
from lowrank_cnn.method.select import Kept, Where, select

__all__ = ["Fitted", "decompose", "fit_layer"]

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
Score = Callable[[nn.Module], float]
"""The quality of a network, such as its accuracy: positive, and higher for a better network."""
_TRIED = 6
"""Numbers of basis filters that are tried for a layer; between them, the share kept is interpolated."""


@unchanged()  # layers draw weights when they are built, and these are fitted
@progress("decompose")
def decompose(
    model: nn.Module,
    scheme: str | Scheme = "separable",
    *,
    where: Where = None,
    energy: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    input_size: InputSize | None = None,
    images: Images | None = None,
    evaluate: Score | None = None,
    allow_costlier: bool = False,
) -> nn.Module:
    """A copy of `model` whose spatial convs are the low-rank filters nearest to the trained ones.

    The scheme `channel` takes 1-D, 3-D, transposed and 1x1 convs and linear layers as well, and `2+1` 3-D convs,
    each as a conv within frames and one along time; `separable` takes
    depthwise convs apart into strips where their kernel is large, or where they are named. The scheme `cp` (by
    tensorly: `pip install ".[cp]"`) replaces a conv by a 1x1, two depthwise strips and a 1x1. Under a
    budget it does so for layers that keep less than a third of their MACs and fit better so; the others become
    separable pairs. `bands` and `lr` fit depthwise convs alone: their filters keep the taps that they have, and
    channels that pass lose theirs, so that the network needs fine-tuning.

    At most one of these says how many basis filters a layer gets, in place of the scheme's m:

    - `energy`: the fewest that keep this share of the layer's squared weights;
    - `macs`, `params`: those that keep most, over all layers, within this share of the network's cost;
    - `latency`: likewise, within this share of the time that the dense network takes on one image, measured here.

    A few `images` (a tensor or batches, as the network takes them; labels are not used) improve the fit. The
    effect of a layer is then measured at the network's output, filters are fitted to their outputs for these
    images, and the second half of each layer is refitted to the original's activations by least squares. Ranks by
    weights, by measured effect and by both compete; the network with the nearest output wins. With `evaluate`, a
    function that scores a network, layers compete by the score that they keep.

    A layer that would not get cheaper stays dense, unless `allow_costlier`. The bias goes to the last layer of a
    chain; frozen layers stay frozen. The `notes` of the result hold its `decomposition`, a line per layer, and its
    `conversion`, as `convert` leaves it.

    >>> from lowrank_cnn.core.notes import notes
    >>> new = decompose(nn.Sequential(nn.Conv2d(16, 32, 5)), energy=0.5)
    >>> all(row.energy > 0.5 for row in notes(new).decomposition)
    True
    """
    scheme = parse_scheme(scheme)
    budget = Budget.of(energy=energy, macs=macs, params=params, latency=latency)
    _check(scheme, budget)
    by_fit = scheme.rival is not None and budget is not None
    scheme = SCHEMES[scheme.rival] if scheme.rival and by_fit else scheme
    fits: dict[str, CPFactors] = {}
    convs, kept = _fittable(model, scheme, where)
    batches = image_batches(images, model) if images is not None else []
    if budget is None:
        schemes, costlier = _as_asked(convs, scheme, allow_costlier)
        kept += costlier
        choices = [schemes]
    else:
        keeps = measured_keeps(model, convs, scheme, batches, evaluate) if batches or evaluate else None
        size = tuple(batches[0].shape[1:]) if input_size is None and batches else input_size
        measures = [keeps]
        if keeps and batches and not evaluate and not by_fit and budget.kind in ("macs", "params"):
            measures += [None, both_keeps(convs, scheme, keeps)]
        choices = [_chosen(model, convs, scheme, budget, size, one, allow_costlier) for one in measures]
        if by_fit:
            choices[0], fits = better_by_cp(convs, choices[0])
    if not any(choices):
        raise LowRankError(nothing_cheaper(scheme))
    stay = (
        tuple(Kept(name, type(conv).__name__, "cheaper dense") for name, conv in convs.items()) if budget else ()
    )
    new, report = nearest_output(model, choices, batches, kept=(*kept, *stay), fits=fits)
    if input_size is not None:
        check_calls(model, new, list(report), input_size)
    if budget is None or budget.kind != "latency":
        warn_of_slow_layers(new, report)
    note(new, decomposition=tuple(report.values()))
    return new


@torch.no_grad()
def nearest_output(
    model: nn.Module,
    choices: Sequence[dict[str, Scheme]],
    batches: Sequence[Tensor],
    *,
    kept: tuple[Kept, ...] = (),
    fits: Mapping[str, CPFactors] = MappingProxyType({}),
) -> tuple[nn.Module, dict[str, Fitted]]:
    """The network and the fits of the choice of schemes whose outputs on the images are nearest to the original's.

    Every choice is fitted to the weights, then refitted to the images; either may be the nearest. A single choice
    gives the refitted network.
    """
    right = outputs(model, batches) if len(choices) > 1 else None
    found: list[tuple[float, nn.Module, dict[str, Fitted]]] = []
    for schemes in (choice for place, choice in enumerate(choices) if choice not in choices[:place]):
        report: dict[str, Fitted] = {}

        def fill(name: str, conv: nn.Conv2d, layer: nn.Module, report: dict[str, Fitted] = report) -> None:
            report[name] = fit_layer(name, conv, layer, factors=fits.get(name))

        rest = tuple(one for one in kept if one.name not in schemes)
        new = rewrite(model, schemes, fill=fill, kept=rest)
        if right is not None:
            found.append((output_error(outputs(new, batches), right), copy_with(new), dict(report)))
        if batches:
            report = refitted(model, new, report, batches)
        error = 0.0 if right is None else output_error(outputs(new, batches), right)
        found.append((error, new, report))
    _, new, report = min(found, key=lambda one: one[0])
    return new, report


def both_keeps(convs: Mapping[str, nn.Conv2d], scheme: Scheme, measured: Mapping[str, Keeps]) -> dict[str, Keeps]:
    """The geometric mean of the shares that layers keep by their weights and by their measured effect."""
    found: dict[str, Keeps] = {}
    for name, conv in convs.items():
        curves = energy_curve(conv, scheme, interpolated=True), measured[name]
        found[name] = lambda m, curves=curves: math.sqrt(curves[0](m) * curves[1](m))
    return found


@torch.no_grad()
def refitted(
    model: nn.Module, new: nn.Module, report: dict[str, Fitted], batches: Sequence[Tensor]
) -> dict[str, Fitted]:
    """Refit layer by layer, in the order of definition, to the original's activations on the images."""
    found = dict(report)
    for name in report:
        step(f"{name} is fitted again")
        conv, layer = model.get_submodule(name), new.get_submodule(name)
        if not isinstance(layer, FactoredConv2d | FactoredLayer):  # bands have no second half to refit
            continue
        right = [y for _, y in seen(model, conv, batches)]
        inputs = [x for x, _ in seen(new, layer, batches)]
        if not right or len(right) != len(inputs):  # a layer that is not called, or not as often
            continue
        if layer.scheme.weighs_inputs:
            fit_layer(name, conv, layer, window_covariance(layer, inputs))  # type: ignore[arg-type]
        found[name] = replace(report[name], error=refit(layer, inputs, right))
    return found


def _as_asked(
    convs: dict[str, nn.Conv2d], scheme: Scheme, allow_costlier: bool
) -> tuple[dict[str, Scheme], tuple[Kept, ...]]:
    """The scheme itself; if it sets no m, with at most as many filters as improve the fit."""
    schemes = {}
    for name, conv in convs.items():
        if not scheme.mixes:
            schemes[name] = scheme
            continue
        most = scheme.useful_rank(conv) * groups_of(conv)
        capped = scheme.m is None and most < outputs_of(conv)
        schemes[name] = replace(scheme, m=most) if capped else scheme
    return (schemes, ()) if allow_costlier else cheaper_only(convs, schemes)


def _chosen(
    model: nn.Module,
    convs: dict[str, nn.Conv2d],
    scheme: Scheme,
    budget: Budget,
    input_size: InputSize | None,
    keeps: dict[str, Keeps] | None,
    allow_costlier: bool,
) -> dict[str, Scheme]:
    """Choose the number of basis filters of each layer under a budget."""
    if budget.kind == "energy":
        return by_energy(convs, scheme, budget.share, keeps, allow_costlier=allow_costlier)
    size = known_inputs(model, input_size)
    curves, rest = curves_of(model, convs, scheme, size, kind=budget.kind, keeps=keeps)
    return within(model, curves, rest, budget, size)


def _check(scheme: Scheme, budget: Budget | None) -> None:
    if not scheme.mixes and (budget is not None or not scheme.takes_depthwise or not scheme.saves):
        raise LowRankError(_MIXES_NOTHING.format(scheme))
    if scheme.channel_groups > 1:
        raise LowRankError(
            f"trained filters see all channels, and those of {scheme} a part: leave channel_groups out, or train "
            "from scratch with convert."
        )
    check_channels(scheme)


_MIXES_NOTHING = (
    "trained filters cannot be fitted by {}, which mixes nothing after its filters: use separable, cp, lr-join or "
    "a mixture with a join."
)


def _fittable(model: nn.Module, scheme: Scheme, where: Where) -> tuple[dict[str, nn.Conv2d], tuple[Kept, ...]]:
    """The convs to fit, and those that stay; raises an error for weights that are missing or not finite."""
    convs, kept = select(model, scheme, where)
    if not scheme.mixes:  # then it fits depthwise filters alone, each by itself
        convs = {name: conv for name, conv in convs.items() if is_depthwise(conv)}
        if not convs:
            raise LowRankError(_MIXES_NOTHING.format(scheme))
    if any(conv.weight.is_meta for conv in convs.values()):
        raise LowRankError("there are no weights to fit: the network is on the meta device.")
    for name, conv in convs.items():
        if not bool(conv.weight.isfinite().all()):
            raise LowRankError(f"{name or 'the conv'} has weights that are not finite: nothing can be fitted.")
    return convs, kept


# How many basis filters a layer needs: the share of it that m of them keep, as a curve over m.


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
        keeps = measured[name] if measured else energy_curve(conv, scheme)
        most = scheme.useful_rank(conv) * groups_of(conv) if allow_costlier else max_useful_rank(conv, scheme)
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
    most, unit = max_useful_rank(conv, scheme), _unit(conv, scheme)
    few = [m for m in range(groups_of(conv), unit, groups_of(conv)) if m <= most]  # below one whole unit
    return [*(few if steps == _STEPS else few[:1]), *_spread(most // unit, steps, unit)]


def max_useful_rank(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The most basis filters with which a layer is still cheaper than dense and gains by more; zero for none."""
    cheaper = bisect_left(
        range(1, scheme.useful_rank(conv) + 1),
        conv.weight.numel(),
        key=lambda n: replace(scheme, m=n * groups_of(conv)).macs(conv),
    )
    return cheaper * groups_of(conv)


def energy_curve(conv: nn.Conv2d, scheme: Scheme, *, interpolated: bool = False) -> Keeps:
    """The share of squared weights that m basis filters keep, as a function of m.

    If every m needs a fit of its own, `interpolated` fits a few and interpolates between them.
    """
    kept = scheme.spectrum(conv)
    if kept is not None:
        return lambda m: float(kept[min(max(1, m // groups_of(conv)), len(kept)) - 1])

    def fitted(m: int) -> float:
        return replace(scheme, m=m).energy(conv)

    sizes = dict.fromkeys(sizes_of(conv, scheme, _FITTED)) if interpolated else ()
    return between([(m, fitted(m)) for m in sizes]) if interpolated else fitted


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
        if conv.groups > 1 or separable.relative_cost(conv) >= BELOW:
            continue
        if not (m := _components(conv, separable.macs(conv))):
            continue
        found = cp_factors(conv.weight, m) if conv.weight.numel() * m <= _MOST_WORK else None
        assert isinstance(separable.m, int)
        if found is not None and found.energy > energy_curve(conv, separable)(separable.m):
            chosen[name], fits[name] = replace(SCHEMES["cp"], m=m), found
    return chosen, fits


def _curve(conv: nn.Conv2d, scheme: Scheme, dense: int, kind: str, keeps: Keeps | None) -> Curve:
    sizes = sizes_of(conv, scheme, _STEPS)
    keeps = keeps or energy_curve(conv, scheme, interpolated=True)
    schemes = [(m, replace(scheme, m=m)) for m in sizes]
    steps = [Step(one, step_cost(conv, one, dense, kind), keeps(m)) for m, one in schemes]
    return [*(step for step in steps if step.cost < dense), Step(None, dense, 1.0)]


def _unit(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The step of m that fills whole groups of filters; a smaller one for small layers, where it is too coarse."""
    parts = math.lcm(*((share / sum(scheme.shares)).denominator for share in scheme.shares))
    unit = math.lcm(WHOLE * parts, groups_of(conv))
    return unit if max_useful_rank(conv, scheme) >= _UNITS * unit else groups_of(conv)


def _spread(most: int, steps: int, unit: int) -> list[int]:
    """Whole multiples of the unit, evenly up to the most."""
    return sorted({unit * max(1, round(most * i / steps)) for i in range(1, steps + 1)}) if most else []


def _components(conv: nn.Conv2d, most: int) -> int:
    """The most components that cost no more MACs per pixel than this."""
    sizes = range(1, most + 1)
    return bisect_right(sizes, most, key=lambda m: replace(SCHEMES["cp"], m=m).macs(conv))


# Measure how much of a network's output, or of its score, remains when one layer is decomposed.


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
