"""Count the network behind each published row, in the paper's convention."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from lowrank_cnn.method.counting import Count, count
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.paper.published import Published
from lowrank_cnn.paper.rivals import build_rival
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
