"""Fold a batch norm into the layer before it, and measure how far the result is off."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.transforms import affine_bias, norm_affine, scale_filters, scale_transposed_filters
from lowrank_cnn.kernels.network_graph import TRANSPOSED
from lowrank_cnn.method.building import FactoredConv2d
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.system.compare import difference
from lowrank_cnn.system.errors import LowRankError

_SPATIAL = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3, CompositeConv2d: 2, FactoredConv2d: 2, nn.Linear: 0}
_SPATIAL |= dict(zip(TRANSPOSED, (1, 2, 3), strict=True))


class FoldedLinear(nn.Identity):
    """Stands where a batch norm was folded into a linear layer, which is exact for a batch of vectors alone."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 2:
            raise LowRankError(
                "a batch norm was folded into the linear layer before it for inputs of two dimensions, not of "
                f"{input.dim()}: merge with an example_input of that shape."
            )
        return input


def channel_axis(layer: nn.Module, dimensions: int) -> int:
    """The axis of a layer's outputs that has its filters, for results of this many dimensions."""
    spatial = next(count for kind, count in _SPATIAL.items() if isinstance(layer, kind))
    return dimensions - 1 - spatial


def fold(layer: nn.Module, norm: nn.Module) -> nn.Module:
    """Put a batch norm into the layer in front of it; of a chain, into its last layer."""
    last: Any = list(layer.children())[-1] if isinstance(layer, FactoredConv2d) else layer
    scale, shift = norm_affine(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)  # type: ignore[arg-type]
    composite = isinstance(last, CompositeConv2d)
    weights, scales = (list(last.weights), last.by_group(scale)) if composite else ([last.weight], [scale])
    with torch.no_grad():
        for weight, part in zip(weights, scales, strict=True):
            if isinstance(last, TRANSPOSED):
                weight.copy_(scale_transposed_filters(weight, part, last.groups))
            else:
                weight.copy_(scale_filters(weight, part))
        last.bias = nn.Parameter(affine_bias(last.bias, scale, shift))  # type: ignore[arg-type]
    return layer


@torch.no_grad()
def fold_error(layer: nn.Module, norm: nn.Module | None, new: nn.Module) -> float:
    """The largest difference on random inputs, against the original in float64, relative to its largest output."""
    parameter = next(new.parameters())
    device = parameter.device if parameter.is_cuda else torch.device("cpu")  # others may lack float64
    parts = (copy.deepcopy(part).to(device, torch.float64) for part in (layer, norm) if part is not None)
    x = torch.randn(_input_shape(layer), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        device
    )
    return difference(new(x.to(parameter.device, parameter.dtype)), nn.Sequential(*parts)(x))


def _input_shape(layer: nn.Module) -> tuple[int, ...]:
    """Small, but wide enough for every tap and border of the layer."""
    if isinstance(layer, nn.Linear):
        return 3, layer.in_features
    stages = list(layer) if isinstance(layer, FactoredConv2d) else [layer]
    spans = [_span(stage) for stage in stages]
    return 1, stages[0].in_channels, *(3 + 2 * sum(axis) for axis in zip(*spans, strict=True))  # type: ignore[return-value]


def _span(layer: nn.Module) -> list[int]:
    """How far a conv looks along each axis, padding included."""
    if isinstance(layer, CompositeConv2d):
        kernel, pads = layer.composite.kernel, [max(sides) for sides in layer.padding]
    else:
        kernel = layer.kernel_size
        pads = [0] * len(kernel) if isinstance(layer.padding, str) else list(layer.padding)  # type: ignore[arg-type]
    return [step * (size - 1) + max(pad, 0) for step, size, pad in zip(layer.dilation, kernel, pads, strict=True)]  # type: ignore[arg-type]
