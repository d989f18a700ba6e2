"""Fuse the layers of a network: conv -> batch norm -> + residual -> activation -> max-pool become one layer.

`fuse` captures the network's graph and replaces these patterns wherever the forward calls them, in a hand-written
block as in a Sequential. A module whose forward cannot be captured keeps its forward, and its parts are fused one
by one. The copy shares the network's parameters and buffers, so it trains the same network.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from lowrank_cnn.graph.bands import fused_bands
from lowrank_cnn.graph.capture import CaptureError, NetworkGraph, capture
from lowrank_cnn.graph.fused_between import FusedNorm, NormedConv, fused_neighbour, fused_pool
from lowrank_cnn.graph.patterns import LAYERS, Pattern, find_patterns, rewritten, shared_copy, split_norm
from lowrank_cnn.kernels.fused_convs import FrozenComposite, FusedComposite, fused_layer, pool_name


def fuse(model: nn.Module, *, say: Callable[[str], None] | None = None) -> nn.Module:
    """A copy of a model with shared parameters, in which convs, norms, activations and pools run fused.

    The copy has the model's current mode: fuse a model in training mode to train it. `say`, if given, is called
    with the reason if the forward of the whole model cannot be captured.

        fused = fuse(model.train())
    """
    twin = _fused(shared_copy(model, split_norm, fused_bands), say)
    fuse_neighbours(twin)
    return twin


def freeze(model: nn.Module) -> nn.Module:
    """A fused copy for inference. The weights of its convs are copies in the memory layout that the kernels read.

    frozen = freeze(model.eval())
    """
    twin = nn.Sequential(fuse(model))  # so that the model itself may be replaced
    for name, layer in list(twin.named_modules()):
        if type(layer) is FusedComposite:
            frozen = FrozenComposite(list(layer.weights), layer.bias, **layer.options)
            twin.set_submodule(name, frozen.train(layer.training))
    return twin[0]


def fuse_neighbours(model: nn.Module) -> int:
    """Replace max-pools and response norms inside a network by layers that use the kernels; returns how many."""
    parts = model.named_modules(remove_duplicate=False)
    found = {name: layer.train(part.training) for name, part in parts if (layer := fused_neighbour(part)) and name}
    for name, layer in found.items():
        model.set_submodule(name, layer)
    return len(found)


def _fused(module: nn.Module, say: Callable[[str], None] | None = None) -> nn.Module:
    """Fuse a module, possibly in place."""
    if (layer := fused_layer(module) or fused_neighbour(module)) is not None:
        return layer.train(module.training)
    if not module._modules:
        return module
    try:
        captured = capture(module).complete()
    except CaptureError as error:
        if say is not None:
            say(f"Layers are fused one by one: {error}.")
        for name, part in module._modules.items():
            module._modules[name] = part and _fused(part)
        return module
    found = find_patterns(captured, norms=True, kinds=(*LAYERS, "norm"), accepts=partial(_accepts, captured))
    made = {pattern: layer for pattern in found if (layer := _layer(captured, pattern)) is not None}
    twin = rewritten(captured, made)
    _split_results(twin)
    return twin


def _accepts(captured: NetworkGraph, layer: fx.Node, parts: dict[str, Any]) -> bool:
    """Whether one of our layers computes a pattern in one call."""
    pool, norm = parts.get("pool"), parts.get("norm")
    if norm is not None and type(captured.module(norm)) is not nn.BatchNorm2d:
        return False
    if norm is not None or isinstance(captured.module(layer), nn.BatchNorm2d):
        return pool is None or fused_pool(pool) is not None
    # Without a norm: a conv's gradient supports ReLU and pool, and its kernels need a residual of the full size.
    pooled = pool is None or (parts.get("activation") in (None, "relu") and pool_name(pool) is not None)
    return pooled and "add" not in parts


def _layer(captured: NetworkGraph, pattern: Pattern) -> nn.Module | None:
    """The fused layer of a pattern; None if there is nothing to fuse."""
    first = captured.root.get_submodule(pattern.name)
    norm = None if pattern.norm is None else captured.module(pattern.norm)
    whole = first if isinstance(first, nn.BatchNorm2d) else norm
    if not isinstance(whole, nn.BatchNorm2d):
        name = None if pattern.pool is None else pool_name(pattern.pool)
        made = fused_layer(first, activation=pattern.activation, pool=name)
        return None if made is None else made.train(first.training)
    pool = None if pattern.pool is None else fused_pool(pattern.pool)
    fused = FusedNorm(whole, pattern.activation, pool=pool, add_last=pattern.add_last)
    if norm is None:
        return fused if len(pattern.nodes) > 1 else None
    return NormedConv(fused_layer(first) or first, fused).train(norm.training)


def _split_results(twin: fx.GraphModule) -> None:
    """Return a norm's result twice if several layers read it: its own kernel then adds up their gradients."""
    for node in list(twin.graph.nodes):
        layer = twin.get_submodule(str(node.target)) if node.op == "call_module" else None
        readers = list(node.users)
        if not isinstance(layer, NormedConv) or len(readers) < 2 or layer.norm.pool is not None:
            continue
        layer.norm.twice = True
        with twin.graph.inserting_after(node):
            first = twin.graph.call_function(operator.getitem, (node, 0))
            second = twin.graph.call_function(operator.getitem, (node, 1))
        for reader, part in zip(readers, (first, *[second] * len(readers)), strict=False):
            reader.replace_input_with(node, part)
    twin.recompile()
