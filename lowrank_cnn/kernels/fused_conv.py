"""Convs as layers of the fused kernels: a composite with its activation and max-pool, trained or frozen.

`fused_layer` makes one of a conv, a composite or a chain of these. A conv is recognised by its attributes, not by
its class: `nn.Conv2d`, or any layer with `weights` and `group_padding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.kernels.activation import canonical
from lowrank_cnn.kernels.chain import FusedChain
from lowrank_cnn.kernels.conv.pack import laid_out
from lowrank_cnn.kernels.dispatch import composite_conv2d, composite_conv2d_with_statistics
from lowrank_cnn.kernels.network_graph import has_hooks, is_plain, layer_kind
from lowrank_cnn.kernels.problem import OVERLAPPING, Pair, Sides


class FusedComposite(nn.Module):
    """A composite layer with its activation and max-pool in one call.

    A residual may be added before these, or with `add_last` after the activation.
    """

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        bias: nn.Parameter | None,
        *,
        stride: Pair,
        padding: Sequence[Sides],
        relu: bool = False,
        pool: str | None = None,
        activation: str | None = None,
        add_last: bool = False,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.bias = bias
        self.stride, self.padding = stride, tuple(padding)
        self.activation, self.pool, self.add_last = canonical(activation, relu), pool, add_last

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return composite_conv2d(x, list(self.weights), self.bias, **self.options, residual=residual)

    def with_statistics(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The conv's result with its mean and variance; these are None where no kernel of ours runs."""
        how = {"stride": self.stride, "padding": self.padding, "by_torch": False}
        return composite_conv2d_with_statistics(x, list(self.weights), self.bias, **how)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `composite_conv2d` that are not tensors."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "activation": self.activation,
            "pool": self.pool,
            "add_last": self.add_last,
        }

    def extra_repr(self) -> str:
        groups = " + ".join(f"{w.shape[2]}x{w.shape[3]},{w.shape[0]}" for w in self.weights)
        return f"{groups}, stride={self.stride}, activation={self.activation}, pool={self.pool}"


class FrozenComposite(FusedComposite):
    """A fused layer for inference: its weights are fixed copies in the memory layout that the kernels read.

    The input's size decides which kernel runs, and kernels read different layouts. The layer makes each layout at
    the first call that needs it and keeps it. Loading a state dict into the layer discards them.

        layer = FrozenComposite([conv.weight], conv.bias, stride=(2, 2), padding=[((1, 1), (1, 1))], relu=True)
        y = layer(x, residual)
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, **options: Any) -> None:
        copies = laid_out([weight.detach() for weight in weights], weights[0].dtype)
        added = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        super().__init__([nn.Parameter(copy, requires_grad=False) for copy in copies], added, **options)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        def packed(layout: str, dtype: torch.dtype) -> Tensor:
            return self._packed(layout, dtype, x)

        tensors = (x, list(self.weights), self.bias)
        return composite_conv2d(*tensors, **self.options, residual=residual, packed=packed)

    def _packed(self, layout: str, dtype: torch.dtype, x: Tensor) -> Tensor:
        name = f"packed_{layout}_{str(dtype).removeprefix('torch.')}"
        if (kept := self._buffers.get(name)) is not None:
            return kept
        from lowrank_cnn.kernels.ops import flat_padding, pack_weights

        weights = [weight.to(dtype) for weight in self.weights]
        packed = pack_weights(weights, list(x.shape), list(self.stride), flat_padding(self.padding), layout)
        # Memory allocated during a capture has no contents before the graph is replayed: do not keep it.
        if not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.register_buffer(name, packed, persistent=False)
        return packed

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        for name in [name for name in self._buffers if name.startswith("packed_")]:
            del self._buffers[name]
        super()._load_from_state_dict(*arguments, **options)


def conv_options(module: nn.Module) -> dict[str, Any] | None:
    """A conv as arguments of `FusedComposite`; None if no kernel can run it (dilated, grouped, other padding).

    Convs with hooks are excluded, and convs whose weights are computed, as by weight norm: the current value is no
    parameter and would not be trained.
    """
    options = _of_conv(module) if isinstance(module, nn.Conv2d) else _of_composite(module)
    if options is None or has_hooks(module):
        return None
    tensors = (*options["weights"], options["bias"])
    return options if all(t is None or isinstance(t, nn.Parameter) for t in tensors) else None


def _of_conv(module: nn.Conv2d) -> dict[str, Any] | None:
    ordinary = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    if not (ordinary and is_plain(module, nn.Conv2d)) or isinstance(module.padding, str):
        return None
    rows, columns = module.padding
    sides = [((rows, rows), (columns, columns))]
    return {"weights": [module.weight], "bias": module.bias, "stride": module.stride, "padding": sides}


def _of_composite(layer: Any) -> dict[str, Any] | None:
    if not (hasattr(layer, "weights") and hasattr(layer, "group_padding")):
        return None
    if layer.channel_groups != 1 or tuple(layer.dilation) != (1, 1) or layer.padding_mode != "zeros":
        return None
    return {
        "weights": list(layer.weights),
        "bias": layer.bias,
        "stride": layer.stride,
        "padding": layer.group_padding,
    }


def fused_layer(
    layer: nn.Module | None, *, activation: str | None = None, pool: str | None = None
) -> FusedComposite | FusedChain | None:
    """A conv, composite or chain as one fused layer with what follows it; None if the kernels cannot run it.

    layer = fused_layer(nn.Conv2d(8, 16, 3), activation="relu", pool="floor")
    """
    if layer is None:
        return None
    stages = list(layer.children()) if layer_kind(layer) == "chain" else [layer]
    options = [found for found in map(conv_options, stages) if found is not None]
    if len(options) < len(stages):
        return None
    options[-1] |= {"activation": activation, "pool": pool}
    layers = [FusedComposite(**found) for found in options]
    return FusedChain(*layers) if len(layers) > 1 else layers[0]


def pool_name(module: nn.Module) -> str | None:
    """A max-pool that kernels can fuse, as `composite_conv2d` names it; None for any other module."""
    if not isinstance(module, nn.MaxPool2d) or not is_plain(module, nn.MaxPool2d) or module.return_indices:
        return None
    sizes = [(v, v) if isinstance(v, int) else tuple(v) for v in (module.kernel_size, module.stride)]
    if module.dilation not in (1, (1, 1)):
        return None
    if sizes == [(3, 3), (2, 2)] and module.padding in (1, (1, 1)) and not module.ceil_mode:
        return OVERLAPPING
    if sizes != [(2, 2), (2, 2)] or module.padding not in (0, (0, 0)):
        return None
    return "ceil" if module.ceil_mode else "floor"
