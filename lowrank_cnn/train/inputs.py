"""The batches of a run (held-out images, preprocessing, loaders), and whether a network can take them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from lowrank_cnn.core.compare import tensors_of, unchanged
from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LowRankError, first_line, option, setting
from lowrank_cnn.core.modules import InputSize, blank, call, checked_size, in_words, is_example
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
from lowrank_cnn.data.own import DatasetSplit, as_dataset, data_of, in_short, is_dataset
from lowrank_cnn.data.preprocess import AsGiven
from lowrank_cnn.data.sources import LARGE_SIDE
from lowrank_cnn.data.streamed import frame
from lowrank_cnn.data.types import Split
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.layers import CompositeConv2d, weights_of
from lowrank_cnn.train.distributed import resolve_precision
from lowrank_cnn.train.objective import class_scores
from lowrank_cnn.train.recipe import Recipe, RunSettings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

EVALUATION_PIXELS = 2**20
"""Size of an evaluation batch: large enough to fill a device, small enough for any."""
HOLDOUT_SEED = 0
"""Every run holds out the same images, whatever its seed, so that runs can be compared on them."""


@dataclass(frozen=True)
class Inputs:
    """The batches of a run: for training, for evaluation on the way, and for the test at the end."""

    data: Data
    train: Loader
    watch: Loader
    test: Loader
    preprocess: Preprocess
    size: InputSize
    batches: Callable[[int, int], Iterator[tuple[Any, Any]]]
    """The batches of an epoch from this one on, as the step sees them: augmented and mixed."""


def make_inputs(
    fabric: Fabric, data: Data, recipe: Recipe, how: RunSettings, *, seed: int, saved: dict[str, Tensor] | None
) -> Inputs:
    """Hold out the recipe's share, fit the preprocessing to the rest (or take the saved one), make loaders."""
    device, rank, world = fabric.device, fabric.global_rank, fabric.world_size
    # The first conv would round its images to bf16 anyway; on a GPU it then reads half the bytes.
    half = _HALVES.get(resolve_precision(recipe.precision, device.type)) if device.type == "cuda" else None
    data.check_labels()
    kept = data.holdout(held_out(recipe, len(data.train)), HOLDOUT_SEED) if recipe.holdout else data
    augment = augmentation(recipe)
    size = input_size(data.test, augment)
    _check_batch(recipe, len(kept.train), len(data.train))
    _check_settings(recipe, size, data.train)
    preprocess = preprocess_from_dict(saved) if saved else preprocessing(kept.train, recipe, device)
    pixels = PixelAugment(recipe.zoom, recipe.jitter, recipe.auto_augment)
    pixels.check(preprocess)
    mixer = Mixer(recipe.mixup, recipe.cutmix, len(data.classes), seed=seed, rank=rank)

    def load(split: Split, *, train: bool) -> Loader:
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
            workers=how.workers,
            dtype=half or torch.float32,
        )

    test = load(data.test, train=False)
    watch = load(kept.test, train=False) if recipe.holdout else test
    train = load(kept.train, train=True)

    def batches(epoch: int, start: int) -> Iterator[tuple[Any, Any]]:
        for number, (images, targets) in enumerate(train.epoch(epoch, start), start=start):
            if pixels.active:
                assert isinstance(preprocess, Standardize)
                images = pixels(images, preprocess, seed, epoch, number, rank)
            if recipe.mixup or recipe.cutmix:
                images, targets = mixer(images, targets, epoch, number)
            yield images, targets

    return Inputs(data, train, watch, test, preprocess, size, batches)


def held_out(recipe: Recipe, images: int) -> int:
    """The number of images to hold out: below 1 it is a share, else a count. Some images are always left."""
    number = round(recipe.holdout * images) if recipe.holdout < 1 else round(recipe.holdout)
    if number < 1:
        raise LowRankError(
            f"holdout={recipe.holdout:g} of {counted(images, 'training image')} is not one: set a larger share "
            f"or a count ({setting('holdout', 10)}), or hold nothing out ({setting('holdout', 0)})."
        )
    if number >= images:
        raise LowRankError(
            f"holdout={recipe.holdout:g} leaves none of the {counted(images, 'training image')} to train on: "
            f"hold out fewer ({setting('holdout', 0.1)})."
        )
    return number


def trained_on(data: Data, recipe: Recipe) -> int:
    """The number of images that a run trains on: all but those that the recipe holds out."""
    return len(data.train) - (held_out(recipe, len(data.train)) if recipe.holdout else 0)


def _check_batch(recipe: Recipe, images: int, all_images: int) -> None:
    """Refuse a batch larger than the training set: training drops what does not fill one."""
    if images >= recipe.batch_size:
        return
    held = all_images - images
    left, fewer = (f", after {held} are held out", ", hold out fewer") if held else ("", "")
    raise LowRankError(
        f"the set has {counted(images, 'image')} to train on{left}, fewer than one batch of {recipe.batch_size}: "
        f"set a batch size of {images} or less ({option('batch_size', images)}){fewer}, or take more images."
    )


def _check_settings(recipe: Recipe, size: InputSize, split: Split) -> None:
    """Refuse augmentation for several inputs or volumes, unless it suits these, and what leaves nothing to see."""
    inputs, refused = "", {}
    if is_example(size):
        inputs, refused = "has several inputs", {"mixup": 0, "cutmix": 0, "test_mirror": False, "accumulate": 1}
    elif len(checked_size(size)) != 3:
        inputs = "takes volumes"
        refused = {"zoom": 1, "jitter": 0, "auto_augment": "none", "preprocess": "standardize"}
    if inputs:
        refused = {"whiten_first": False, "test_shift": 0, "quantize": "none"} | refused
    for name, value in refused.items():
        if getattr(recipe, name) != value:
            raise LowRankError(f"{name} is for networks of one image, and this one {inputs}: leave it out.")
    if is_example(size):
        return
    height, width = checked_size(size)[-2:]
    limits = {"test_shift": min(height, width)}
    if not isinstance(split, DatasetSplit):  # the user's own data is not cropped
        limits |= {"cutout": 2 * max(height, width), "pad": max(height, width) + 1}
    for field, limit in limits.items():
        if (value := getattr(recipe, field)) >= limit:
            raise LowRankError(
                f"{field}={value} leaves nothing to see of images of {height}x{width}: set it below {limit} "
                f"({setting(field, 0)} turns it off)."
            )


def augmentation(recipe: Recipe) -> Augment:
    return Augment(
        crop=recipe.crop,
        pad=recipe.pad,
        mirror=recipe.mirror,
        cutout=recipe.cutout,
        resize=recipe.resize,
        alternate=recipe.alternate_mirror,
    )


def preprocessing(split: Split, recipe: Recipe, device: torch.device | str = "cpu") -> Preprocess:
    """The preprocessing of a recipe, fitted to a training split; none for the user's own data but bytes."""
    if isinstance(split, DatasetSplit) and not split.in_bytes:
        return AsGiven()
    return fit_preprocess(recipe.preprocess, split, device=device, epsilon=recipe.zca_epsilon)


def evaluation_batch(split: Split, augment: Augment, world: int = 1) -> int:
    """A batch that fills the device; all are nearly equal in size, since kernels are chosen for each size."""
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


def image_size(split: Split, augment: Augment) -> tuple[int, ...]:
    """The same for networks of one image or volume; data with several inputs is refused."""
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
    data = as_dataset(data)
    train, test = map(as_dataset, data) if isinstance(data, tuple | list) and len(data) == 2 else (data, None)
    if not is_dataset(train) or not (test is None or is_dataset(test)):
        raise LowRankError(
            "fit takes a Data, a path, a Dataset or DataLoader, or a pair of these (train, test), "
            f"not {in_short(data)}: TensorDataset(images, labels) makes a Dataset of tensors."
        )
    opened = data_of(train, test)
    if (opened.train.size is None) != (opened.test.size is None):
        raise LowRankError("the data to train and to test on differ: one has several inputs, the other images.")
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
    sizes = images.train.size, images.test.size
    if free and size and tuned and any(s != tuple(size) for s in sizes):
        wanted["image_size"] = tuple(size[1:])
    elif free and size and any(s is None or min(s[1:]) > LARGE_SIDE for s in sizes):
        wanted["default_size"] = tuple(size[1:])
    return reading(**wanted) if wanted else images


def check_classes(data: Data) -> None:
    """Refuse a data set of one class: a network learns nothing from it, and every answer would be right."""
    if len(data.classes) < 2:
        names = ", ".join(map(str, data.classes)) or "none"
        raise LowRankError(
            f"{data.name} has fewer than two classes ({names}): give the folder that has a folder of images for "
            "each class, or a loss of your own for another task (fit(..., loss=...))."
        )


def check_network(network: nn.Module, data: Data, recipe: Recipe, *, output: str | None = None) -> None:
    """Refuse a network for another number of classes, before images are decoded, which may take long.

    `output` replaces that of the recipe: the one of several outputs that has the class scores. A network that
    fails here may still work on the device that trains: `check_fits` decides there.
    """
    outputs = outputs_here(network, input_size(data.test, augmentation(recipe)))
    if outputs is not None:
        _check_scores(outputs, len(data.classes), output or recipe.output)


@torch.no_grad()
def outputs_here(network: nn.Module, size: InputSize) -> Any:
    """The outputs of a network for one image, on the device that it is on; None if it fails there."""
    weights = [*network.parameters(), *network.buffers()]
    if any(map(is_lazy, weights)):  # its first forward makes them, and they depend on the seed
        return None
    device = weights[0].device if weights else torch.device("cpu")
    try:
        with unchanged(network, evaluating=True):
            return call(network, blank(size, device))
    except Exception:
        return None


@torch.no_grad()
def check_fits(
    network: nn.Module,
    size: InputSize,
    classes: int | None,
    device: torch.device,
    output: str | None = None,
) -> None:
    """Refuse a network that cannot take images of this size, or has other than one output per class.

    With `classes=None` any output will do; `output` is the one of several that has the class scores.
    """
    try:
        with unchanged(network, evaluating=True):
            outputs = call(network, blank(size, device))
    except Exception as error:  # a forward may fail in any way of its own
        if is_out_of_memory(error):
            raise
        one = checked_size(size)
        wrong = not is_example(size) and one[0] > 3 >= one[-1]
        first = " Channels come first, as in 3x32x32." if wrong else ""
        raise LowRankError(f"the network cannot take {in_words(size)}: {first_line(error)}.{first}") from error
    if classes is not None:
        _check_scores(outputs, classes, output)


def _check_scores(outputs: Any, classes: int, output: str | None) -> None:
    logits = class_scores(outputs, output)
    if logits.ndim != 2:
        given = "x".join(map(str, logits.shape[1:])) or "one number"
        raise LowRankError(
            f"the network gives {given} for an image, and not a score for each class: another task needs a loss "
            "of your own (fit(..., loss=...))."
        )
    if logits.shape != (1, classes):
        raise LowRankError(
            f"the network has {counted(logits.shape[1], 'output')} for an image, and the data "
            f"{counted(classes, 'class')}: build it with {option('num_classes', classes)}."
        )


def channels_of(network: nn.Module) -> int | None:
    """Channels of the images that a network takes, by its first conv; None where it has none."""
    convs = (module for module in network.modules() if isinstance(module, nn.Conv2d | CompositeConv2d))
    return next((conv.in_channels for conv in convs), None)


def _outputs(network: nn.Module, size: InputSize, recipe: Recipe) -> int:
    """The number of class scores; of a network that does not run here, the channels of its last layer."""
    with contextlib.suppress(LowRankError):
        scores = class_scores(outputs_here(network, size), recipe.output)
        return scores.shape[1] if scores.ndim > 1 else 0
    found = 0
    for module in network.modules():
        found = getattr(module, "out_features", getattr(module, "out_channels", found))
    return found if isinstance(found, int) else 0


# A whitening first layer, after Page (2019), "How to train your ResNet".

WHITENED_IMAGES = 4096
WHITENING_EPSILON = 5e-4


@torch.no_grad()
def whiten_first_layer(
    network: nn.Module, train: Loader, *, add_up: Callable[[Tensor], Tensor] = Tensor.clone
) -> None:
    """Give the network's first conv whitening filters, from the first batches to train on, and freeze them.

    A composite has directions of its own for each shape of filter. `add_up` sums over processes.
    """
    name, layer = next(iter(weight_layers(network)), ("", None))
    if layer is None or isinstance(layer, nn.Linear):
        raise LowRankError("whiten_first needs a network that begins with a conv: set whiten_first=false.")
    found: list[Tensor] = []
    for images, _ in islice(train.epoch(0), len(train)):
        found.append(images)
        if sum(map(len, found)) >= WHITENED_IMAGES:
            break
    images = torch.cat(found)[:WHITENED_IMAGES].float()
    for weight in weights_of(layer):
        if weight.shape[1] != images.shape[1]:
            raise LowRankError(f"whiten_first needs the first conv, {name}, to see all channels of an image.")
        weight.copy_(whitening_filters(weight, patch_covariance(images, weight.shape[2:], add_up)))
        weight.requires_grad_(False)


def patch_covariance(images: Tensor, shape: torch.Size, add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """The second moments [n, n] of patches of this shape, in double precision: images have a mean of zero."""
    work = torch.float32 if images.device.type == "mps" else torch.float64
    size = images.shape[1] * shape.numel()
    total = torch.zeros(size * size + 1, dtype=work, device=images.device)
    for part in images.split(512):
        patches = functional.unfold(part, tuple(shape)).transpose(1, 2).reshape(-1, size).to(work)
        total[:-1] += (patches.T @ patches).flatten()
        total[-1] += len(patches)
    total = add_up(total)
    return (total[:-1] / total[-1]).view(size, size)


def whitening_filters(weight: Tensor, covariance: Tensor) -> Tensor:
    """Filters in place of a weight [d, c, h, w]: the widest directions, their negatives, then mixtures.

    With C the covariance of patches of the shape of a filter, and C = sum_i l_i v_i v_i^T, a filter is
    v_i / sqrt(l_i + epsilon), and another its negative, since a rectifier cuts half. If there are more filters
    than directions and negatives, the rest keep their random directions, in the whitened space.
    """
    values, vectors = torch.linalg.eigh(covariance)
    directions = (vectors / (values.clamp(min=0) + WHITENING_EPSILON).sqrt()).T.flip(0)
    pairs = min(len(directions), len(weight) // 2)
    rest = functional.normalize(weight[2 * pairs :].flatten(1).to(directions), dim=1) @ directions
    return torch.cat([directions[:pairs], -directions[:pairs], rest]).view(weight.shape).to(weight)
