"""Count the network behind each published row, in the paper's convention.

The rivals of the two "big picture" plots are tables from which their cost is counted: AlexNet (Krizhevsky et al.
2012), VGG A to E (Simonyan and Zisserman 2015) and the PReLU networks A to C (He et al. 2015, "Delving deep into
rectifiers"). Only convs, pools and fully connected layers are built: nothing else costs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.counting import Count, count
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.paper.published import Published
from lowrank_cnn.system.errors import LowRankError, nearest
from lowrank_cnn.system.provenance import note

PLACES_CLASSES = 205
PADDED = ("googlenet-lr", "googlenet-lr-conv1")
"""Networks whose published MACs include a padding that the dense baseline was counted without."""


@cache
def count_row(row: Published) -> Count:
    """Count the network that a row names, at the row's input, stride and number of classes, for one crop."""
    with torch.device("meta"):
        if row.crops > 1:  # the same network, run on several crops
            return _googlenet_with_everything()
        if row.network not in list_models() or row.table.startswith("big-picture"):
            model, size = build_rival(row.network)
            return count(model, size, convention="paper")
        if row.network in PADDED:
            return count_padded_googlenet(row.network)
        places = row.table == "vgg-places"
        model = create_model(row.network, stride=row.stride, num_classes=PLACES_CLASSES if places else None)
    return count(model, (3, row.input or 224, row.input or 224), convention="paper")


def count_padded_googlenet(name: str) -> Count:
    """Count a GoogLeNet as the paper counted its low-rank ones.

    Padding by 1 at the four stride-2 max-pools leaves maps of 57, 29, 15 and 8 pixels. The last pool stays 7x7
    with stride 1, which leaves 2x2 maps, so the classifier reads 4,096 values. The auxiliary pools (5x5, stride 3)
    leave 5x5 maps, so their first fully connected layer reads 3,200.
    """
    with torch.device("meta"):
        model: Any = create_model(name)
        for module in model.modules():
            if isinstance(module, nn.MaxPool2d) and module.stride == 2:
                module.padding = 1
        model.classifier.pool = nn.Sequential(nn.AvgPool2d(7, 1), nn.Flatten())
        model.classifier.fc = nn.Linear(4 * model.classifier.fc.in_features, model.classifier.fc.out_features)
        for head in (model.aux1, model.aux2):
            head.pool = nn.AvgPool2d(5, 3, ceil_mode=True)
            head.fc1 = nn.Linear(25 * head.fc1.in_features // 16, head.fc1.out_features)
        return count(model, model.input_size, convention="paper")


def _googlenet_with_everything() -> Count:
    """GoogLeNet as the big-picture table counts it: all parameters, those of the heads and the classifier too."""
    model = create_model("googlenet")
    note(model, unpublished=())
    return count(model, model.input_size, convention="paper")


RivalRow = tuple[int, ...] | str
"""(kernel, filters), with stride, or with stride, padding and channel groups; "M2" or "M3": a max-pool."""

_VGG_A = ([(3, 64)], [(3, 128)], [(3, 256)] * 2, [(3, 512)] * 2, [(3, 512)] * 2)
_VGG_B = ([(3, 64)] * 2, [(3, 128)] * 2, [(3, 256)] * 2, [(3, 512)] * 2, [(3, 512)] * 2)
_POINTWISE = [(1, 256)], [(1, 512)], [(1, 512)]


def _vgg(stages: tuple[list, ...]) -> list[RivalRow]:
    return [row for stage in stages for row in (*stage, "M2")]


def _deepened(extra: tuple[list, list, list]) -> list[RivalRow]:
    """VGG B with more layers at the end of its last three stages."""
    return _vgg((*_VGG_B[:2], *(stage + more for stage, more in zip(_VGG_B[2:], extra, strict=True))))


def _prelu(widths: tuple[int, int, int], depth: int) -> list[RivalRow]:
    rows: list[RivalRow] = [(7, 96, 2)]
    for width in widths:
        rows += ["M2", *[(3, width)] * depth]
    return rows


_ALEXNET: list[RivalRow] = [
    (11, 96, 4, 0, 1), "M3", (5, 256, 1, 2, 2), "M3", (3, 384), (3, 384, 1, 1, 2), (3, 256, 1, 1, 2), "M3",
]  # fmt: skip

RIVALS: dict[str, tuple[int, list[RivalRow], tuple[int, ...]]] = {  # image, rows, bins of the pyramid before fc6
    "alexnet": (227, _ALEXNET, ()),
    "vgg11": (224, _vgg(_VGG_A), ()),
    "vgg13": (224, _vgg(_VGG_B), ()),
    "vgg16-c": (224, _deepened(_POINTWISE), ()),
    "vgg16-d": (224, _deepened(([(3, 256)], [(3, 512)], [(3, 512)])), ()),
    "vgg19": (224, _deepened(([(3, 256)] * 2, [(3, 512)] * 2, [(3, 512)] * 2)), ()),
    "msra-a": (224, _prelu((256, 512, 512), 5), (7, 3, 2, 1)),
    "msra-b": (224, _prelu((256, 512, 512), 6), (7, 3, 2, 1)),
    "msra-c": (224, _prelu((384, 768, 896), 6), (7, 3, 2, 1)),
}


class Pyramid(nn.Module):
    """Spatial pyramid pooling (He et al. 2014): max-pools onto several grids, laid end to end."""

    def __init__(self, bins: tuple[int, ...]) -> None:
        super().__init__()
        self.pools = nn.ModuleList(nn.AdaptiveMaxPool2d(n) for n in bins)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([pool(x).flatten(1) for pool in self.pools], dim=1)


def build_rival(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    """A rival network, for counting, and its input size."""
    if name not in RIVALS:
        raise LowRankError(f"there is no rival network {name!r}; {nearest(name, RIVALS)}")
    image, rows, bins = RIVALS[name]
    channels, layers = 3, []
    for row in rows:
        if isinstance(row, str):
            layers.append(nn.MaxPool2d(int(row[1]), 2, ceil_mode=True))
            continue
        layers.append(_conv(channels, *row))
        channels = row[1]
    top = Pyramid(bins) if bins else nn.Flatten()
    features = channels * sum(n * n for n in bins) if bins else channels * (6 * 6 if name == "alexnet" else 7 * 7)
    head = [nn.Linear(features, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, top, *head), (3, image, image)


def _conv(
    channels: int, kernel: int, filters: int, stride: int = 1, padding: int | None = None, groups: int = 1
) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, kernel, stride, kernel // 2 if padding is None else padding, groups=groups)
