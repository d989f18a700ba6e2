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

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lowrank_cnn.kernels.chain import FusedChain
from lowrank_cnn.kernels.conv.pack import laid_out
from lowrank_cnn.kernels.dispatch import composite_conv2d
from lowrank_cnn.kernels.modules import fused_norm, fused_pool, fused_response_norm, has_hooks, is_plain
from lowrank_cnn.kernels.problem import Pair, Sides


class FusedComposite(nn.Module):
    """A composite layer with the ReLU and the 2x2 max-pool that followed it."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        bias: nn.Parameter | None,
        *,
        stride: Pair,
        padding: Sequence[Sides],
        relu: bool = False,
        pool: str | None = None,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.bias = bias
        self.stride, self.padding = stride, tuple(padding)
        self.relu, self.pool = relu, pool

    def forward(self, x: Tensor) -> Tensor:
        return composite_conv2d(
            x,
            list(self.weights),
            self.bias,
            stride=self.stride,
            padding=self.padding,
            relu=self.relu,
            pool=self.pool,
        )

    def extra_repr(self) -> str:
        groups = " + ".join(f"{w.shape[2]}x{w.shape[3]},{w.shape[0]}" for w in self.weights)
        return f"{groups}, stride={self.stride}, relu={self.relu}, pool={self.pool}"


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
    """A fused copy for inference: its convs' weights are copies, laid out as the kernels read them."""
    twin = fuse(model)
    for layer in twin.modules():
        if isinstance(layer, FusedComposite):
            weights = laid_out([weight.detach() for weight in layer.weights], layer.weights[0].dtype)
            layer.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)
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
    relu = bool(following) and is_plain(following[0], nn.ReLU)
    pool = _pool(following[1]) if relu and len(following) > 1 else None
    *basis, last = stages
    layer = FusedComposite(**last, relu=relu, pool=pool)
    layer = FusedChain(FusedComposite(**basis[0]), layer) if basis else layer
    return layer, relu + (pool is not None)


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


def _pool(module: nn.Module) -> str | None:
    """The rounding of a 2x2 max-pool of stride 2, or None for any other module."""
    if not isinstance(module, nn.MaxPool2d) or not is_plain(module, nn.MaxPool2d) or module.return_indices:
        return None
    sizes = [(v, v) if isinstance(v, int) else tuple(v) for v in (module.kernel_size, module.stride)]
    if sizes != [(2, 2), (2, 2)] or module.padding not in (0, (0, 0)) or module.dilation not in (1, (1, 1)):
        return None
    return "ceil" if module.ceil_mode else "floor"
