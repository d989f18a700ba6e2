"""What makes short runs accurate: fast biases of norms, Lookahead, and averages over views of a test image.

After Zhang et al. (2019) for Lookahead, Page (2019) for the rates of biases, and cifar10-airbench (Jordan 2024)
for the values that go together. Everything is device work that waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.train.recipe import Recipe

Forward = Callable[[Tensor], Tensor]


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

    def mirrored(images: Tensor) -> Tensor:
        logits = forward(images)
        return (logits + forward(images.flip(-1))) / 2 if recipe.test_mirror else logits

    def shifted(images: Tensor) -> Tensor:
        step, (height, width) = recipe.test_shift, images.shape[2:]
        padded = functional.pad(images, (step,) * 4, mode="reflect")
        views = (padded[:, :, at : at + height, at : at + width] for at in (0, 2 * step))
        one, other = (mirrored(view.contiguous(memory_format=torch.channels_last)) for view in views)
        return mirrored(images) / 2 + (one + other) / 4

    return shifted if recipe.test_shift else mirrored
