"""Fit low-rank filters to a trained network, as an alternative to training them from scratch.

Each spatial conv is replaced, under a scheme that ends in a mixing layer (`separable`, `lr-join`, a mixture with a
join), by the filters nearest to its own; the network then usually needs fine-tuning, with the ordinary trainer.
The number m of basis filters is the scheme's own, or is chosen for each layer from what is to be kept or spent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from lowrank_cnn.method.budget import Budget, within
from lowrank_cnn.method.chains import FactoredConv2d, FactoredLayer, groups_of, outputs_of
from lowrank_cnn.method.convert import cheaper_only, check_channels, nothing_cheaper, warn_of_slow_layers
from lowrank_cnn.method.factorize import CPFactors
from lowrank_cnn.method.ranks import (
    Keeps,
    Score,
    better_by_cp,
    by_energy,
    curves_of,
    measured_keeps,
    weights_keeper,
)
from lowrank_cnn.method.rewrite import check_calls, copy_with, rewrite
from lowrank_cnn.method.schemes import (
    SCHEMES,
    Fitted,
    Scheme,
    fit_layer,
    parse_scheme,
)
from lowrank_cnn.method.select import Kept, Where, select

__all__ = ["Fitted", "decompose", "fit_layer"]


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

    The scheme `channel` takes 1-D, 3-D, transposed and 1x1 convs and linear layers as well; `separable` takes
    depthwise convs apart into strips where their kernel is large, or where they are named. The scheme `cp` (by
    tensorly: `pip install "lowrank-cnn[cp]"`) replaces a conv by a 1x1, two depthwise strips and a 1x1. Under a
    budget it does so for layers that keep less than a third of their MACs and fit better so; the others become
    separable pairs.

    At most one of these says how many basis filters a layer gets, in place of the scheme's m:

    - `energy`: the fewest that keep this share of the layer's squared weights;
    - `macs`, `params`: those that keep most, over all layers, within this share of the network's cost;
    - `latency`: likewise, within this share of the time that the dense network takes on one image, measured here.

    A few `images` (a tensor or batches, as the network takes them; labels are not used) make both choices better:
    what a layer keeps is then measured at the network's output, filters are nearest in what they give for such
    images, and the second half of each layer is refitted to the original's activations by least squares. Ranks by
    weights, by measured effect and by both compete: the network with the nearest output is taken. With
    `evaluate`, a function that scores a network, layers compete by the score that they keep.

    A layer that would not get cheaper stays dense, unless `allow_costlier`. The bias goes to the last layer of a
    chain; frozen layers stay frozen. The `notes` of the result hold its `decomposition`, a line per layer, and its
    `conversion`, as `convert` leaves it.

    >>> from lowrank_cnn.core.notes import notes
    >>> new = decompose(nn.Sequential(nn.Conv2d(16, 32, 5)), energy=0.5)
    >>> all(row.energy > 0.5 for row in notes(new).decomposition)
    True
    """
    scheme = parse_scheme(scheme)
    _check(scheme)
    budget = Budget.of(energy=energy, macs=macs, params=params, latency=latency)
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
        compete = bool(batches) and not evaluate and not by_fit
        options = _competing(convs, scheme, budget, keeps) if compete else [keeps]
        choices = [_chosen(model, convs, scheme, budget, size, one, allow_costlier) for one in options]
        if by_fit:
            choices[0], fits = better_by_cp(convs, choices[0])
    if not any(choices):
        raise LowRankError(nothing_cheaper(scheme))
    stay = tuple(Kept(name, "Conv2d", "cheaper dense") for name in convs) if budget else ()
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

    Every choice is fitted to the weights, then refitted to the images; either may be the nearest. Of one choice,
    the refitted network is taken.
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


def _competing(
    convs: Mapping[str, nn.Conv2d], scheme: Scheme, budget: Budget, measured: dict[str, Keeps] | None
) -> list[dict[str, Keeps] | None]:
    """What ranks are chosen by: the measured effect, and under a budget of cost also the weights, and both."""
    if measured is None or budget.kind not in ("macs", "params"):
        return [measured]
    return [measured, None, both_keeps(convs, scheme, measured)]


def both_keeps(convs: Mapping[str, nn.Conv2d], scheme: Scheme, measured: Mapping[str, Keeps]) -> dict[str, Keeps]:
    """What layers keep by their weights and by their measured effect together: the geometric mean."""

    def mean(weights: Keeps, effect: Keeps) -> Keeps:
        return lambda m: math.sqrt(weights(m) * effect(m))

    return {name: mean(weights_keeper(conv, scheme), measured[name]) for name, conv in convs.items()}


@torch.no_grad()
def refitted(
    model: nn.Module, new: nn.Module, report: dict[str, Fitted], batches: Sequence[Tensor]
) -> dict[str, Fitted]:
    """Refit layer by layer, in the order of definition, to the original's activations on the images."""
    found = dict(report)
    for name in report:
        step(f"{name} is fitted again")
        conv, layer = model.get_submodule(name), new.get_submodule(name)
        assert isinstance(layer, FactoredConv2d | FactoredLayer)
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


def _check(scheme: Scheme) -> None:
    if not scheme.mixes:
        raise LowRankError(
            f"trained filters cannot be fitted by {scheme}, which mixes nothing after its filters: "
            "use separable, cp, lr-join or a mixture with a join."
        )
    if scheme.channel_groups > 1:
        raise LowRankError(
            f"trained filters see all channels, and those of {scheme} a part: leave channel_groups out, or train "
            "from scratch with convert."
        )
    check_channels(scheme)


def _fittable(model: nn.Module, scheme: Scheme, where: Where) -> tuple[dict[str, nn.Conv2d], tuple[Kept, ...]]:
    """The convs to fit, and those that stay; raises an error for weights that are missing or not finite."""
    convs, kept = select(model, scheme, where)
    if any(conv.weight.is_meta for conv in convs.values()):
        raise LowRankError("there are no weights to fit: the network is on the meta device.")
    for name, conv in convs.items():
        if not bool(conv.weight.isfinite().all()):
            raise LowRankError(f"{name or 'the conv'} has weights that are not finite: nothing can be fitted.")
    return convs, kept
