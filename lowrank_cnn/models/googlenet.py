"""GoogLeNet (the BVLC reference) and its low-rank variants (Ioannou et al. 2016, section 4.2)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowrank_cnn.core.notes import note
from lowrank_cnn.method.schemes import Scheme, parse_scheme
from lowrank_cnn.models.network import GlobalAveragePool, Network, Options, Variant, conv_block


@dataclass(frozen=True)
class GoogLeNetVariant(Variant):
    """The scheme is that of the inceptions; `stem` is that of conv1 and conv2."""

    stride: int = 2
    stem: str = "dense"


VARIANTS = {
    "googlenet": GoogLeNetVariant(),
    "googlenet-lr": GoogLeNetVariant("lr"),
    "googlenet-lr-conv1": GoogLeNetVariant("lr", stem="lr"),
}

INCEPTIONS = {  # 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool projection
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}

CLASSES, IMAGE = 1000, 224
_AUXILIARY_LEAST = 12
_POOL_AFTER = ("3b", "4e")
_AUXILIARY_AFTER = {"4a": "aux1", "4d": "aux2"}


class GoogLeNet(Network):
    """Returns logits; in training a tuple of these and the logits of both auxiliary heads."""

    def __init__(self, variant: GoogLeNetVariant, options: Options) -> None:
        names = ("aux1", "aux2")
        super().__init__(options.size_or(IMAGE), auxiliary=names, unpublished=(*names, "classifier.fc"))
        self.smallest = 16 * options.stride
        scheme = options.scheme_or(variant.scheme)
        stem = parse_scheme(variant.stem) if variant.stem == "dense" else options.scheme_or(variant.stem)
        first, second = options.filters(64), options.filters(192)
        # conv1 and conv2 with Caffe's ceil pools; batch norm takes the place of local response norm.
        layers = conv_block("conv1", options.in_channels, first, 7, options, scheme=stem, stride=options.stride)
        layers["pool1"] = nn.MaxPool2d(3, 2, ceil_mode=True)
        if options.norm is None:
            layers["lrn1"] = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
        layers |= conv_block("conv2_reduce", stem.out_filters(first), first, 1, options)
        layers |= conv_block("conv2", first, second, 3, options, scheme=stem)
        if options.norm is None:
            layers["lrn2"] = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
        layers["pool2"] = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.stem, channels = nn.Sequential(layers), stem.out_filters(second)
        self.inceptions, heads = nn.ModuleDict(), []
        for name, counts in INCEPTIONS.items():
            module = Inception(channels, counts, options, scheme)
            self.inceptions[name], channels = module, module.out_channels
            if name in _AUXILIARY_AFTER:
                heads.append(_auxiliary_head(channels, options))
        self.aux1, self.aux2 = heads
        self.between = nn.MaxPool2d(3, 2, ceil_mode=True)
        pool, fc = GlobalAveragePool(), nn.Linear(channels, options.num_classes)
        self.classifier = nn.Sequential(OrderedDict(pool=pool, dropout=options.drop(0.4), fc=fc))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.check_input(x)
        x, auxiliary = self.stem(x), []
        for name, inception in self.inceptions.items():
            x = inception(x)
            if self.training and name in _AUXILIARY_AFTER:
                auxiliary.append(self.get_submodule(_AUXILIARY_AFTER[name])(x))
            if name in _POOL_AFTER:
                x = self.between(x)
        logits = self.classifier(x)
        return (logits, *auxiliary) if auxiliary else logits


class Inception(nn.Module):
    """Four branches over one input, concatenated: 1x1, 3x3, 5x5 and a pool with a projection."""

    def __init__(self, channels: int, counts: tuple[int, ...], options: Options, scheme: Scheme) -> None:
        super().__init__()
        # For initialisation, the layers that read the input count as groups of one composite.
        reading = ("branch1.conv1", "branch3.conv3_reduce", "branch5.conv5_reduce", "branch_pool.projection")
        note(self, entries=reading)
        one, reduce3, three, reduce5, five, projection = map(options.filters, counts)
        self.branch1 = nn.Sequential(conv_block("conv1", channels, one, 1, options))
        self.branch3 = _reduced("conv3", channels, reduce3, three, 3, options, scheme)
        self.branch5 = _reduced("conv5", channels, reduce5, five, 5, options, scheme)
        pool: OrderedDict[str, nn.Module] = OrderedDict(pool=nn.MaxPool2d(3, 1, padding=1))
        self.branch_pool = nn.Sequential(pool | conv_block("projection", channels, projection, 1, options))
        self.out_channels = one + scheme.out_filters(three) + scheme.out_filters(five) + projection

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), self.branch_pool(x)], dim=1)


class AuxiliaryPool(nn.Module):
    """Average maps of any size to 4x4.

    Maps that are large enough are first averaged in 5x5 windows at stride 3, as in the reference, where this alone
    turns 14x14 into 4x4.
    """

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[2:]) >= _AUXILIARY_LEAST:
            x = F.avg_pool2d(x, 5, 3, ceil_mode=True)
        return F.adaptive_avg_pool2d(x, 4)


def _reduced(
    name: str, channels: int, reduced: int, filters: int, kernel: int, options: Options, scheme: Scheme
) -> nn.Sequential:
    reduce = conv_block(f"{name}_reduce", channels, reduced, 1, options)
    return nn.Sequential(reduce | conv_block(name, reduced, filters, kernel, options, scheme=scheme))


def _auxiliary_head(channels: int, options: Options) -> nn.Sequential:
    reduced, hidden = options.filters(128), options.filters(1024)
    layers: OrderedDict[str, nn.Module] = OrderedDict(pool=AuxiliaryPool())
    layers |= conv_block("conv", channels, reduced, 1, options)
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(reduced * 16, hidden)
    layers["fc1_relu"] = nn.ReLU(inplace=True)
    layers["dropout"] = options.drop(0.7)
    layers["fc2"] = nn.Linear(hidden, options.num_classes)
    return nn.Sequential(layers)
