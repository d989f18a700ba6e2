"""`evaluate`: the accuracy of a trained network on images with labels, and how far its training came."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.data import Data, Loader, Preprocess, make_loader, open_data
from lowrank_cnn.data.image_progress import ImageProgress
from lowrank_cnn.data.own_data import for_classes, is_dataset
from lowrank_cnn.data.types import places_by_name
from lowrank_cnn.method.inputs import call
from lowrank_cnn.method.selection import check_values
from lowrank_cnn.system.compare import unchanged
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.text import counted, first_few
from lowrank_cnn.train.checkpoint import CheckpointStore, DamagedCheckpointError, read_state
from lowrank_cnn.train.fabric import resolve_device
from lowrank_cnn.train.failure import lost_process_as_user_error
from lowrank_cnn.train.inputs import evaluation_batch, input_size, preprocessing
from lowrank_cnn.train.opening import check_network, open_for
from lowrank_cnn.train.predicting import predict
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.score import Evaluation, check_fits, score
from lowrank_cnn.train.short_runs import averaged_views
from lowrank_cnn.train.state import Position
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint, load_pretrained

__all__ = ["Evaluation", "Trained", "evaluate", "load_checkpoint", "load_pretrained", "predict"]


@lost_process_as_user_error()
def evaluate(
    model: Trained | nn.Module | str | Path,
    data: Data | Dataset | DataLoader | str | Path,
    *,
    preprocess: Preprocess | None = None,
    recipe: Recipe | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    workers: int = 0,
    output: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Top-1, top-5 and loss on the test images, one centre crop per image, in full precision.

    Where its recipe averages views of an image (`test_mirror`, `test_shift`), so does this.

    `model` is a network, what `load_checkpoint` gives, or the path of what it reads. A network that was loaded or
    trained carries how its images are prepared. Any other takes the preprocessing given, or one fitted to the
    images as the recipe says. Classes are matched by name: the images may be of some of the network's classes.
    `data` is opened, if it is a path; a Dataset or DataLoader of your own is taken as it is. If it is the set that
    the network was trained on, without test images of its own, only the images that training held out are used.
    `output` is the name or the number of the output that has the class scores, of a network with several; a
    trained network knows the one that it was trained by.
    The result's `details` have accuracies per class, the confusion matrix, the worst images and the calibration.

    >>> evaluate("runs/photos", "photos").top1  # doctest: +SKIP
    0.925
    """
    if isinstance(model, str | Path):
        model = load_checkpoint(model)
    source, data = data, _opened(data, model, recipe or Recipe())
    trained = model if isinstance(model, Trained) else _trained(model, data, preprocess, recipe, output)
    trained = trained.with_output(output)
    if isinstance(source, str | Path):
        held_out = held_out_images(trained, source)
        if held_out is None and (told := changed_set(trained, data)):
            warnings.warn(told, stacklevel=2)
        data = held_out or data
    places = match_classes(trained, data)
    _check_size(trained, data)
    data.check_labels(only_test=True)  # the training images need not be decoded
    place = torch.device(resolve_device(device))
    check_values(trained.network)
    network = trained.network.to(place)
    size = input_size(data.test, trained.augment)
    check_fits(network, size, len(trained.classes), place, output=trained.recipe.output)
    loader = make_loader(
        data.test,
        batch_size=batch_size or evaluation_batch(data.test, trained.augment),
        preprocess=trained.preprocess,
        augment=trained.augment,
        seed=0,
        device=place,
        train=False,
        workers=workers,
    )
    with ImageProgress("Evaluating", len(data.test), enabled=progress) as shown, unchanged(network):
        batches = _relabelled(loader, places.to(place), shown)
        found = score(
            network,
            batches,
            device=place,
            forward=averaged_views(partial(call, network), trained.recipe),
            classes=trained.classes,
            split=data.test,
        )
    if math.isnan(found.loss):  # the largest of scores that are NaN is a class like any other
        raise LowRankError(f"the network gives NaN on images of {data.name}, so it has no accuracy.")
    return found


def held_out_images(trained: Trained, source: str | Path, **options: Any) -> Data | None:
    """The set with the images to test on that training held out of it; None if it is not the set of that run.

    Older runs do not say whether they had a limit: then it was the number of images that they trained on.
    """
    if not trained.held_out:
        return None
    split = trained.held_out["val_split"]
    known = {"image_size": trained.size_option, "channels": trained.channels}
    for limit in [split["limit"]] if "limit" in split else [None, trained.held_out["train"]]:
        known |= {"val_split": split["share"], "val_seed": split["seed"], "limit": limit}
        try:
            data = open_data(source, **known, **options)
        except LowRankError:  # such as a set that has test images
            return None
        if data.digest == trained.held_out["digest"]:
            return data
    return None


def changed_set(trained: Trained, data: Data) -> str | None:
    """A warning where a set has the name of the one that the network was trained on, but not its digest.

    Which of its images training held out is then not known: most of them may have been trained on.
    """
    if not trained.held_out or trained.held_out.get("name") != data.name:
        return None
    return (
        f"The network was trained on a set called {data.name}, which held other images then: it may have been "
        f"trained on most of these {counted(len(data.test), 'image')}, and then their accuracy says little."
    )


def _relabelled(loader: Loader, places: Tensor, shown: ImageProgress) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with labels that are places among the network's classes."""
    for images, labels in loader.epoch(0):
        yield images, places[labels]
        shown.advance(len(labels))


def how_far(path: str | Path, *, best: bool = False) -> str | None:
    """How far training was when the weights that `load_checkpoint` reads were saved; None if it was complete.

    None as well for an exported file, which does not say.
    """
    path = Path(path)
    best = best or path.name.startswith("best-")
    whole = path if path.is_dir() else path.parent  # whether a run came to its end, its newest state knows
    stem = CheckpointStore(whole).newest() if path.is_dir() or best else path.with_suffix("")
    if stem is None or not stem.with_suffix(".json").is_file():
        return None
    try:
        state = read_state(stem)
    except DamagedCheckpointError:  # the weights that were asked for are others, and were read
        return None
    position, epochs = Position(**state["position"]), int(state["recipe"]["epochs"])
    if position.done(epochs):
        return None
    chosen = Position(epoch=position.best_epoch) if best else position
    return chosen.told(epochs)


def _opened(data: Any, model: Trained | nn.Module, recipe: Recipe) -> Data:
    """The data to test on."""
    if isinstance(data, Data):
        return data
    if not is_dataset(data):
        return open_data(data, only_test=True)
    known = model if isinstance(model, Trained) else carried_by(model)
    if known:
        return for_classes(open_for(known.network, data, known.recipe, classes=known.classes))
    assert isinstance(model, nn.Module)
    return for_classes(open_for(model, data, recipe))


def _trained(
    model: nn.Module,
    data: Data,
    preprocess: Preprocess | None,
    recipe: Recipe | None,
    output: str | None,
) -> Trained:
    if preprocess is None and recipe is None and (carried := carried_by(model)):
        return carried
    recipe = recipe or Recipe()
    check_network(model, data, recipe, output=output)
    fitted_to = data.train if len(data.train) else data.test
    preprocess = preprocess or preprocessing(fitted_to, recipe)
    return Trained(model, preprocess, recipe, data.classes, data.test.size or ())


def match_classes(trained: Trained, data: Data) -> Tensor:
    """The place of each of the data's classes among the network's, by name.

    A test set may lack classes; one that the network does not know could only be counted wrong.
    """
    places = places_by_name(data.classes, trained.classes)
    unknown = [name for name, place in zip(data.classes, places, strict=True) if place is None]
    if unknown:
        raise LowRankError(
            f"the network knows {counted(len(trained.classes), 'class')} ({first_few(trained.classes)}), "
            f"{data.name} has {counted(len(unknown), 'other')} ({first_few(unknown)})."
        )
    return torch.tensor(places)


def _check_size(trained: Trained, data: Data) -> None:
    """Refuse images of another size than the network was trained on: objects would have another scale."""
    if trained.image and data.test.size != trained.image:
        theirs = "x".join(map(str, data.test.size)) if data.test.size else "varying size"
        size = trained.size_option
        raise LowRankError(
            f"the network was trained on images of {'x'.join(map(str, trained.image))}, {data.name} has images of "
            f"{theirs}: open the data with image_size={size!r}, channels={trained.channels} (--image-size {size})."
        )
