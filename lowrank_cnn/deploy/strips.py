"""A layer of 1x3 and 3x1 filters on the CPU, by compiled minimal filtering (`kernels.strips`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import BlockAsGiven, Epilogue, is_halving
from lowrank_cnn.deploy.matrix import weight_parts
from lowrank_cnn.kernels.strips import available, packed_strips, strips

_ACROSS = ([0], [-1, 0, 1])
_DOWN = ([-1, 0, 1], [0])


class StripConv2d(nn.Module):
    """A conv or composite of such filters, of stride one and equal output size, with its epilogue; for inference.

    It keeps its layer, which runs inputs of another type, and where the compiled code is not installed.
    """

    def __init__(self, layer: nn.Module, epilogue: Epilogue | None = None) -> None:
        super().__init__()
        if not self.takes(layer):
            raise ValueError("not a convolution of stride one with 1x3 and 3x1 filters alone")
        weights, looks = weight_parts(layer) or ([], [])
        self.layer, self.epilogue = layer, epilogue or Epilogue()
        self.filters, self.across = [len(weight) for weight in weights], [look == _ACROSS for look in looks]
        self.relu = self.epilogue.activation == "relu" and not self.epilogue.adds
        self.rest = replace(self.epilogue, activation=None) if self.relu else self.epilogue
        self.pools = self.rest.pool is not None and is_halving(self.rest.pool) and not self.rest.adds
        self.pools = self.pools and self.rest.activation is None
        bias = layer.bias if isinstance(layer.bias, Tensor) else weights[0].new_zeros(sum(self.filters))
        self.register_buffer("bias", bias.detach().clone(), persistent=False)
        for index, weight in enumerate(weights):
            self.register_buffer(f"packed{index}", packed_strips(weight), persistent=False)

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        parts = weight_parts(layer)
        if parts is None or not all(look in (_ACROSS, _DOWN) for look in parts[1]):
            return False
        return parts[0][0].device.type == "cpu" and available(parts[0][0].dtype)

    def plain(self) -> nn.Module:
        """The layer with what follows it: for programs that have no such code."""
        return BlockAsGiven(self.layer, self.epilogue)

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        bias = self.get_buffer("bias")
        if x.dtype != bias.dtype or not available(x.dtype):
            return self.plain()(x, residual)
        if x.dim() == 3:
            return self(x[None], None if residual is None else residual[None])[0]
        weights = [self.get_buffer(f"packed{index}") for index in range(len(self.filters))]
        pool = self.pools and x.shape[2] % 2 == x.shape[3] % 2 == 0
        y = strips(x, weights, bias, self.filters, self.across, self.relu, pool)
        return y if pool else self.rest(y, residual)


def has_strips(network: nn.Module) -> bool:
    """Whether a network has layers that compiled strips run, and these are installed."""
    return any(map(StripConv2d.takes, network.modules()))
