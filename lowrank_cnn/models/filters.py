"""The filters of a network: their shapes, their singular values and their receptive field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import TIMES
from lowrank_cnn.method.layers import CompositeConv2d, weights_of
from lowrank_cnn.method.rewrite import changes_of
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models.build import name_of


def first_filters(network: nn.Module) -> list[tuple[str, Tensor]]:
    """The filters [n, channels, height, width] of the first conv, titled, and the dense filters they equal.

    A chain lists only the convs that see the channels of the image.
    """
    kinds = (FactoredConv2d, CompositeConv2d, nn.Conv2d)
    conv = next((module for module in network.modules() if isinstance(module, kinds)), None)
    if conv is None:
        raise LowRankError(f"{name_of(network)} has no convolution whose filters could be shown.")
    if not isinstance(conv, FactoredConv2d):
        return _titled([conv])
    stages: list[Any] = list(conv)
    spatial = [stage for stage in stages if max(stage.kernel_size) > 1]
    joined = max(stages[-1].kernel_size) == 1
    combined = "combined by the join" if joined else "the two halves combined"
    # The second half of a pair works on the channels of the first, which are not colours.
    return [*_titled(spatial if joined else spatial[:1]), (combined, conv.weight.detach())]


def _titled(convs: Iterable[Any]) -> list[tuple[str, Tensor]]:
    found = []
    for conv in convs:
        for weight in weights_of(conv):
            height, width = weight.shape[-2:]
            kind = "vertical " if height > width else "horizontal " if width > height else ""
            found.append((f"{kind}{height}{TIMES}{width}", weight.detach()))
    return found


def filter_shapes(network: nn.Module) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Each spatial layer, its filters when it was dense, and now by shape ("3x1"), even if all became points."""
    changed = {change.name: change.before for change in changes_of(network)}
    found = []
    for name, module in network.named_modules():
        spatial = not changed.get(name, "1x1,").startswith("1x1,")
        if isinstance(module, CompositeConv2d):
            filters = [("x".join(map(str, g.kernel)) or "identity", g.filters) for g in module.composite.groups]
        elif isinstance(module, nn.Conv2d) and (spatial or max(module.kernel_size) > 1):
            filters = [("x".join(map(str, module.kernel_size)), module.out_channels)]
        else:
            continue
        dense = int(changed[name].rpartition(",")[2]) if name in changed else sum(n for _, n in filters)
        found.append((name, dense, filters))
    if not found:
        raise LowRankError("the network has no spatial convolutions to show the shapes of.")
    return found


MOST_KERNELS = 10_000
"""Kernels of a layer that are looked at: a share of them tells the mean."""


def dense_filters(network: nn.Module) -> dict[str, Tensor]:
    """The weights of the plain convs that span more than a row or a column, by name."""
    found = {
        name: module.weight.detach().float()
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and min(module.kernel_size) > 1
    }
    if not found:
        raise LowRankError(f"{name_of(network)} has no dense filters; give a dense network, such as vgg11-gmp.")
    return found


def spatial_energy(weight: Tensor) -> Tensor:
    """The mean share of a kernel's energy in each of its singular values, the largest first."""
    kernels = weight.flatten(0, 1)
    step = ceil_div(len(kernels), MOST_KERNELS)
    energy = torch.linalg.svdvals(kernels[::step].double()) ** 2
    return (energy / energy.sum(dim=1, keepdim=True).clamp_min(1e-300)).mean(dim=0)


def singular_energy(weight: Tensor) -> Tensor:
    """The share of energy in the first n singular values of the filters as rows, for n = 1, 2, ..."""
    energy = torch.linalg.svdvals(weight.flatten(1).double()) ** 2
    return energy.cumsum(0) / energy.sum()


LARGEST_IMAGE = 160
PIXELS = 3 * LARGEST_IMAGE**2
"""All random images together have this many pixels: more small images are needed to average the noise out."""


def receptive_field(network: nn.Module, *, seed: int = 0) -> Tensor:
    """The effective receptive field (Luo et al. 2016) [height, width], its largest value one.

    It is the mean absolute gradient, over the image, of the centre of the last conv's maps. Random signs over the
    channels keep their gradients from cancelling.
    """
    size = notes(network).input_size or (3, LARGEST_IMAGE, LARGEST_IMAGE)
    generator = torch.Generator().manual_seed(seed)
    height, width = (min(side, LARGEST_IMAGE) for side in size[1:])
    images = torch.randn(PIXELS // (height * width), size[0], height, width, generator=generator).requires_grad_()
    maps = _last_maps(network.eval(), images)
    centre = maps[:, :, maps.shape[2] // 2, maps.shape[3] // 2]
    signs = torch.randint(0, 2, centre.shape, generator=generator) * 2 - 1
    (gradient,) = torch.autograd.grad((centre * signs).sum(), images)
    field = gradient.abs().mean(dim=(0, 1))
    return field / field.max().clamp_min(torch.finfo(field.dtype).tiny)


def _last_maps(network: nn.Module, images: Tensor) -> Tensor:
    """The output of the last conv that runs and still has an extent."""
    found: list[Tensor] = []

    def keep(module: nn.Module, _: object, maps: Tensor) -> None:
        if isinstance(module, nn.Conv2d | CompositeConv2d) and min(maps.shape[2:]) > 1:
            found.append(maps)

    with register_module_forward_hook(keep):
        network(images)
    if not found:
        raise LowRankError(f"{name_of(network)} has no convolution whose field could be shown.")
    return found[-1]


def pixels_holding(share: float, field: Tensor) -> int:
    """The fewest pixels that hold this share of a receptive field."""
    ranked = field.flatten().sort(descending=True).values.double().cumsum(0)
    return int((ranked < share * ranked[-1]).sum()) + 1
