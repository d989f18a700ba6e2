"""Data as `fit` takes it: a `Data`, a path, or a Dataset or DataLoader of the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lowrank_cnn.data import Data, open_data
from lowrank_cnn.data.dataset import in_short
from lowrank_cnn.data.own_data import data_of, is_dataset
from lowrank_cnn.data.readers.splits import LARGE_SIDE
from lowrank_cnn.method.inputs import InputSize
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes
from lowrank_cnn.train.inputs import augmentation, input_size
from lowrank_cnn.train.outputs import class_scores
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.score import check_outputs, outputs_here


def open_for(network: nn.Module, data: Any, recipe: Recipe, *, classes: Sequence[str] = ()) -> Data:
    """The data to train a network on.

    A path is opened in the channels and, where images are large or differ in size, in the size that the network is
    for. A pair is (train, test). A data set of the user's own that names no classes has these `classes`, else
    numbers.
    """
    if isinstance(data, Data):
        return data
    if isinstance(data, str | Path):
        reading = partial(open_data, data)
        return as_network_wants(reading(), network, recipe, reading)
    train, test = data if isinstance(data, tuple | list) and len(data) == 2 else (data, None)
    if not is_dataset(train) or not (test is None or is_dataset(test)):
        raise LowRankError(
            "fit takes a Data, a path, a Dataset or DataLoader, or a pair of these (train, test), "
            f"not {in_short(data)}: TensorDataset(images, labels) makes a Dataset of tensors."
        )
    opened = data_of(train, test)
    if (opened.train.size is None) != (opened.test.size is None):
        raise LowRankError(
            "the data sets to train and to test on differ: one has several inputs, the other images."
        )
    size = input_size(opened.test, augmentation(recipe))
    names = opened.classes or classes or range(_outputs(network, size, recipe))
    return replace(opened, classes=tuple(map(str, names)))


def as_network_wants(
    images: Data,
    network: nn.Module,
    recipe: Recipe,
    reading: Callable[..., Data],
    *,
    input_size: tuple[int, ...] | None = None,
    sized: bool = False,
    tuned: bool = False,
) -> Data:
    """The images in the channels that a network takes and, where large or of many sizes, in the size it is for.

    `reading` opens them anew. `sized` says that the user has chosen a size. A network that is `tuned`, from
    trained weights of ours, gets all images in the size that it was trained on.
    """
    wanted: dict[str, Any] = {}
    channels, size = channels_of(network), input_size or notes(network).input_size
    if channels in (1, 3) and channels != images.test.channels:
        wanted["channels"] = channels
    free = not sized and recipe.crop is None and recipe.resize is None
    if free and size and tuned and any(split.size != tuple(size) for split in (images.train, images.test)):
        wanted["image_size"] = tuple(size[1:])
    elif free and size and any(_is_large(split.size) for split in (images.train, images.test)):
        wanted["default_size"] = tuple(size[1:])
    return reading(**wanted) if wanted else images


def check_network(network: nn.Module, data: Data, recipe: Recipe, *, output: str | None = None) -> None:
    """Refuse a network for another number of classes, before images are decoded, which may take long.

    `output` replaces that of the recipe: the one of several outputs that has the class scores.
    """
    size = input_size(data.test, augmentation(recipe))
    check_outputs(network, size, len(data.classes), output=output or recipe.output)


def channels_of(network: nn.Module) -> int | None:
    """Channels of the images that a network takes, by its first conv; None where it has none."""
    convs = (module for module in network.modules() if isinstance(module, nn.Conv2d | CompositeConv2d))
    return next((conv.in_channels for conv in convs), None)


def _is_large(size: tuple[int, int, int] | None) -> bool:
    return size is None or min(size[1:]) > LARGE_SIDE


def _outputs(network: nn.Module, size: InputSize, recipe: Recipe) -> int:
    """The number of class scores; of a network that does not run here, the channels of its last layer."""
    with contextlib.suppress(LowRankError):
        scores = class_scores(outputs_here(network, size), recipe.output)
        return scores.shape[1] if scores.ndim > 1 else 0
    found = 0
    for module in network.modules():
        found = getattr(module, "out_features", getattr(module, "out_channels", found))
    return found if isinstance(found, int) else 0
