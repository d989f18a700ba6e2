"""The network that trains on a GPU: a fused copy if its results and gradients agree with the network's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.fusing import fuse, shared_copy
from lowrank_cnn.system.compare import difference, unchanged
from lowrank_cnn.system.errors import first_line
from lowrank_cnn.train.recompute import recomputed

TOLERANCE = 1e-3
IMAGES = 4
"""Images of the comparison. Fewer would make a batch norm give plus and minus one on its last, smallest maps."""


def fused_to_train(
    network: nn.Module, size: Sequence[int], say: Callable[[str], None] = print, *, recompute: bool = False
) -> nn.Module:
    """A copy that shares all parameters and runs its layers fused, or the network itself.

    With `recompute`, each stage of the copy is fused by itself and computed again in the backward pass. A forward
    may ask a layer for an attribute that its fused form lacks, or depend on its class. Both networks therefore run
    on the same random images first: results and gradients must agree.
    """
    try:
        own = shared_copy(network).train()
        twin = recomputed(own, within=fuse) if recompute else fuse(own, say=say)
        apart = _difference(network, twin, size)
    except Exception as error:  # a user's forward may fail in any way
        say(f"Layers are not fused: {first_line(error)}")
        return network
    if apart <= TOLERANCE:
        return twin.train()
    say(f"Layers are not fused: the results would differ by {apart:.1g}.")
    return network


def _difference(network: nn.Module, twin: nn.Module, size: Sequence[int]) -> float:
    """How far the twin's results and gradients in training are from the network's, both by torch's operations."""
    with forced("off"), unchanged(network, twin):
        images = torch.randn(IMAGES, *size, device=next(network.parameters()).device)
        seed = torch.seed()
        right, ours = (_results(part.train(), images, network, seed) for part in (network, twin))
    return difference(ours, right, by="norm")


def _results(run: nn.Module, images: Tensor, network: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """A network's outputs for images, and the gradients of a weighted sum of these, each as one vector."""
    torch.manual_seed(seed)  # dropout draws the same for both
    with torch.enable_grad():
        found = run(images)
        outputs = torch.cat([part.flatten() for part in (found if isinstance(found, tuple) else (found,))])
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        some = torch.linspace(-1, 1, outputs.numel(), device=outputs.device, dtype=outputs.dtype)
        gradients = torch.autograd.grad((outputs * some).sum(), parameters, allow_unused=True)
    known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return outputs.detach(), torch.cat([gradient.flatten() for gradient in known])
