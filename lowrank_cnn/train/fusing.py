"""Fuse the layers of a network for training on a GPU, and check that it is still the same network.

What follows each conv is fused: conv -> batch norm -> + residual -> activation -> max-pool. The graph of the
forward pass shows these wherever they are called, in a hand-written block as in a Sequential. It is the graph of
training mode: the network itself is what evaluates.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.fuse import FusedComposite, conv_options, fuse, fuse_neighbours, pool_name
from lowrank_cnn.kernels.modules import FusedNorm, NormedConv, fused_pool
from lowrank_cnn.kernels.network_graph import NetworkGraph, capture
from lowrank_cnn.kernels.patterns import Pattern, find_patterns, rewritten
from lowrank_cnn.system.compare import difference
from lowrank_cnn.train.recompute import buffers_as_they_were

TOLERANCE = 1e-3
IMAGES = 4
"""Shown to both networks: a batch norm of fewer would normalise its last maps to plus and minus one."""


def fused_to_train(network: nn.Module, size: Sequence[int], say: Callable[[str], None] = print) -> nn.Module:
    """A copy that shares all parameters and runs its layers fused, or the network itself.

    First by the graph of its forward, which sees a norm behind a conv wherever it is called; then by its
    Sequentials alone. A forward written by hand may ask a layer for what its fused form has not, or call it in an
    order of its own, so both networks are first shown the same images: results and gradients must agree.
    """
    for what, way in (("Convs and norms", fused_by_graph), ("Layers", fuse)):
        try:
            if (twin := way(network)) is None:
                continue
            apart = _difference(network, twin, size)
        except Exception as error:  # whatever a foreign forward stumbles over
            reason = str(error).partition("\n")[0] or type(error).__name__
            say(f"{what} are not fused: {reason}")
            continue
        if apart <= TOLERANCE:
            return twin.train()
        say(f"{what} are not fused: the results would differ by {apart:.1g}.")
    return network


def _difference(network: nn.Module, twin: nn.Module, size: Sequence[int]) -> float:
    """How far the twin's results and gradients in training are from the network's, by torch's own operations."""
    modes = {module: module.training for module in network.modules()}
    device = next(network.parameters()).device
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with forced("off"), drawing, buffers_as_they_were(network):
            images = torch.randn(IMAGES, *size, device=device)
            seed = torch.seed()
            right, ours = (_results(part.train(), images, network, seed) for part in (network, twin))
    finally:
        for module, training in modes.items():
            module.training = training
    return difference(ours, right, by="norm")


def _results(run: nn.Module, images: Tensor, network: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """What a network gives for images, and the gradients of some function of that, each in one vector."""
    torch.manual_seed(seed)  # dropout draws the same for both
    with torch.enable_grad():
        found = run(images)
        outputs = torch.cat([part.flatten() for part in (found if isinstance(found, tuple) else (found,))])
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        some = torch.linspace(-1, 1, outputs.numel(), device=outputs.device, dtype=outputs.dtype)
        gradients = torch.autograd.grad((outputs * some).sum(), parameters, allow_unused=True)
    known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return outputs.detach(), torch.cat([gradient.flatten() for gradient in known])


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
