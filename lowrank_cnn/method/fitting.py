"""Give the layers that replace a trained conv the filters nearest to its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowrank_cnn.kernels.dense import compose
from lowrank_cnn.method.building import FactoredConv2d
from lowrank_cnn.method.channel import FactoredLayer, fit_factored, outputs_of
from lowrank_cnn.method.cp import CPFactors, cp_factors
from lowrank_cnn.method.factorize import (
    centred,
    crossed_factors,
    crossed_weight,
    kept_energy,
    separable_factors,
)
from lowrank_cnn.method.layers import weights_of
from lowrank_cnn.method.scheme import Scheme
from lowrank_cnn.method.spec import Composite, FilterGroup
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.history import Fitted


@torch.no_grad()
def fit_layer(
    name: str,
    conv: nn.Conv2d,
    layer: nn.Module,
    covariance: Tensor | None = None,
    *,
    factors: CPFactors | None = None,
) -> Fitted:
    """Give a chain that replaces a conv the filters nearest to it. It can be passed to `convert` as `init`.

    With the `covariance` of the windows that the first half of a separable pair reads, filters are nearest in what
    they give for such inputs, and not in their weights. The `factors` of a CP form are computed unless given.
    """
    if isinstance(layer, FactoredLayer):
        return Fitted(name, outputs_of(layer[0]), fit_factored(conv, layer))
    if not isinstance(layer, FactoredConv2d):
        raise LowRankError(f"{name} was replaced by a {type(layer).__name__}, which mixes nothing: use lr-join.")
    if layer.scheme.name == "cp":
        return _fit_cp(name, conv, layer, factors)
    weight = conv.weight.detach().double()
    first, second = layer.children()
    if layer.scheme.name == "separable":
        upright, lying = sorted((first, second), key=lambda half: kernel_of(half)[0] == 1)
        target = centred(weight, (kernel_of(upright)[0], kernel_of(lying)[1]))
        options = {"lying_first": first is lying, "groups": conv.groups, "covariance": covariance}
        halves = separable_factors(target, filters_of(first), **options)
        filled, fitted = ([halves[0]], [halves[1]]), compose(*halves, groups=conv.groups)
    else:
        basis, join = grouped_factors(weight, conv, layer.scheme)
        filled, fitted = (basis, [join]), grouped_weight(basis, join, conv.groups)
    for stage, tensors in zip((first, second), filled, strict=True):
        _fill(stage, tensors)
    if conv.bias is not None:
        second.bias.copy_(conv.bias)  # type: ignore[operator, union-attr]
    layer.requires_grad_(conv.weight.requires_grad)
    return Fitted(name, filters_of(first), kept_energy(weight, fitted))


def _fit_cp(name: str, conv: nn.Conv2d, layer: FactoredConv2d, factors: CPFactors | None) -> Fitted:
    found = factors or cp_factors(conv.weight, filters_of(layer[0]))
    if found is None:
        raise LowRankError(f"tensorly finds no CP form of {name or 'the conv'}: use separable there.")
    *tensors, energy = found
    for stage, tensor in zip(layer.children(), tensors, strict=True):
        _fill(stage, [tensor])
    if conv.bias is not None:
        layer[-1].bias.copy_(conv.bias)  # type: ignore[operator, union-attr]
    layer.requires_grad_(conv.weight.requires_grad)
    return Fitted(name, filters_of(layer[0]), energy)


def grouped_factors(
    weight: Tensor, conv: nn.Conv2d, scheme: Scheme, *, sweeps: int = 30
) -> tuple[list[Tensor], Tensor]:
    """A basis and its join for each channel group by itself, put together as the layers hold them."""
    groups = conv.groups
    whole = scheme.stages(conv.kernel_size, conv.out_channels, channel_groups=groups)[0]  # type: ignore[arg-type]
    own = Composite(tuple(FilterGroup(g.height, g.width, g.filters // groups) for g in whole.groups))
    parts = [crossed_factors(part, own, sweeps=sweeps) for part in weight.chunk(groups)]
    basis = [torch.cat(filters) for filters in zip(*(filters for filters, _ in parts), strict=True)]
    return basis, torch.cat([join for _, join in parts])


def grouped_weight(basis: Sequence[Tensor], join: Tensor, groups: int) -> Tensor:
    """The dense weight that equals a basis and its join, group by group."""
    apart = zip(*(filters.chunk(groups) for filters in basis), strict=True)
    return torch.cat([crossed_weight(own, part) for own, part in zip(apart, join.chunk(groups), strict=True)])


def kernel_of(stage: nn.Module) -> tuple[int, int]:
    return stage.kernel_size  # type: ignore[return-value]


def filters_of(stage: nn.Module) -> int:
    return stage.out_channels  # type: ignore[return-value]


def _fill(stage: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Set the weights of a layer, and its bias to zero."""
    for weight, tensor in zip(weights_of(stage), tensors, strict=True):
        weight.copy_(tensor)
    if stage.bias is not None:
        stage.bias.zero_()  # type: ignore[operator, union-attr]
