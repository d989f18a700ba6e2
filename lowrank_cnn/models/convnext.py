"""A small ConvNeXt (Liu et al. 2022), whose depthwise 7x7 convs are where strips pay, in the size of `femto`.

Its blocks have a batch norm behind the depthwise conv, as InceptionNeXt's do (Yu et al. 2024), which is folded
away before the network is deployed, and no scale for the residual: twelve blocks train without. The stem cuts
images into patches. Their side is `stride`: 4 for photographs, 2 for images of 32 to 64 pixels, so that the first
maps stay larger than the strips.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.schemes import Scheme, build_conv
from lowrank_cnn.models.network import GlobalAveragePool, Network, Options, Variant

FILTERS, BLOCKS = (48, 96, 192, 384), (2, 2, 6, 2)
"""Channels and blocks of the four stages. A 2x2 conv halves the maps before each later stage."""
EXPANSION = 4


@dataclass(frozen=True)
class ConvNeXtVariant(Variant):
    """The side of the depthwise filters, and of the images that the network is for."""

    stride: int = 4
    kernel: int = 7
    image: int = 224


_SMALL: dict[str, Any] = {"stride": 2, "image": 64}
VARIANTS = {
    "convnext": ConvNeXtVariant(),
    "convnext-bands": ConvNeXtVariant("bands"),
    "convnext-dw3": ConvNeXtVariant(kernel=3),
    "convnext-small": ConvNeXtVariant(**_SMALL),
    "convnext-small-bands": ConvNeXtVariant("bands", **_SMALL),
    "convnext-small-dw3": ConvNeXtVariant(kernel=3, **_SMALL),
}

CLASSES, NORM = 1000, "batch"


class Block(nn.Module):
    """A depthwise conv, a norm, and two 1x1 convs around a GELU, added to the input."""

    def __init__(self, channels: int, kernel: int, scheme: Scheme) -> None:
        super().__init__()
        self.depthwise = build_conv(
            channels, channels, kernel, scheme, padding=kernel // 2, channel_groups=channels, bias=False
        )
        self.norm = nn.BatchNorm2d(channels)
        self.widen = nn.Conv2d(channels, EXPANSION * channels, 1)
        self.gelu = nn.GELU()
        self.narrow = nn.Conv2d(EXPANSION * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.gelu(self.widen(self.norm(self.depthwise(x)))))


class ConvNeXt(Network):
    def __init__(self, variant: ConvNeXtVariant, options: Options) -> None:
        super().__init__(options.size_or(variant.image))
        scheme = options.scheme_or(variant.scheme)
        if not scheme.takes_depthwise and scheme.saves:
            raise LowRankError(f"the spatial filters of a ConvNeXt are depthwise, which {scheme} does not take.")
        self.smallest = options.stride * 2 ** (len(FILTERS) - 1)
        self.stages = nn.Sequential()
        channels, side = options.in_channels, options.stride
        for stage, (count, blocks) in enumerate(zip(FILTERS, BLOCKS, strict=True), start=1):
            filters = options.sixteens(count)
            layers: OrderedDict[str, nn.Module] = OrderedDict()
            layers["patches"] = nn.Conv2d(channels, filters, side, stride=side, bias=False)
            layers["norm"] = nn.BatchNorm2d(filters)
            for place in range(blocks):
                layers[f"block{place + 1}"] = Block(filters, variant.kernel, scheme)
            self.stages.add_module(f"stage{stage}", nn.Sequential(layers))
            channels, side = filters, 2
        self.pool = GlobalAveragePool()
        self.norm = nn.BatchNorm1d(channels)
        self.classes = nn.Linear(channels, options.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.classes(self.norm(self.pool(self.stages(x))))
