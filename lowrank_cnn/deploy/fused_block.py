"""A block by the GPU kernels: filters, bias, residual, activation and max-pool in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lowrank_cnn.deploy.blocks import Epilogue
from lowrank_cnn.kernels.fused_conv import FrozenComposite, conv_options, pool_name
from lowrank_cnn.kernels.fused_neighbours import fused_pool
from lowrank_cnn.method.building import FactoredConv2d


class FusedBlock(nn.Module):
    """The layers of a block by the kernels; the last launch takes the epilogue.

    A pool that no conv kernel knows runs after it, by a kernel of its own where there is one.
    """

    def __init__(self, layers: Sequence[nn.Module], pool: nn.Module | None, epilogue: Epilogue) -> None:
        super().__init__()
        self.layers, self.pool, self.epilogue = nn.ModuleList(layers), pool, epilogue

    @classmethod
    def of(cls, layer: nn.Module, epilogue: Epilogue) -> FusedBlock | None:
        """A block of a conv, composite or chain; None where the kernels do not know one of its layers."""
        stages = list(layer) if isinstance(layer, FactoredConv2d) else [layer]
        known = [options for options in map(conv_options, stages) if options is not None]
        if len(known) < len(stages):
            return None
        name = None if epilogue.pool is None else pool_name(epilogue.pool)
        known[-1] |= {"activation": epilogue.activation, "pool": name, "add_last": epilogue.add_last}
        made = [FrozenComposite(**options).eval() for options in known]
        apart = None if epilogue.pool is None or name else fused_pool(epilogue.pool) or epilogue.pool
        return cls(made, apart, epilogue)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        *front, last = self.layers
        for layer in front:
            x = layer(x)
        y = last(x, None if residual is None else residual.expand(_result_shape(last, x)))
        return y if self.pool is None else self.pool(y)

    def extra_repr(self) -> str:
        return str(self.epilogue)


def _result_shape(layer: Any, x: Tensor) -> tuple[int, ...]:
    """The shape of a conv's result, which a residual must have for the kernels."""
    taps, sides = layer.weights[0].shape[2:], layer.padding[0]
    axes = zip(x.shape[2:], taps, sides, layer.stride, strict=True)
    sizes = ((size + sum(pads) - reach) // step + 1 for size, reach, pads, step in axes)
    return x.shape[0], sum(weight.shape[0] for weight in layer.weights), *sizes
