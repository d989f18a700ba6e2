"""Fuse what follows each conv in training: conv -> batch norm -> + residual -> activation -> max-pool.

The forward's graph shows these wherever they are called, in a hand-written block as in a Sequential. The graph is
that of training: what a forward does only when it evaluates is no part of it, and the network itself is what
evaluates.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import replace

from torch import fx, nn

from lowrank_cnn.kernels.fuse import FusedComposite, conv_options, fuse, fuse_neighbours, pool_name
from lowrank_cnn.kernels.modules import FusedNorm, NormedConv, fused_pool
from lowrank_cnn.kernels.network_graph import NetworkGraph, capture
from lowrank_cnn.kernels.patterns import Pattern, find_patterns, rewritten


def fused_by_graph(network: nn.Module) -> nn.Module | None:
    """A copy that shares all tensors, its patterns fused; None where no conv has a norm behind it."""
    captured = capture(shared_copy(network).train())
    found = [_supported(captured, pattern) for pattern in find_patterns(captured, norms=True)]
    patterns = [pattern for pattern in found if pattern is not None]
    if not any(pattern.norm for pattern in patterns):
        return None
    twin = rewritten(captured, patterns, lambda pattern: _fused(captured, pattern))
    _split_results(twin)
    fuse_neighbours(twin)
    return twin


def shared_copy(module: nn.Module) -> nn.Module:
    """Modules of one's own around the same parameters and buffers: modes and parts may be changed."""
    twin = copy.copy(module)
    parts = {name: part and shared_copy(part) for name, part in module._modules.items()}
    twin._modules = parts  # type: ignore[assignment]
    return twin


def _supported(captured: NetworkGraph, pattern: Pattern) -> Pattern | None:
    """The part of a pattern that one of our layers computes; None where no layer does."""
    conv = captured.module(pattern.nodes[0])
    assert conv is not None
    if pattern.norm is not None:
        plain = type(captured.module(pattern.norm)) is nn.BatchNorm2d
        pooled = pattern.pool is None or fused_pool(pattern.pool) is not None
        return pattern if plain and pooled else None
    if conv_options(conv) is None:
        return None
    # Without a norm, a conv takes a ReLU, and behind that a 2x2 max-pool: these have gradients.
    relu = pattern.activation == "relu"
    pool = pattern.pool is None or (relu and pool_name(pattern.pool) in ("floor", "ceil"))
    if pattern.add is None and (relu or pattern.activation is None) and pool:
        return pattern
    return replace(pattern, nodes=pattern.nodes[:1], add=None, activation=None, pool=None)


def _fused(captured: NetworkGraph, pattern: Pattern) -> nn.Module:
    conv = captured.module(pattern.nodes[0])
    assert conv is not None
    if pattern.norm is None:
        rounding = None if pattern.pool is None else pool_name(pattern.pool)
        return FusedComposite(**conv_options(conv) or {}, relu=pattern.activation is not None, pool=rounding)
    norm = captured.module(pattern.norm)
    assert isinstance(norm, nn.BatchNorm2d)
    pool = None if pattern.pool is None else fused_pool(pattern.pool)
    return NormedConv(fuse(conv), FusedNorm(norm, pattern.activation, pool=pool))


def _split_results(twin: fx.GraphModule) -> None:
    """Give a result that several layers read twice: the norm's own kernel then adds their gradients up."""
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
