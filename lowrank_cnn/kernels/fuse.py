"""Fuse what follows a conv into it: [conv, ReLU, 2x2 max-pool] in a Sequential become one layer.

[batch norm, ReLU] become one as well, and other max-pools and local response norms layers that know the kernels.
The copy shares the model's parameters, statistics, and modules without parts, so it trains as well, and follows
when the model is set to train or evaluate; the model itself is not touched. Convs are known by what they have, not
by their class: `nn.Conv2d`, and layers with `weights` and `group_padding`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lowrank_cnn.kernels.activation import canonical
from lowrank_cnn.kernels.chain import FusedChain
from lowrank_cnn.kernels.conv.pack import laid_out
from lowrank_cnn.kernels.dispatch import composite_conv2d, composite_conv2d_with_statistics
from lowrank_cnn.kernels.modules import (
    activation_of,
    fused_norm,
    fused_pool,
    fused_response_norm,
    has_hooks,
    is_plain,
)
from lowrank_cnn.kernels.problem import OVERLAPPING, Pair, Sides


class FusedComposite(nn.Module):
    """A composite layer with the activation and the max-pool that followed it; a residual may be added between."""

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
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.bias = bias
        self.stride, self.padding = stride, tuple(padding)
        self.activation, self.pool = canonical(activation, relu), pool

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return composite_conv2d(x, list(self.weights), self.bias, **self.options, residual=residual)

    def with_statistics(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The result of a layer that nothing follows, with its mean and variance, or None for these."""
        how = {"stride": self.stride, "padding": self.padding, "by_torch": False}
        return composite_conv2d_with_statistics(x, list(self.weights), self.bias, **how)

    @property
    def options(self) -> dict[str, Any]:
        """What `composite_conv2d` takes besides tensors."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "activation": self.activation,
            "pool": self.pool,
        }

    def extra_repr(self) -> str:
        groups = " + ".join(f"{w.shape[2]}x{w.shape[3]},{w.shape[0]}" for w in self.weights)
        return f"{groups}, stride={self.stride}, activation={self.activation}, pool={self.pool}"


class FrozenComposite(FusedComposite):
    """A fused layer for inference: its weights are copies that do not change, and lie as the kernels read them.

    Which kernel runs depends on the input's size, and kernels read in different layouts: each is made at the first
    call that needs it, and kept. Copying a state dict into the layer makes them anew.

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
        # A tensor made while a graph is captured holds nothing until the graph is replayed.
        if not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.register_buffer(name, packed, persistent=False)
        return packed

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        for name in [name for name in self._buffers if name.startswith("packed_")]:
            del self._buffers[name]
        super()._load_from_state_dict(*arguments, **options)


def fuse(model: nn.Module) -> nn.Module:
    """A copy of a model, its parameters shared, in which every conv the kernels know takes what follows it."""
    if (options := conv_options(model)) is not None:
        return FusedComposite(**options)
    if _joined(model):
        return _with_what_follows(model, [])[0]
    if (known := fused_pool(model) or fused_response_norm(model)) is not None:
        return known
    if not model._modules or is_parametrized(model):
        return model
    twin = copy.copy(model)
    if type(model).forward is nn.Sequential.forward:
        children = _fused_chain(_flattened(model))
    else:
        # Not `named_children`, which passes over a module that has two names.
        children = {name: None if child is None else fuse(child) for name, child in model._modules.items()}
    twin._modules = children  # type: ignore[assignment]
    return twin


def freeze(model: nn.Module) -> nn.Module:
    """A fused copy for inference: its convs' weights are copies, laid out as the kernels read them, once."""
    return _frozen(fuse(model))


def _frozen(module: nn.Module) -> nn.Module:
    """A module with its fused layers frozen; those without parts may be the caller's own and are not changed."""
    if type(module) is FusedComposite:
        layer = FrozenComposite(list(module.weights), module.bias, **module.options)
        return layer.train(module.training)
    if not module._modules:
        return module
    twin = copy.copy(module)
    twin._modules = {  # type: ignore[assignment]
        name: None if child is None else _frozen(child) for name, child in module._modules.items()
    }
    return twin


def fuse_neighbours(model: nn.Module) -> int:
    """Let the max-pools and response norms of a network know the kernels, in their places; how many there are."""
    places = model.named_modules(remove_duplicate=False)
    found = {name: (module, fused_pool(module) or fused_response_norm(module)) for name, module in places if name}
    known = {name: (module, twin) for name, (module, twin) in found.items() if twin is not None}
    for name, (module, twin) in known.items():
        model.set_submodule(name, twin.train(module.training))
    return len(known)


def conv_options(module: nn.Module) -> dict[str, Any] | None:
    """What a conv is to the kernels, or None for one they do not know (dilated, grouped, padded otherwise).

    Nor do they know one with hooks, or with weights that are computed, from a norm and a direction say: what it
    has at this moment is no parameter, and would not learn.
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


def _flattened(chain: nn.Module) -> list[tuple[str, nn.Module]]:
    """The steps of a Sequential, those of Sequentials inside it in their place."""
    steps: list[tuple[str, nn.Module]] = []
    for name, child in chain._modules.items():
        assert child is not None, "a Sequential calls each of its steps"
        if is_plain(child, nn.Sequential) and not _joined(child):
            steps += [(f"{name}_{inner}", step) for inner, step in _flattened(child)]
        else:
            steps.append((name, child))
    return steps


def _fused_chain(steps: list[tuple[str, nn.Module]]) -> OrderedDict[str, nn.Module]:
    fused: OrderedDict[str, nn.Module] = OrderedDict()
    at = 0
    while at < len(steps):
        name, module = steps[at]
        following = [step for _, step in steps[at + 1 : at + 3]]
        name = f"{name}_{at}" if name in fused else name  # as "a_b" of a step "b" within "a" beside it
        fused[name], taken = _with_what_follows(module, following)
        at += 1 + taken
    return fused


def _with_what_follows(module: nn.Module, following: list[nn.Module]) -> tuple[nn.Module, int]:
    """A step fused with the steps behind it that it can take, and how many these are."""
    if (norm := fused_norm(module, following[0] if following else None)) is not None:
        return norm, 1
    stages = _joined(module) or [conv_options(module)]
    if stages[-1] is None:
        return fuse(module), 0
    activation = activation_of(following[0]) if following else None
    pool = pool_name(following[1]) if activation == "relu" and len(following) > 1 else None
    *basis, last = stages
    layer = FusedComposite(**last, activation=activation, pool=pool)
    layer = FusedChain(FusedComposite(**basis[0]), layer) if basis else layer
    return layer, (activation is not None) + (pool is not None)


def _joined(module: nn.Module) -> list[Any] | None:
    """The options of a basis and its join, where a Sequential is just these two."""
    parts = list(module.children()) if is_plain(module, nn.Sequential) else []
    if len(parts) != 2 or not hasattr(module, "scheme"):
        return None
    basis, join = map(conv_options, parts)
    if basis is None or join is None or [tuple(w.shape[2:]) for w in join["weights"]] != [(1, 1)]:
        return None
    plain = tuple(join["stride"]) == (1, 1) and not any(sum(join["padding"][0], ()))
    return [basis, join] if plain else None


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
