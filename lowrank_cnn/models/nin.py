"""Network-in-Network for CIFAR-10 and its low-rank variants (Ioannou et al. 2016, section 4.3)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

from lowrank_cnn.method.init import sigma
from lowrank_cnn.models.network import GlobalAveragePool, Network, Options, Variant, conv_block

Conv = tuple[int, str]
"""Kernel and scheme of a conv of 192 filters."""


@dataclass(frozen=True)
class NiNVariant(Variant):
    """The spatial convs that open each stage; the 1x1 convs are common to all."""

    stages: tuple[tuple[Conv, ...], ...] = ()


# The second layer of nin-c3's conv2 has three taps: only then do the counts match the published ones.
VARIANTS = {
    "nin": NiNVariant(stages=(((5, "dense"),), ((5, "dense"),), ((3, "dense"),))),
    "nin-c3": NiNVariant(stages=(((3, "dense"),), ((3, "dense"), (3, "lr")), ((3, "dense"),))),
    "nin-c3-lr": NiNVariant(stages=(((3, "lr"),), ((3, "lr"), (3, "lr")), ((3, "lr"),))),
}

SPATIAL = 192
POINTWISE = ((160, 96), (192, 192), (192,))
"""Filters of the 1x1 convs after conv1, conv2 and conv3; the last of all has one per class."""

CLASSES, IMAGE = 10, 30


class NiN(Network):
    def __init__(self, variant: NiNVariant, options: Options) -> None:
        super().__init__(options.size_or(IMAGE))
        self.smallest = 4 * options.stride
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels, stride = options.in_channels, options.stride
        filters = options.filters(SPATIAL)
        for stage, (spatial, pointwise) in enumerate(zip(variant.stages, POINTWISE, strict=True), start=1):
            for index, (kernel, own) in enumerate(spatial, start=1):
                scheme, name = options.scheme_or(own), f"conv{stage}_{index}"
                layers |= conv_block(name, channels, filters, kernel, options, scheme=scheme, stride=stride)
                channels, stride = scheme.out_filters(filters), 1
            for index, count in enumerate(map(options.filters, pointwise), start=1):
                layers |= conv_block(f"cccp{stage}_{index}", channels, count, 1, options)
                channels = count
            if stage < len(POINTWISE):
                averaged = stage == 2 and options.pool == "average"
                layers[f"pool{stage}"] = (nn.AvgPool2d if averaged else nn.MaxPool2d)(3, 2, ceil_mode=True)
                # Dropout changes the variance that a batch norm behind it sees in training, but not in evaluation.
                layers[f"dropout{stage}"] = options.drop(0.0 if options.norm == "batch" else 0.5)
        # The paper rectifies the class maps too; with batch norm they are plain logits.
        rectified = options.norm is None
        layers |= conv_block("classes", channels, options.num_classes, 1, options, relu=rectified)
        self.features = nn.Sequential(layers)
        self.pool = GlobalAveragePool()

    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        return self.pool(self.features(x))

    def adjust_init(self) -> None:
        """Start the class maps with a small variance, and above zero where a ReLU follows.

        By fan-out the ten maps would start far apart, and one that lies below zero everywhere gets no gradient
        through its ReLU and never learns. The derivation leaves the last layer's scale free: it scales all
        gradients alike.
        """
        layer, rectified = self.features.get_submodule("classes"), hasattr(self.features, "classes_relu")
        assert isinstance(layer, nn.Conv2d)
        nn.init.normal_(layer.weight, std=sigma(layer.in_channels, relu=rectified))
        nn.init.constant_(layer.bias, 1.0 if rectified else 0.0)  # type: ignore[arg-type]
