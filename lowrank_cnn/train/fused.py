"""The network as it trains on a GPU: with fused layers, where they are known to be the same network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.fuse import fuse
from lowrank_cnn.system.compare import difference
from lowrank_cnn.train.graph_fused import fused_by_graph
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
