"""The network as it trains on a GPU: with fused layers, where they are known to be the same network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.fuse import fuse
from lowrank_cnn.system.compare import difference
from lowrank_cnn.train.recompute import buffers_as_they_were

TOLERANCE = 1e-3


def fused_to_train(network: nn.Module, size: Sequence[int], say: Callable[[str], None] = print) -> nn.Module:
    """A copy that shares all parameters and runs its layers fused, or the network itself.

    A forward written by hand may ask a layer for what its fused form has not, or call it in an order of its own,
    so both are first shown the same images.
    """
    try:
        twin = fuse(network)
        error = _difference(network, twin, size)
    except Exception as error:  # whatever a foreign forward stumbles over
        reason = str(error).partition("\n")[0] or type(error).__name__
        say(f"Layers are not fused: {reason}")
        return network
    if not error <= TOLERANCE:
        say(f"Layers are not fused: the results would differ by {error:.1g}.")
        return network
    return twin.train()


@torch.no_grad()
def _difference(network: nn.Module, twin: nn.Module, size: Sequence[int]) -> float:
    """How far the twin's results are from the network's, relative to them, all by torch's own operations.

    It also runs as in training, where branches may take part that evaluation leaves out.
    """
    modes = {module: module.training for module in network.modules()}
    device = next(network.parameters()).device
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with forced("off"), drawing, buffers_as_they_were(network):
            images = torch.randn(2, *size, device=device)
            right, ours = (_logits(part.eval(), images) for part in (network, twin))
            twin.train()(images)
    finally:
        for module, training in modes.items():
            module.training = training
    return difference(ours, right, by="norm")


def _logits(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    outputs = network(images)
    return outputs[0] if isinstance(outputs, tuple) else outputs
