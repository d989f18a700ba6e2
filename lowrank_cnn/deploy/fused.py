"""A block by the GPU kernels: filters, bias, residual, activation and 2x2 max-pool in one launch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import Epilogue
from lowrank_cnn.kernels import composite_conv2d
from lowrank_cnn.kernels.conv.pack import laid_out
from lowrank_cnn.kernels.fuse import conv_options
from lowrank_cnn.kernels.modules import fused_pool
from lowrank_cnn.kernels.patterns import Activation
from lowrank_cnn.kernels.problem import Pair, Sides
from lowrank_cnn.method.layers import FactoredConv2d

_KNOWN = {"residual", "activation"} & set(inspect.signature(composite_conv2d).parameters)
_SLOPE = 0.01
"""The slope of a leaky ReLU that the kernels compute."""


class FusedLayer(nn.Module):
    """One conv or composite by the kernels, for inference. Its weights are laid out as the kernels read them."""

    def __init__(
        self, weights: Sequence[Tensor], bias: Tensor | None, stride: Pair, padding: Sequence[Sides]
    ) -> None:
        super().__init__()
        packed = laid_out([weight.detach() for weight in weights], weights[0].dtype)
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in packed)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        self.stride, self.padding = stride, tuple(padding)

    def forward(self, x: Tensor, **epilogue: Any) -> Tensor:
        options = {"stride": self.stride, "padding": self.padding, **epilogue}
        return composite_conv2d(x, list(self.weights), self.bias, **options)

    def extra_repr(self) -> str:
        groups = " + ".join(f"{w.shape[2]}x{w.shape[3]},{w.shape[0]}" for w in self.weights)
        return f"{groups}, stride={self.stride}"


class FusedBlock(nn.Module):
    """The layers of a block by the kernels. The last launch takes as much of the epilogue as it knows."""

    def __init__(self, layers: list[FusedLayer], epilogue: Epilogue) -> None:
        super().__init__()
        self.layers, self.epilogue = nn.ModuleList(layers), epilogue
        self.inside, self.after = _divided(epilogue)
        self.pool = None if self.after.pool is None else fused_pool(self.after.pool) or self.after.pool

    @classmethod
    def of(cls, layer: nn.Module, epilogue: Epilogue) -> FusedBlock | None:
        """A block of a conv, composite or chain; None where the kernels do not know one of its layers."""
        stages = list(layer) if isinstance(layer, FactoredConv2d) else [layer]
        options = [conv_options(stage) for stage in stages]
        known = [found for found in options if found is not None]
        return cls([FusedLayer(**found) for found in known], epilogue) if len(known) == len(stages) else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        *front, last = self.layers
        for layer in front:
            x = layer(x)
        joins = residual is not None and "residual" in _KNOWN
        y = last(x, **self.inside, **({"residual": residual} if joins else {}))
        y = Epilogue(self.after.activation)(y, None if joins else residual)
        return y if self.pool is None else self.pool(y)

    def extra_repr(self) -> str:
        return str(self.epilogue)


def _divided(epilogue: Epilogue) -> tuple[dict[str, Any], Epilogue]:
    """What the kernel of the layer computes, as its options, and what is left to do after it."""
    if epilogue.adds and "residual" not in _KNOWN:
        return {}, epilogue
    activation, pool = epilogue.activation, epilogue.pool
    inside: dict[str, Any] = {}
    if activation is not None and activation.name == "relu":
        inside["relu"], activation = True, None
    elif activation is not None and _kernel_knows(activation):
        inside["activation"], activation = activation.name, None
    rounding = _rounding(pool) if not epilogue.adds and activation is None and "activation" not in inside else None
    if rounding is not None:
        inside["pool"], pool = rounding, None
    return inside, Epilogue(activation, pool)


def _kernel_knows(activation: Activation) -> bool:
    return "activation" in _KNOWN and (activation.name != "leaky_relu" or activation.slope == _SLOPE)


def _rounding(pool: nn.MaxPool2d | None) -> str | None:
    """How a 2x2 max-pool of stride two rounds; None for any other pool."""
    if pool is None:
        return None
    sizes = [(v, v) if isinstance(v, int) else tuple(v) for v in (pool.kernel_size, pool.stride)]
    if sizes != [(2, 2), (2, 2)] or pool.padding not in (0, (0, 0)) or pool.dilation not in (1, (1, 1)):
        return None
    return "ceil" if pool.ceil_mode else "floor"
