"""ResNet-18 (He et al. 2015), dense and low-rank: not in the paper, but the usual baseline today.

Filters come in multiples of sixteen at every width, which kernels of every engine run fast, so that networks of
different widths can be compared by their time. Batch norm is part of the design: there is no variant without.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.schemes import Scheme, build_conv, parse_scheme
from lowrank_cnn.models.network import GlobalAveragePool, Network, Options, Variant

FILTERS = (64, 128, 256, 512)
"""Filters of the four stages, of two blocks each. Each later stage halves the maps in its first block."""
ALL, LATE = (0, 1, 2, 3, 4), (3, 4)
"""Stages that take the scheme; 0 is the stem."""


@dataclass(frozen=True)
class ResNetVariant(Variant):
    """The stem (kernel, stride, pool), and the stages that take the scheme."""

    kernel: int = 7
    pool: bool = True
    where: tuple[int, ...] = ALL
    image: int = 224


# The small ones keep the size of the maps in their stem: for images of 32 to 64 pixels.
_SMALL: dict[str, Any] = {"stride": 1, "kernel": 3, "pool": False, "image": 64}
VARIANTS = {
    "resnet18": ResNetVariant(stride=2),
    "resnet18-lr": ResNetVariant("lr", stride=2),
    "resnet18-lr-late": ResNetVariant("lr", stride=2, where=LATE),
    "resnet18-small": ResNetVariant(**_SMALL),
    "resnet18-small-lr": ResNetVariant("lr", **_SMALL),
    "resnet18-small-lr-late": ResNetVariant("lr", where=LATE, **_SMALL),
}

CLASSES, NORM = 1000, "batch"


class ResidualBlock(nn.Module):
    """Two 3x3 convs and the input added to what they give; a 1x1 conv fits the input where the shapes differ."""

    def __init__(self, channels: int, filters: int, stride: int, scheme: Scheme) -> None:
        super().__init__()
        self.conv1 = build_conv(channels, filters, 3, scheme, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = build_conv(filters, filters, 3, scheme, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.shortcut: nn.Module = nn.Identity()
        if (channels, stride) != (filters, 1):
            conv = nn.Conv2d(channels, filters, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(filters)))
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(Network):
    def __init__(self, variant: ResNetVariant, options: Options) -> None:
        super().__init__(options.size_or(variant.image))
        scheme = options.scheme_or(variant.scheme)
        if scheme.to not in (None, 1.0):
            raise LowRankError("a residual network adds maps of equal width, which embed changes: use lr-join.")
        filters = [options.sixteens(count) for count in FILTERS]
        schemes = [scheme if stage in variant.where else parse_scheme("dense") for stage in ALL]
        sides: Any = {"stride": options.stride, "padding": variant.kernel // 2}
        conv = build_conv(options.in_channels, filters[0], variant.kernel, schemes[0], bias=False, **sides)
        stem: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, norm=nn.BatchNorm2d(filters[0]))
        stem["relu"] = nn.ReLU(inplace=True)
        if variant.pool:
            stem["pool"] = nn.MaxPool2d(3, 2, padding=1)
        self.stem = nn.Sequential(stem)
        self.stages = nn.Sequential()
        channels = filters[0]
        for stage, count in enumerate(filters, start=1):
            first = ResidualBlock(channels, count, 1 if stage == 1 else 2, schemes[stage])
            second = ResidualBlock(count, count, 1, schemes[stage])
            self.stages.add_module(f"stage{stage}", nn.Sequential(first, second))
            channels = count
        self.pool = GlobalAveragePool()
        self.classes = nn.Linear(channels, options.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.classes(self.pool(self.stages(self.stem(x))))
