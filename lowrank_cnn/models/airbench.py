"""A small network that reaches 94% on CIFAR-10 within seconds, after cifar10-airbench (Jordan 2024).

It follows https://github.com/KellerJordan/cifar10-airbench (arXiv:2404.00498). A fixed first layer of 2x2 filters
whitens patches. Three blocks of two 3x3 convs follow, each with a pool between its convs. Activations are GELU,
batch norms have a fixed scale of one, filters begin as the identity, and logits are scaled down. The code is ours,
and the 3x3 convs take any scheme. The recipe `cifar10-fast` trains it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from lowrank_cnn.method.branches import BranchedConv2d
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.layers import weights_of
from lowrank_cnn.method.schemes import build_conv
from lowrank_cnn.models.network import GlobalMaxPool, Network, Options, Variant

FILTERS = (64, 256, 256)
PATCH = 2
NORM_MOMENTUM = 0.4
"""Running statistics follow the last few batches, which Lookahead needs: it replaces weights every five steps."""
LOGIT_SCALE = 1 / 9

VARIANTS = {"airbench": Variant(), "airbench-lr": Variant("lr")}

CLASSES, IMAGE, NORM = 10, 32, "batch"


class PatchConv2d(nn.Conv2d):
    """The first layer. It has a class of its own so that `thin`, which changes plain layers, leaves it alone.

    It has a filter for each principal direction of a patch and one for its negative, which `fit` computes.
    """


class Scaled(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


class Airbench(Network):
    def __init__(self, variant: Variant, options: Options) -> None:
        super().__init__(options.size_or(IMAGE))
        self.smallest = 7 * options.stride + PATCH  # leaves one pixel after the three pools
        scheme = options.scheme_or(variant.scheme)
        patches = 2 * options.in_channels * PATCH**2
        first = PatchConv2d(options.in_channels, patches, PATCH, stride=options.stride)
        layers: OrderedDict[str, nn.Module] = OrderedDict(patches=first, patches_gelu=nn.GELU())
        channels = patches
        for block, count in enumerate(FILTERS, start=1):
            filters = options.sixteens(count)
            for place in (1, 2):
                name = f"conv{block}_{place}"
                layers[name] = build_conv(channels, filters, 3, scheme, padding=1, bias=False)
                channels = scheme.out_filters(filters)
                if place == 1:
                    layers[f"pool{block}"] = nn.MaxPool2d(2)
                layers[f"{name}_norm"] = nn.BatchNorm2d(channels, momentum=NORM_MOMENTUM)
                layers[f"{name}_gelu"] = nn.GELU()
        self.features = nn.Sequential(layers)
        self.pool = GlobalMaxPool()
        self.classes = nn.Linear(channels, options.num_classes, bias=False)
        self.scale = Scaled(LOGIT_SCALE)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.scale(self.classes(self.pool(self.features(x))))

    def adjust_init(self) -> None:
        """Fix the scales of norms, and let as many filters as a conv has inputs begin as the identity.

        The norms of branches keep theirs: they weigh the branches.
        """
        weighing = {id(part) for m in self.modules() if isinstance(m, BranchedConv2d) for part in m.children()}
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and id(module) not in weighing:
                module.weight.requires_grad_(False)
        for _, layer in weight_layers(self.features):
            if not isinstance(layer, PatchConv2d):
                begin_as_identity_(layer)


@torch.no_grad()
def begin_as_identity_(layer: nn.Module) -> None:
    """Let the first filters of a conv or composite pass one input channel each, through their centre tap."""
    first = 0
    for weight in weights_of(layer):
        count = min(len(weight), weight.shape[1] - first)
        if count > 0 and not weight.is_meta:
            weight[:count] = 0.0
            nn.init.dirac_(weight[:count, first : first + count])
        first += len(weight)
