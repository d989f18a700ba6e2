"""Fit low-rank filters to a trained network: the rival of training them from scratch.

Each spatial conv is replaced, under a scheme that ends in a mixing layer (`separable`, `lr-join`, a mixture with a
join), by the filters nearest to its own; the network then usually needs fine-tuning, with the ordinary trainer.
The number m of basis filters is the scheme's own, or is chosen for each layer from what is to be kept or spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from lowrank_cnn.method.converting import rewrite
from lowrank_cnn.method.counting import count
from lowrank_cnn.method.factorize import (
    centred,
    crossed_factors,
    crossed_weight,
    kept_energy,
    separable_factors,
    separable_weight,
)
from lowrank_cnn.method.layers import CompositeConv2d, FactoredConv2d, weights_of
from lowrank_cnn.method.ranks import Curves, by_energy, by_latency, by_macs, curves_of, estimated, schemes_of
from lowrank_cnn.method.scheme import Scheme, parse_scheme
from lowrank_cnn.method.selection import Kept, Where, select
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note, notes


@dataclass(frozen=True)
class Fitted:
    """A layer: how many basis filters it got, and the share of its squared weights that they keep."""

    name: str
    m: int
    energy: float

    def to_dict(self) -> dict[str, object]:
        """In values that JSON can hold."""
        return asdict(self)


def decompose(
    model: nn.Module,
    scheme: str | Scheme = "lr-join",
    *,
    where: Where = None,
    energy: float | None = None,
    macs: float | None = None,
    latency: float | None = None,
    input_size: Sequence[int] | None = None,
) -> nn.Module:
    """A copy of `model` whose spatial convs are the low-rank filters nearest to the trained ones.

    At most one of these says how many basis filters a layer gets, in place of the scheme's m:

    - `energy`: the fewest that keep this share of the layer's squared weights;
    - `macs`: those that keep most, over all layers, within this share of the network's multiply-accumulates;
    - `latency`: likewise, within this share of the time that the dense network takes on one image, measured here.

    There, a layer that the scheme would not make cheaper stays dense. The `notes` of the result hold its
    `decomposition`, a line per layer, and its `conversion`, as `convert` leaves it. A bias goes to the last layer
    of a chain; frozen layers stay frozen.
    """
    scheme = parse_scheme(scheme)
    _check(scheme, energy=energy, macs=macs, latency=latency)
    convs, kept = _fittable(model, scheme, where)
    schemes = dict.fromkeys(convs, scheme)
    if energy is not None:
        schemes = by_energy(convs, scheme, energy)
    elif macs is not None or latency is not None:
        schemes = _by_budget(model, convs, scheme, macs, latency, input_size)
    if not schemes:
        raise LowRankError(f"{scheme} makes no layer cheaper at what is asked for: ask for less.")
    dense = (Kept(name, "Conv2d", "cheaper dense") for name in convs if name not in schemes)
    report: list[Fitted] = []

    def fill(name: str, conv: nn.Conv2d, layer: nn.Module) -> None:
        report.append(fit_layer(name, conv, layer))

    new = rewrite(model, schemes, fill=fill, kept=(*kept, *dense))
    note(new, decomposition=tuple(report))
    return new


@torch.no_grad()
def fit_layer(name: str, conv: nn.Conv2d, layer: nn.Module) -> Fitted:
    """Give a chain that replaces a conv the filters nearest to it. It can be passed to `convert` as `init`."""
    if not isinstance(layer, FactoredConv2d):
        raise LowRankError(f"{name} was replaced by a {type(layer).__name__}, which mixes nothing: use lr-join.")
    weight = conv.weight.detach().double()
    first, second = layer.children()
    if layer.scheme.name == "separable":
        upright, lying = sorted((first, second), key=lambda half: _kernel(half)[0] == 1)
        target = centred(weight, (_kernel(upright)[0], _kernel(lying)[1]))
        halves = separable_factors(target, _filters(first), lying_first=first is lying, groups=conv.groups)
        factors, fitted = ([halves[0]], [halves[1]]), separable_weight(*halves, groups=conv.groups)
    else:
        composite = layer.scheme.stages(conv.kernel_size, conv.out_channels)[0]  # type: ignore[arg-type]
        basis, join = crossed_factors(weight, composite)
        factors, fitted = (basis, [join]), crossed_weight(basis, join)
    for stage, tensors in zip((first, second), factors, strict=True):
        _fill(stage, tensors)
    if conv.bias is not None:
        second.bias.copy_(conv.bias)  # type: ignore[operator, union-attr]
    layer.requires_grad_(conv.weight.requires_grad)
    return Fitted(name, _filters(first), kept_energy(weight, fitted))


def _check(scheme: Scheme, **asked: float | None) -> None:
    if scheme.name in ("lr", "dense") or (scheme.name == "mixture" and scheme.to is None):
        raise LowRankError(
            f"trained filters cannot be fitted by {scheme}, which mixes nothing after its filters: "
            "use separable, lr-join or a mixture with a join."
        )
    if scheme.name == "embed":
        raise LowRankError("embed changes the number of channels that the next layer expects: use lr-join.")
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        raise LowRankError(f"ask for one of energy, macs and latency, not for {' and '.join(given)}.")
    for name, value in given.items():
        if not isinstance(value, int | float) or not 0 < value <= 1:
            raise LowRankError(f"{name} is a share above 0 and up to 1, not {value!r}.")


def _fittable(model: nn.Module, scheme: Scheme, where: Where) -> tuple[dict[str, nn.Conv2d], tuple[Kept, ...]]:
    """The convs to fit; those in channel groups by separable pairs alone."""
    convs, kept = select(model, scheme, where)
    if any(conv.weight.is_meta for conv in convs.values()):
        raise LowRankError("there are no weights to fit: the network is on the meta device.")
    for name, conv in convs.items():
        if not bool(conv.weight.isfinite().all()):
            raise LowRankError(f"{name or 'the conv'} has weights that are not finite, which nothing is near to.")
    grouped = [name for name, conv in convs.items() if conv.groups > 1 and scheme.name != "separable"]
    if len(grouped) == len(convs):
        raise LowRankError(f"{grouped[0]} and all others are grouped convs, which separable alone can fit.")
    kept += tuple(Kept(name, "Conv2d", "it is grouped, which separable alone can fit") for name in grouped)
    return {name: conv for name, conv in convs.items() if name not in grouped}, kept


def _by_budget(
    model: nn.Module,
    convs: dict[str, nn.Conv2d],
    scheme: Scheme,
    macs: float | None,
    latency: float | None,
    input_size: Sequence[int] | None,
) -> dict[str, Scheme]:
    size = input_size or notes(model).input_size
    if size is None:
        raise LowRankError("a budget needs the size of the images (channels, height, width).")
    curves, rest = curves_of(model, convs, scheme, size)
    if macs is None:
        assert latency is not None
        return schemes_of(by_latency(model, curves, scheme, latency, size), scheme)
    total = rest + sum(curve[-1].macs for curve in curves.values())
    least = (rest + sum(curve[0].macs for curve in curves.values())) / total
    if macs < least:
        raise LowRankError(f"macs={macs:g} is below {least:.3f}, what the fewest filters and all else cost.")
    return _within(model, curves, scheme, macs * total, rest, size)


def _within(
    model: nn.Module, curves: Curves, scheme: Scheme, allowed: float, rest: int, size: Sequence[int]
) -> dict[str, Scheme]:
    """By the budget, and counted: where a strided first half costs more than estimated, less is asked for."""
    budget = allowed - rest
    while True:
        chosen = by_macs(curves, budget)
        schemes = schemes_of(chosen, scheme)
        excess = count(rewrite(model, schemes), size).macs - allowed if schemes else 0
        if excess <= 0:
            return schemes
        budget = estimated(curves, chosen) - max(1, excess)


def _kernel(stage: nn.Module) -> tuple[int, ...]:
    return stage.composite.kernel if isinstance(stage, CompositeConv2d) else stage.kernel_size  # type: ignore[return-value]


def _filters(stage: nn.Module) -> int:
    return stage.out_channels  # type: ignore[return-value]


def _fill(stage: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Set the weights of a layer, and its bias to zero."""
    for weight, tensor in zip(weights_of(stage), tensors, strict=True):
        weight.copy_(tensor)
    if stage.bias is not None:
        stage.bias.zero_()  # type: ignore[operator, union-attr]
