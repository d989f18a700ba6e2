"""A first layer that whitens: its filters are the principal directions of patches, scaled to equal variance.

After Page (2019), "How to train your ResNet", and cifar10-airbench (Jordan 2024). With C the covariance of patches
of the shape of a filter, and C = sum_i l_i v_i v_i^T, a filter is v_i / sqrt(l_i + epsilon), and another its
negative, since a rectifier cuts half. The layer is then left as it is: training begins behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.data import Loader
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.layers import weights_of
from lowrank_cnn.system.errors import LowRankError

IMAGES = 4096
EPSILON = 5e-4


@torch.no_grad()
def whiten_first_layer(
    network: nn.Module, train: Loader, *, add_up: Callable[[Tensor], Tensor] = Tensor.clone
) -> None:
    """Give the network's first conv whitening filters, from the first batches to train on, and freeze them.

    A composite has directions of its own for each shape of filter. `add_up` sums over processes.
    """
    name, layer = next(iter(weight_layers(network)), ("", None))
    if layer is None or isinstance(layer, nn.Linear):
        raise LowRankError("whiten_first needs a network that begins with a conv: set whiten_first=false.")
    images = _some_images(train)
    for weight in weights_of(layer):
        if weight.shape[1] != images.shape[1]:
            raise LowRankError(f"whiten_first needs the first conv, {name}, to see all channels of an image.")
        weight.copy_(whitening_filters(weight, patch_covariance(images, weight.shape[2:], add_up)))
        weight.requires_grad_(False)


def _some_images(train: Loader) -> Tensor:
    found: list[Tensor] = []
    batches = train.epoch(0)
    for images, _ in islice(batches, len(train)):
        found.append(images)
        if sum(map(len, found)) >= IMAGES:
            break
    return torch.cat(found)[:IMAGES].float()


def patch_covariance(images: Tensor, shape: torch.Size, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """The second moments [n, n] of patches of this shape, in double precision: images have a mean of zero."""
    work = torch.float32 if images.device.type == "mps" else torch.float64
    size = images.shape[1] * shape.numel()
    total = torch.zeros(size * size + 1, dtype=work, device=images.device)
    for part in images.split(512):
        patches = functional.unfold(part, tuple(shape)).transpose(1, 2).reshape(-1, size).to(work)
        total[:-1] += (patches.T @ patches).flatten()
        total[-1] += len(patches)
    total = add_up(total)
    return (total[:-1] / total[-1]).view(size, size)


def whitening_filters(weight: Tensor, covariance: Tensor) -> Tensor:
    """Filters in place of a weight [d, c, h, w]: the widest directions, their negatives, then mixtures.

    Where there are more filters than directions and negatives, those left keep their random directions, in the
    whitened space.
    """
    values, vectors = torch.linalg.eigh(covariance)
    directions = (vectors / (values.clamp(min=0) + EPSILON).sqrt()).T.flip(0)
    pairs = min(len(directions), len(weight) // 2)
    rest = functional.normalize(weight[2 * pairs :].flatten(1).to(directions), dim=1) @ directions
    return torch.cat([directions[:pairs], -directions[:pairs], rest]).view(weight.shape).to(weight)
