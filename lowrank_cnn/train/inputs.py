"""The batches of a run: held-out images, preprocessing, and loaders, as the recipe asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import tensors_of
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.modules import InputSize, checked_size, is_example
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import (
    Augment,
    Data,
    Loader,
    Preprocess,
    Standardize,
    fit_preprocess,
    make_loader,
    open_data,
    preprocess_from_dict,
)
from lowrank_cnn.data.augment import Mixer, PixelAugment
from lowrank_cnn.data.own import DatasetSplit, data_of, in_short, is_dataset
from lowrank_cnn.data.preprocess import AsGiven
from lowrank_cnn.data.sources import LARGE_SIDE
from lowrank_cnn.data.streamed import frame
from lowrank_cnn.data.types import Decode, Split
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.train.objective import class_scores
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.score import check_outputs, outputs_here

_FITTED: WeakKeyDictionary[Split, dict[tuple[object, ...], Preprocess]] = WeakKeyDictionary()
"""Statistics of the splits in use, so that short runs on one set do not compute them again."""
EVALUATION_PIXELS = 2**20
"""Size of an evaluation batch: large enough to fill a device, small enough for any."""
HOLDOUT_SEED = 0
"""Every run holds out the same images, whatever its seed, so that runs can be compared on them."""


Vary = Callable[[Any, Any, int, int], tuple[Any, Any]]
"""From a batch, the epoch and its number to the batch that the step sees."""


@dataclass(frozen=True)
class Inputs:
    """The batches of a run: for training, for evaluation on the way, and for the test at the end."""

    data: Data
    train: Loader
    watch: Loader
    test: Loader
    preprocess: Preprocess
    watched: str
    size: InputSize
    vary: Vary

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """The batches to train on, varied and mixed as the recipe says."""
        for number, (images, targets) in enumerate(self.train.epoch(epoch, start), start=start):
            yield self.vary(images, targets, epoch, number)


def make_inputs(
    data: Data,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    decode: Decode = "cpu",
    dtype: torch.dtype = torch.float32,
    saved: dict[str, Tensor] | None = None,
) -> Inputs:
    """Hold out the recipe's share, fit the preprocessing to the rest (or take the saved one), make loaders.

    A GPU decodes images to train on alone: accuracy is always that on the pixels of the CPU's decoder.
    """
    data.check_labels()
    kept = data.holdout(held_out(recipe, len(data.train)), HOLDOUT_SEED) if recipe.holdout else data
    _check_batch(recipe, len(kept.train), len(data.train))
    size = input_size(data.test, augmentation(recipe))
    if is_example(size):
        _check_several(recipe)
    else:
        _check_window(recipe, size, cropped=not isinstance(data.train, DatasetSplit))
    preprocess = preprocess_from_dict(saved) if saved else preprocessing(kept.train, recipe, device)
    augment = augmentation(recipe)

    def batches(split: Split, *, train: bool) -> Loader:
        return make_loader(
            split,
            batch_size=recipe.batch_size if train else evaluation_batch(split, augment, world),
            preprocess=preprocess,
            augment=augment,
            seed=seed,
            device=device,
            rank=rank,
            world=world,
            train=train,
            workers=workers,
            decode=decode if train else "cpu",
            dtype=dtype,
        )

    test = batches(data.test, train=False)
    watch = batches(kept.test, train=False) if recipe.holdout else test
    train = batches(kept.train, train=True)
    watched = "holdout" if recipe.holdout else "test"
    vary = _variation(recipe, preprocess, len(data.classes), seed=seed, rank=rank)
    return Inputs(data, train, watch, test, preprocess, watched, size, vary)


def _variation(recipe: Recipe, preprocess: Preprocess, classes: int, *, seed: int, rank: int) -> Vary:
    """Augment a batch on the device: zooms and colours, then mixing."""
    pixels = PixelAugment(recipe.zoom, recipe.jitter, recipe.auto_augment)
    pixels.check(preprocess)
    mixer = Mixer(recipe.mixup, recipe.cutmix, classes, seed=seed, rank=rank)

    def vary(images: Any, targets: Any, epoch: int, batch: int) -> tuple[Any, Any]:
        if pixels.active:
            assert isinstance(preprocess, Standardize)
            images = pixels(images, preprocess, seed, epoch, batch, rank)
        return mixer(images, targets, epoch, batch) if recipe.mixup or recipe.cutmix else (images, targets)

    return vary


def held_out(recipe: Recipe, images: int) -> int:
    """The number of images to hold out: below 1 it is a share, else a count. Some images are always left."""
    number = round(recipe.holdout * images) if recipe.holdout < 1 else round(recipe.holdout)
    if number < 1:
        raise LowRankError(
            f"holdout={recipe.holdout:g} of {counted(images, 'training image')} is not one: set a larger share "
            "or a count (--set holdout=10), or hold nothing out (--set holdout=0)."
        )
    if number >= images:
        raise LowRankError(
            f"holdout={recipe.holdout:g} leaves none of the {counted(images, 'training image')} to train on: "
            "hold out fewer (--set holdout=0.1)."
        )
    return number


def _check_batch(recipe: Recipe, images: int, all_images: int) -> None:
    """Refuse a batch larger than the training set: training drops what does not fill one."""
    if images >= recipe.batch_size:
        return
    held = all_images - images
    left, fewer = (f", after {held} are held out", ", hold out fewer") if held else ("", "")
    raise LowRankError(
        f"the set has {counted(images, 'image')} to train on{left}, fewer than one batch of {recipe.batch_size}: "
        f"set batch_size to {images} or less (--batch-size {images}){fewer}, or take more images."
    )


def _check_several(recipe: Recipe) -> None:
    """Reject augmentation for multi-input networks."""
    unused = {"mixup": 0, "cutmix": 0, "whiten_first": False, "test_mirror": False, "test_shift": 0}
    for name, value in {**unused, "accumulate": 1, "quantize": "none"}.items():
        if getattr(recipe, name) != value:
            raise LowRankError(
                f"{name} is for networks of one image, and this one has several inputs: leave it out."
            )


def _check_window(recipe: Recipe, size: InputSize, *, cropped: bool) -> None:
    """Refuse settings that leave nothing to see of images of this size; the user's own data is not cropped."""
    _, height, width = checked_size(size)
    limits = {"test_shift": min(height, width)}
    limits |= {"cutout": 2 * max(height, width), "pad": max(height, width) + 1} if cropped else {}
    for field, limit in limits.items():
        if (value := getattr(recipe, field)) >= limit:
            raise LowRankError(
                f"{field}={value} leaves nothing to see of images of {height}x{width}: set it below {limit} "
                f"(--set {field}=0 turns it off)."
            )


def augmentation(recipe: Recipe) -> Augment:
    """The part of a recipe that concerns images."""
    return Augment(
        crop=recipe.crop,
        pad=recipe.pad,
        mirror=recipe.mirror,
        cutout=recipe.cutout,
        resize=recipe.resize,
        alternate=recipe.alternate_mirror,
    )


def preprocessing(split: Split, recipe: Recipe, device: torch.device | str = "cpu") -> Preprocess:
    """The preprocessing of a recipe, fitted to a training split; none for the user's own data."""
    if isinstance(split, DatasetSplit):
        return AsGiven()
    known = _FITTED.setdefault(split, {})
    key = (recipe.preprocess, recipe.zca_epsilon, str(device))
    if key not in known:
        known[key] = fit_preprocess(recipe.preprocess, split, device=device, epsilon=recipe.zca_epsilon)
    return known[key]


def evaluation_batch(split: Split, augment: Augment, world: int = 1) -> int:
    """A batch that fills the device, a multiple of the number of processes.

    All batches are nearly equal in size, since kernels are chosen for each batch size.
    """
    size = input_size(split, augment)
    sizes = [tensor.shape for tensor in tensors_of(size)] if is_example(size) else [checked_size(size)]
    pixels = max(prod(one[1:]) for one in sizes)
    most = max(1, EVALUATION_PIXELS // pixels // world)
    batches = ceil_div(len(split), most * world)
    return max(1, ceil_div(len(split), max(1, batches) * world)) * world


def input_size(split: Split, augment: Augment) -> InputSize:
    """The size of the network's input in evaluation (channels, height, width); of several inputs an example."""
    example = split.example if isinstance(split, DatasetSplit) else None
    return image_size(split, augment) if example is None else example


def image_size(split: Split, augment: Augment) -> tuple[int, int, int]:
    """The same for networks of one image; data with several inputs is refused."""
    if not isinstance(split, DatasetSplit):
        return split.channels, *frame(split.size and split.size[1:], augment, train=False, fill=()).window
    if split.size is None:
        raise LowRankError("this is for networks of one image, and an item of the data has several inputs.")
    return split.size


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
