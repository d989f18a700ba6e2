"""Fit low-rank filters to a trained network, as an alternative to training them from scratch.

Each spatial conv is replaced, under a scheme that ends in a mixing layer (`separable`, `lr-join`, a mixture with a
join), by the filters nearest to its own; the network then usually needs fine-tuning, with the ordinary trainer.
The number m of basis filters is the scheme's own, or is chosen for each layer from what is to be kept or spent.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd
from torch.utils.data import Dataset, IterableDataset

from lowrank_cnn.core.compare import copied, tensors_of, unchanged
from lowrank_cnn.core.errors import LowRankError, explained
from lowrank_cnn.core.modules import InputSize, first_input, known_inputs
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.method.budget import Budget, Convs, Curve, Options, layer_curves, within
from lowrank_cnn.method.chains import FactoredConv2d, FactoredLayer, groups_of, outputs_of
from lowrank_cnn.method.convert import cheaper_only, check_layers, nothing_cheaper
from lowrank_cnn.method.factorize import CPFactors, cp_factors
from lowrank_cnn.method.layers import CompositeConv2d, enclosing_padding, set_weights, weights_of
from lowrank_cnn.method.rewrite import copy_with, replacement, rewrite
from lowrank_cnn.method.schemes import SCHEMES, Fitted, Scheme, fit_layer, is_depthwise, parse_scheme
from lowrank_cnn.method.select import Kept, Where, select

__all__ = ["Fitted", "decompose", "fit_layer"]

Images = Tensor | Iterable[object]
"""Images as one batch, or batches of them; of a pair (images, labels) the labels are left out."""
Keeps = Callable[[int], float]
"""The share of a layer that m basis filters keep."""
Score = Callable[[nn.Module], float]
"""The quality of a network, such as its accuracy: positive, and higher for a better network."""
_STEPS = 96  # into which the range of m is divided when layers compete for a budget
_FITTED = 12  # steps at which a basis and its join are really fitted; between them, the energy is interpolated
_TRIED = 6  # numbers of basis filters whose effect on the network is measured; the rest is interpolated
WHOLE = 8  # under a budget, filter groups are multiples of this, as fast kernels need,
_UNITS = 16  # if a layer has this many such units to choose from
BELOW = 1 / 3  # the share of a layer's MACs below which CP is tried in place of a separable pair,
_MOST_WORK = 3e8  # up to so many weights times components: beyond, a fit takes minutes
_ROWS = 4  # output pixels that a fit to images takes, for each weight of a filter,
_FEWEST_ROWS = 4096  # and at least
_RIDGE = 1e-4  # as a share of the mean square of an input: it pulls weights towards their values before


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
    each as a conv within frames and one along time; `separable` takes depthwise convs apart into strips where
    their kernel is large, or where they are named. The scheme `cp` (by tensorly: `pip install ".[cp]"`) replaces
    a conv by a 1x1, two depthwise strips and a 1x1. Under a budget it does so for layers that keep less than a
    third of their MACs and fit better so; the others become separable pairs. `bands` and `lr` fit depthwise
    convs alone: their filters keep the taps that they have, and channels that pass lose theirs, so that the
    network needs fine-tuning.

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
    convs, kept = _fittable(model, scheme, where, budget)
    by_fit = scheme.rival is not None and budget is not None
    scheme = SCHEMES[scheme.rival] if scheme.rival and by_fit else scheme
    fits: dict[str, CPFactors] = {}
    batches = image_batches(images, model) if images is not None else []
    if budget is None:
        schemes, costlier = _as_asked(convs, scheme, allow_costlier)
        kept += costlier
        choices = [schemes]
    else:
        kept += tuple(Kept(name, type(conv).__name__, "cheaper dense") for name, conv in convs.items())
        keeps = measured_keeps(model, convs, scheme, batches, evaluate) if batches or evaluate else None
        size = tuple(batches[0].shape[1:]) if input_size is None and batches else input_size
        if budget.kind == "energy":
            choices = [by_energy(convs, scheme, budget.share, keeps, allow_costlier=allow_costlier)]
        else:
            measures = [keeps]
            if keeps and batches and not evaluate and not by_fit and budget.kind != "latency":
                measures += [None, both_keeps(convs, scheme, keeps)]
            size = known_inputs(model, size)
            curves = (curves_of(model, convs, scheme, size, kind=budget.kind, keeps=one) for one in measures)
            choices = [within(model, *found, budget, size) for found in curves]
        if by_fit:
            choices[0], fits = better_by_cp(convs, choices[0])
    if not any(choices):
        raise LowRankError(nothing_cheaper(scheme))
    new, report = nearest_output(model, choices, batches, kept=kept, fits=fits)
    check_layers(model, new, report, input_size, budget)
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

        new = rewrite(model, schemes, fill=fill, kept=kept)
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
        most = scheme.useful_rank(conv) * groups_of(conv) if scheme.mixes and scheme.m is None else math.inf
        schemes[name] = replace(scheme, m=most) if most < outputs_of(conv) else scheme
    return (schemes, ()) if allow_costlier else cheaper_only(convs, schemes)


def _fittable(
    model: nn.Module, scheme: Scheme, where: Where, budget: Budget | None
) -> tuple[dict[str, nn.Conv2d], tuple[Kept, ...]]:
    """The convs to fit, and those that stay; raises an error for a scheme or weights that cannot be fitted."""
    mixes_nothing = LowRankError(
        f"trained filters cannot be fitted by {scheme}, which mixes nothing after its filters: use separable, cp, "
        "lr-join or a mixture with a join."
    )
    if not scheme.mixes and (budget is not None or not scheme.takes_depthwise or not scheme.saves):
        raise mixes_nothing
    if scheme.channel_groups > 1:
        raise LowRankError(
            f"trained filters see all channels, and those of {scheme} a part: leave channel_groups out, or train "
            "from scratch with convert."
        )
    if scheme.refusal:
        raise LowRankError(scheme.refusal)
    convs, kept = select(model, SCHEMES[scheme.rival] if scheme.rival and budget else scheme, where)
    if not scheme.mixes:  # then it fits depthwise filters alone, each by itself
        convs = {name: conv for name, conv in convs.items() if is_depthwise(conv)}
        if not convs:
            raise mixes_nothing
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

    def options(name: str) -> Options:
        share = keeps[name] if keeps else energy_curve(convs[name], scheme, interpolated=True)
        return [(replace(scheme, m=m), share(m)) for m in sizes_of(convs[name], scheme, _STEPS)]

    return layer_curves(model, convs, kind, input_size, options)


def sizes_of(conv: nn.Conv2d, scheme: Scheme, steps: int) -> list[int]:
    """Numbers of basis filters to try, from few to the most with which the layer is still cheaper than dense."""
    most, unit = max_useful_rank(conv, scheme), _unit(conv, scheme)
    few = [m for m in range(groups_of(conv), unit, groups_of(conv)) if m <= most]  # below one whole unit
    units = most // unit
    spread = sorted({unit * max(1, round(units * i / steps)) for i in range(1, steps + 1)}) if units else []
    return [*(few if steps == _STEPS else few[:1]), *spread]


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
        conv, most = convs[name], separable.macs(convs[name])
        if conv.groups > 1 or separable.relative_cost(conv) >= BELOW:
            continue
        # The most components that cost no more.
        m = bisect_right(range(1, most + 1), most, key=lambda m: replace(SCHEMES["cp"], m=m).macs(conv))
        found = cp_factors(conv.weight, m) if 0 < conv.weight.numel() * m <= _MOST_WORK else None
        assert isinstance(separable.m, int)
        if found is not None and found.energy > energy_curve(conv, separable)(separable.m):
            chosen[name], fits[name] = replace(SCHEMES["cp"], m=m), found
    return chosen, fits


def _unit(conv: nn.Conv2d, scheme: Scheme) -> int:
    """The step of m that fills whole groups of filters; a smaller one for small layers, where it is too coarse."""
    parts = math.lcm(*((share / sum(scheme.shares)).denominator for share in scheme.shares))
    unit = math.lcm(WHOLE * parts, groups_of(conv))
    return unit if max_useful_rank(conv, scheme) >= _UNITS * unit else groups_of(conv)


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
        inputs, targets = [x for x, _ in given], [y for _, y in given]
        for m in dict.fromkeys(sizes_of(conv, scheme, _TRIED)):
            layer: Any = replacement(conv, replace(scheme, m=m))
            covariance = window_covariance(layer, inputs) if given and scheme.weighs_inputs else None
            fit_layer(name, conv, layer, covariance)
            if given:
                refit(layer, inputs, targets)
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


def _scored(score: Score, model: nn.Module) -> float:
    value = score(copy_with(model))
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise LowRankError(f"evaluate gives a number, more for a better network, not {value!r}.")
    return float(value)


# Record the inputs and outputs of layers on a few images, and fit a layer to them by least squares.
#
# After Zhang et al. 2015: the second half of a factored conv is fitted so that, from what the decomposed network
# gives it, it gives what the original conv gives in the original network. This corrects errors of earlier layers.


def image_batches(images: Images, model: nn.Module) -> list[Tensor]:
    """Batches on the device and in the dtype of the model."""
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset):
        raise LowRankError(
            "a Dataset gives single images, and all of them: give batches of some, as "
            "DataLoader(Subset(dataset, range(256)), batch_size=64) makes them."
        )
    like = next(model.parameters())
    batches = []
    for batch in [images] if isinstance(images, Tensor) else images:
        one = batch[0] if isinstance(batch, list | tuple) else batch
        if not isinstance(one, Tensor) or one.dim() < 2 or not len(one):
            raise LowRankError("images are a tensor [N, C, H, W], or batches of such tensors.")
        if not bool(one.isfinite().all()):
            raise LowRankError("the images hold values that are not finite.")
        batches.append(one.to(like.device, like.dtype))
    if not batches:
        raise LowRankError("there are no images to measure with.")
    return batches


@torch.no_grad()
def outputs(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    """Every output of a model, its values on all images in one row; those that are no numbers are left out."""
    with unchanged(model, evaluating=True):
        results = [tensors_of(_run(model, batch)) for batch in batches]
    if not (results[0] and all(len(found) == len(results[0]) for found in results)):
        raise LowRankError("the model gives no tensors to compare, or not as many for every batch.")
    rows = [torch.cat([one.flatten() for one in found]) for found in zip(*results, strict=True)]
    numbers = [row.double() for row in rows if row.is_floating_point()]
    if not numbers:
        raise LowRankError("the model gives whole numbers alone (classes, say), which show no small differences.")
    return numbers


def output_error(given: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The mean relative squared error of all outputs; infinite where they have other shapes.

    Outputs count alike, whatever their scale: a layer that only one of several heads reads would seem of no use
    otherwise.
    """
    if [one.shape for one in given] != [one.shape for one in right]:
        return float("inf")
    return sum(map(relative_error, given, right)) / len(right)


def relative_error(given: Tensor, right: Tensor) -> float:
    """The squared error relative to the squared reference; infinite if it is not a number."""
    error = float((given - right).square().sum() / right.square().sum().clamp_min(1e-30))
    return error if error == error else float("inf")


@torch.no_grad()
def seen(model: nn.Module, layer: nn.Module, batches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inputs and outputs of one layer for each batch, with a pair for every call of the layer."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.append((first_input(args, kwargs).detach(), output))

    hook = layer.register_forward_hook(keep, with_kwargs=True)
    try:
        with unchanged(model, evaluating=True):
            for batch in batches:
                _run(model, batch)
    finally:
        hook.remove()
    return found


def refit(layer: FactoredConv2d | FactoredLayer, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """Fit the last layer of a chain to map these inputs to these targets, and return the remaining error."""
    *front, second = layer.children()
    pairs = zip(inputs, targets, strict=True)
    rows, wanted = _sampled(second, [_through(front, x, y) for x, y in pairs], targets)
    groups = rows.shape[1]
    own = weights_of(second)[0]
    # A least-squares solution is [groups, weights (+ bias), filters].
    before = own.detach().double().flatten(1).unflatten(0, (groups, -1)).transpose(1, 2)
    if second.bias is not None:
        before = torch.cat([before, second.bias.detach().double().view(groups, 1, -1)], dim=1)  # type: ignore[operator, union-attr]
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2)
    gram = torch.einsum("rga,rgb->gab", rows, rows)
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    held = eye * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * _RIDGE
    found = torch.linalg.solve(gram + held, torch.einsum("rga,rgd->gad", rows, wanted) + held @ before)
    if not bool(found.isfinite().all()):
        found = before
    weight = (found if second.bias is None else found[:, :-1]).transpose(1, 2).reshape(own.shape)
    set_weights(second, [weight], found[:, -1].flatten())
    return relative_error(torch.einsum("rga,gad->rgd", rows, found), wanted)


def _through(layers: Sequence[nn.Module], x: Tensor, target: Tensor) -> Tensor:
    """Run layers in a row; a transposed conv is told the size of the target, on which its output depends."""
    for layer in layers:
        told = isinstance(layer, _ConvTransposeNd)
        x = layer(x, list(target.shape[-len(layer.kernel_size) :])) if told else layer(x)
    return x


def window_covariance(layer: FactoredConv2d, inputs: Sequence[Tensor]) -> Tensor:
    """[groups, a, a]: the second moments of the windows that the first half of a separable pair reads."""
    first = next(layer.children())
    rows, _ = _sampled(first, inputs, None)
    return torch.einsum("rga,rgb->gab", rows, rows) / len(rows)


def _sampled(
    layer: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Windows [rows, groups, weights per filter] of a conv, and [rows, groups, filters], at some output pixels."""
    generator = torch.Generator().manual_seed(0)
    weights = layer.weight[0].numel()  # type: ignore[index, union-attr]
    share = math.ceil(max(_FEWEST_ROWS, _ROWS * weights) / max(1, len(inputs)))
    windows, wanted = [], []
    groups = groups_of(layer)
    for index, x in enumerate(inputs):
        rows = _windows(layer, x)
        chosen = torch.randperm(len(rows), generator=generator)[:share].to(rows.device)
        windows.append(rows[chosen].double().unflatten(1, (groups, -1)))  # type: ignore[arg-type]
        if targets is not None:
            flat = _pixels(layer, targets[index])
            wanted.append(flat[chosen].double().unflatten(1, (groups, -1)))  # type: ignore[arg-type]
    return torch.cat(windows), torch.cat(wanted) if wanted else windows[0].new_empty(0)


def _pixels(layer: nn.Module, y: Tensor) -> Tensor:
    """[pixels, channels]: the output of a conv or a linear layer, or the input of a pointwise one, as rows."""
    if isinstance(layer, nn.Linear):
        return y.flatten(0, -2)
    return y.movedim(-1 - len(layer.kernel_size), -1).flatten(0, -2)  # type: ignore[arg-type]


def _windows(layer: nn.Module, x: Tensor) -> Tensor:
    """[pixels, channels x taps]: what each output pixel of a conv sees."""
    if not isinstance(layer, nn.Conv2d | nn.Conv3d | CompositeConv2d):  # the join of a factored layer is pointwise
        return _pixels(layer, x)
    kernel, mode = layer.kernel_size, layer.padding_mode
    sides = enclosing_padding(layer.padding, kernel, layer.dilation)  # type: ignore[arg-type]
    x = x if x.dim() == len(kernel) + 2 else x[None]
    x = F.pad(x, [side for axis in reversed(sides) for side in axis], mode="constant" if mode == "zeros" else mode)
    for axis, (taps, stride, every) in enumerate(zip(kernel, layer.stride, layer.dilation, strict=True), 2):
        x = x.unfold(axis, every * (taps - 1) + 1, stride)[..., ::every]
    return x.movedim(1, len(kernel) + 1).flatten(len(kernel) + 1).flatten(0, len(kernel))


def _run(model: nn.Module, batch: Tensor) -> object:
    with explained(f"the model does not run on images of {list(batch.shape)}"):
        return model(*copied(batch))
