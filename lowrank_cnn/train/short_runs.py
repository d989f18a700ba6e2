"""What makes short runs accurate: a whitening first layer, fast norm biases, Lookahead, and averaged test views.

After Page (2019), "How to train your ResNet", for whitening and the rates of biases, Zhang et al. (2019) for
Lookahead, and cifar10-airbench (Jordan 2024) for the values that go together. The host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Loader
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.layers import weights_of
from lowrank_cnn.train.objective import class_scores
from lowrank_cnn.train.recipe import Recipe

Forward = Callable[[Tensor], Tensor]
WHITENED_IMAGES = 4096
WHITENING_EPSILON = 5e-4


def norm_biases(network: nn.Module) -> set[str]:
    """Names of the biases of batch norms, which a recipe may let learn faster."""
    norms = (n for n, m in network.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    known = dict(network.named_parameters())
    return {name for norm in norms if (name := f"{norm}.bias".lstrip(".")) in known}


def decay_at(share: float, most: float) -> float:
    """How much of the slow weights stays: little at first, and `most` at the end of the run."""
    return most * share**3


@torch.no_grad()
def look_ahead(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], decay: float) -> None:
    """Move slow weights towards the weights, and go on from there; statistics of norms are weights too."""
    names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    averages, fast = [slow[name] for name in names], [weights[name] for name in names]
    torch._foreach_lerp_(averages, fast, 1 - decay)  # pyright: ignore
    torch._foreach_copy_(fast, averages)  # pyright: ignore
    for name in weights.keys() - set(names):
        slow[name].copy_(weights[name])


def averaged_views(forward: Forward, recipe: Recipe) -> Forward:
    """A forward that averages the logits of an image, its mirror image and two shifts, as the recipe says.

    The shifts, up and left and down and right, count for half.
    """

    def scores(images: Tensor) -> Tensor:
        return class_scores(forward(images), recipe.output)

    def mirrored(images: Tensor) -> Tensor:
        return (scores(images) + scores(images.flip(-1))) / 2 if recipe.test_mirror else scores(images)

    def shifted(images: Tensor) -> Tensor:
        step, (height, width) = recipe.test_shift, images.shape[2:]
        padded = functional.pad(images, (step,) * 4, mode="reflect")
        views = (padded[:, :, at : at + height, at : at + width] for at in (0, 2 * step))
        one, other = (mirrored(view.contiguous(memory_format=torch.channels_last)) for view in views)
        return mirrored(images) / 2 + (one + other) / 4

    return shifted if recipe.test_shift else mirrored


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
        if sum(map(len, found)) >= WHITENED_IMAGES:
            break
    return torch.cat(found)[:WHITENED_IMAGES].float()


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

    With C the covariance of patches of the shape of a filter, and C = sum_i l_i v_i v_i^T, a filter is
    v_i / sqrt(l_i + epsilon), and another its negative, since a rectifier cuts half. If there are more filters
    than directions and negatives, the rest keep their random directions, in the whitened space.
    """
    values, vectors = torch.linalg.eigh(covariance)
    directions = (vectors / (values.clamp(min=0) + WHITENING_EPSILON).sqrt()).T.flip(0)
    pairs = min(len(directions), len(weight) // 2)
    rest = functional.normalize(weight[2 * pairs :].flatten(1).to(directions), dim=1) @ directions
    return torch.cat([directions[:pairs], -directions[:pairs], rest]).view(weight.shape).to(weight)
