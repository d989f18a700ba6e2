"""Low-rank factors over channels, for layers of any kind: m filters like the layer's own, then a 1x1 join.

The weight of a linear layer or of a 1-D, 3-D or transposed conv is, within a channel group, a matrix [filters,
everything else]. Cut to m singular values it is m filters of the same kernel, then a pointwise layer. For 2-D
convs the scheme `channel` builds an ordinary basis and its join.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from lowrank_cnn.core.modules import computes_as

if TYPE_CHECKING:
    from lowrank_cnn.method.schemes import Scheme

KINDS = (nn.Linear, nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Layers that this file factors; `nn.Conv2d` is none of them."""
_POINTWISE = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class FactoredLayer(nn.Sequential):
    """A `basis` like the layer that it replaces, with m filters, and a pointwise `join`, with nothing between.

    It has the attributes of that layer (`weight`, `stride`, `in_features`, ...): forwards and tools read them.
    """

    _OF_BASIS: ClassVar[tuple[str, ...]] = (
        "in_channels", "in_features", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
        "output_padding",
    )  # fmt: skip
    _OF_JOIN: ClassVar[tuple[str, ...]] = ("out_channels", "out_features", "bias")
    __jit_unused_properties__: ClassVar[list[str]] = ["weight"]

    def __init__(self, basis: nn.Module, join: nn.Module, scheme: Scheme) -> None:
        super().__init__(OrderedDict(basis=basis, join=join))
        self.scheme = scheme

    def __getattr__(self, name: str) -> Any:
        if name in self._OF_BASIS or name in self._OF_JOIN:
            return getattr(self[0] if name in self._OF_BASIS else self[1], name)
        return super().__getattr__(name)

    @property
    def weight(self) -> Tensor:
        """The weight of the equivalent single layer, with gradients."""
        basis, join = self[0].weight, self[1].weight.flatten(1)  # type: ignore[operator, union-attr]
        if isinstance(self[0], nn.Linear):
            return join @ basis  # type: ignore[operator]
        groups = groups_of(self[0])
        within, filters = join.unflatten(0, (groups, -1)), basis.unflatten(0, (groups, -1))  # type: ignore[operator]
        transposed = isinstance(self[0], _ConvTransposeNd)  # its weight has the channels first
        axes = "gdm,gcm...->gcd..." if transposed else "gdm,gm...->gd..."
        return torch.einsum(axes, within, filters).flatten(0, 1)


class FactoredTransposed(FactoredLayer):
    """The factors of a transposed conv, which may be told the size of its output."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self.join(self.basis(input, output_size))


def groups_of(layer: nn.Module) -> int:
    """Channel groups; a linear layer has one."""
    return layer.groups if isinstance(layer, _ConvNd) else 1


def outputs_of(layer: nn.Module) -> int:
    """Filters of a conv, outputs of a linear layer."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels  # type: ignore[return-value]


def basis_filters(layer: nn.Module, scheme: Scheme) -> int:
    """The m of a scheme for a layer, in whole channel groups."""
    return scheme.stages((1, 1), outputs_of(layer), channel_groups=groups_of(layer))[0].filters


def matrices(layer: nn.Module) -> Tensor:
    """The weight as [groups, filters of a group, everything else], in float64."""
    weight, groups = layer.weight.detach().double(), groups_of(layer)  # type: ignore[union-attr, operator]
    if isinstance(layer, _ConvTransposeNd):  # [channels, filters of a group, ...]
        apart = weight.unflatten(0, (groups, -1)).transpose(1, 2)
        return apart.flatten(2)
    return weight.flatten(1).unflatten(0, (groups, -1))


def channel_rank(layer: nn.Module) -> int:
    """Singular values of a channel group: with as many filters a fit is exact."""
    filters = outputs_of(layer) // groups_of(layer)
    return min(filters, layer.weight.numel() // groups_of(layer) // filters)  # type: ignore[union-attr, operator]


def channel_macs(layer: nn.Module, m: int) -> int:
    """The cost of m filters and their join, in units of MACs per output pixel of the original layer."""
    filters = outputs_of(layer)
    basis, join = layer.weight.numel() * m // filters, m * filters // groups_of(layer)  # type: ignore[union-attr, operator]
    # A transposed conv works on the pixels of its input, the join on those of its output.
    return basis + join * (prod(layer.stride) if isinstance(layer, _ConvTransposeNd) else 1)


def channel_params(layer: nn.Module, m: int) -> int:
    """Parameters of m filters, their join and its bias."""
    filters = outputs_of(layer)
    weights = layer.weight.numel() * m // filters + m * filters // groups_of(layer)  # type: ignore[union-attr, operator]
    return weights + (0 if layer.bias is None else filters)


def channel_energy(layer: nn.Module) -> Tensor:
    """The share of the squared weight that 1, 2, ... filters per channel group keep."""
    together = torch.linalg.svdvals(matrices(layer)).square().sum(0)
    return together.cumsum(0) / together.sum().clamp_min(1e-30)


def build_factored(layer: nn.Module, scheme: Scheme) -> FactoredLayer:
    """Build the factors of a layer; their weights are set later."""
    m, filters, groups, biased = (
        basis_filters(layer, scheme),
        outputs_of(layer),
        groups_of(layer),
        layer.bias is not None,
    )
    if isinstance(layer, nn.Linear):
        return FactoredLayer(
            nn.Linear(layer.in_features, m, bias=False), nn.Linear(m, filters, bias=biased), scheme
        )
    assert isinstance(layer, _ConvNd)
    options: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    options |= {"groups": groups, "padding_mode": layer.padding_mode, "bias": False}
    if isinstance(layer, _ConvTransposeNd):
        options["output_padding"] = layer.output_padding
    basis = _plain_kind(layer)(layer.in_channels, m, layer.kernel_size, **options)
    join = _POINTWISE[len(layer.kernel_size)](m, filters, 1, groups=groups, bias=biased)
    kind = FactoredTransposed if isinstance(layer, _ConvTransposeNd) else FactoredLayer
    return kind(basis, join, scheme)


@torch.no_grad()
def fit_factored(layer: nn.Module, new: FactoredLayer) -> float:
    """Fit the factors to the layer's weight, and return the share of its squared norm that they keep."""
    matrix, groups = matrices(layer), groups_of(layer)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    basis, join = new[0], new[1]
    rank = min(outputs_of(basis) // groups, values.shape[1])
    root = values[:, :rank].sqrt()
    filters = matrix.new_zeros(groups, outputs_of(basis) // groups, matrix.shape[2])
    filters[:, :rank] = root[:, :, None] * right[:, :rank]
    mixing = matrix.new_zeros(groups, matrix.shape[1], outputs_of(basis) // groups)
    mixing[:, :, :rank] = left[:, :, :rank] * root[:, None]
    if isinstance(layer, _ConvTransposeNd):
        shape = (groups, filters.shape[1], layer.in_channels // groups, *layer.kernel_size)
        filters = filters.reshape(shape).transpose(1, 2)
    basis.weight.copy_(filters.reshape(basis.weight.shape))  # type: ignore[operator, union-attr, arg-type]
    join.weight.copy_(mixing.reshape(join.weight.shape))  # type: ignore[operator, union-attr, arg-type]
    if layer.bias is not None:
        join.bias.copy_(layer.bias)  # type: ignore[operator, union-attr]
    new.requires_grad_(layer.weight.requires_grad)  # type: ignore[union-attr, arg-type]
    kept = values[:, :rank].square().sum() / values.square().sum().clamp_min(1e-30)
    return float(kept)


def is_torch_layer(layer: nn.Module) -> bool:
    """Whether a layer computes what torch's layer of its kind computes."""
    return any(isinstance(layer, kind) and computes_as(layer, kind) for kind in KINDS)


def _plain_kind(layer: nn.Module) -> Any:
    return next(kind for kind in KINDS if isinstance(layer, kind))
