"""VGG-11 and its low-rank variants (Ioannou et al. 2016, table 5, as corrected by the published counts)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import ceil

from torch import Tensor, nn

from lowrank_cnn.models.network import FlattenSized, GlobalMaxPool, Network, Options, Variant, conv_block

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Filters of the 3x3 convs; a 2x2 max-pool closes each stage."""


@dataclass(frozen=True)
class VGGVariant(Variant):
    """Beside the scheme of every conv: the head, and the filters of conv5."""

    global_pool: bool = True
    last: int = 512


VARIANTS = {
    "vgg11": VGGVariant(global_pool=False),
    "vgg11-gmp": VGGVariant(),
    "vgg11-gmp-sf": VGGVariant("separable"),
    "vgg11-gmp-lr": VGGVariant("lr"),
    "vgg11-gmp-lr-2x": VGGVariant("lr", last=1024),
    "vgg11-gmp-lr-join": VGGVariant("lr-join"),
    "vgg11-gmp-lr-lde": VGGVariant("embed", stride=2),
    "vgg11-gmp-lr-join-wfull": VGGVariant("mixture(kx1=3, 1xk=3, kxk=2, join)", last=1024),
}

CLASSES, IMAGE = 1000, 224


class VGG(Network):
    def __init__(self, variant: VGGVariant, options: Options) -> None:
        super().__init__(options.size_or(IMAGE))
        scheme = options.scheme_or(variant.scheme)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels, stride = options.in_channels, options.stride
        stages = (*STAGES[:-1], (variant.last,) * len(STAGES[-1]))
        for stage, convs in enumerate(stages, start=1):
            for index, count in enumerate(map(options.filters, convs), start=1):
                name = f"conv{stage}_{index}"
                layers |= conv_block(name, channels, count, 3, options, scheme=scheme, stride=stride)
                channels, stride = scheme.out_filters(count), 1
            if stage < len(stages):
                layers[f"pool{stage}"] = nn.MaxPool2d(2, ceil_mode=True)
        self.features = nn.Sequential(layers)
        self.head = _head(channels, variant, options)

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.head(self.features(x))


def _head(channels: int, variant: VGGVariant, options: Options) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if variant.global_pool:
        layers["pool5"] = GlobalMaxPool()
    else:
        image = options.size_or(IMAGE)[1]
        side = ceil(image / options.stride)
        for _ in STAGES:
            side = ceil(side / 2)
        layers["pool5"] = nn.MaxPool2d(2, ceil_mode=True)
        layers["flatten"] = FlattenSized(side, image)
        channels *= side * side
    hidden = options.filters(4096)
    for name in ("fc6", "fc7"):
        layers[name] = nn.Linear(channels, hidden)
        layers[f"{name}_relu"] = nn.ReLU(inplace=True)
        layers[f"{name}_dropout"] = options.drop(0.5)
        channels = hidden
    layers["fc8"] = nn.Linear(hidden, options.num_classes)
    return nn.Sequential(layers)
