"""`evaluate`: the accuracy of a trained network on images with labels. `predict`: the classes of other images."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError, require
from lowrank_cnn.core.modules import call
from lowrank_cnn.core.text import counted, first_few
from lowrank_cnn.data import Augment, Data, Loader, Preprocess, Problems, make_loader, open_data
from lowrank_cnn.data.augment import centre_crop, resize_shorter
from lowrank_cnn.data.decode import BadImageError, decode_image, stack
from lowrank_cnn.data.folders import image_files, read_image
from lowrank_cnn.data.own import for_classes, is_dataset
from lowrank_cnn.data.store import ImageProgress
from lowrank_cnn.data.streamed import frame
from lowrank_cnn.data.types import places_by_name
from lowrank_cnn.method.select import check_values
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.failure import lost_process_as_user_error
from lowrank_cnn.train.inputs import check_network, evaluation_batch, input_size, open_for, preprocessing
from lowrank_cnn.train.objective import ranking
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.run_folder import CheckpointStore, DamagedCheckpointError, Position, read_state
from lowrank_cnn.train.score import Evaluation, check_fits, score
from lowrank_cnn.train.short_runs import averaged_views
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint, load_pretrained

__all__ = ["Evaluation", "Trained", "evaluate", "load_checkpoint", "load_pretrained", "predict"]

Ranking = list[tuple[str, float]]
"""Classes with their probabilities, the likeliest first."""


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


@overload
def predict(
    model: Any,
    images: Any,
    *,
    top: int = ...,
    device: str = ...,
    bad: Literal["refuse"] = ...,
    output: str | None = ...,
) -> list[Ranking]: ...
@overload
def predict(
    model: Any,
    images: Any,
    *,
    top: int = ...,
    device: str = ...,
    bad: Literal["skip"],
    output: str | None = ...,
) -> list[Ranking | None]: ...


@torch.no_grad()
def predict(
    model: Trained | nn.Module | str | Path,
    images: Any,
    *,
    top: int = 5,
    device: str = "auto",
    bad: Literal["refuse", "skip"] = "refuse",
    output: str | None = None,
) -> Any:
    """For each image the likeliest classes with their probabilities, the likeliest first.

    `model` is a run's directory, an exported file, or a network that was loaded or trained. `images` is one image
    or a list of them: a path, a folder (all image files below it, sorted), the bytes of a file, a PIL image, an
    array [H, W] or [H, W, C], or a tensor [C, H, W], the last two of uint8. With `bad="skip"` the answer for an
    image that cannot be read is None; else it is refused. `output` is the name or the number of the output with
    the class scores, of a network with several. Views of an image are averaged as `evaluate` averages them.

    >>> predict("runs/photos", ["holiday.jpg"], top=2)  # doctest: +SKIP
    [[('beach', 0.93), ('city', 0.05)]]
    """
    if not isinstance(top, int) or top < 1:
        raise LowRankError(f"top is the number of classes to name, at least 1, not {top!r}.")
    if bad not in ("refuse", "skip"):
        raise LowRankError(f"bad is refuse or skip, not {bad!r}.")
    trained = _with_preparation(model).with_output(output)
    place = torch.device(resolve_device(device))
    network = trained.network.to(place)
    forward, preprocess = averaged_views(network, trained.recipe), trained.preprocess.to(place)
    answers: list[Ranking | None] = []
    for image in each_image(images):
        try:
            pixels = _pixels(image, trained).to(place)
        except LowRankError:
            if bad == "refuse":
                raise
            answers.append(None)
            continue
        seen = _whole_to_window(preprocess(pixels[None]), trained)
        with unchanged(network, evaluating=True):
            scores = forward(seen)
        if bool(scores.isnan().any()):
            raise LowRankError("the network gives NaN in place of class scores.")
        probabilities, places = scores.softmax(1)[0], ranking(scores)[0, :top].tolist()
        answers.append([(trained.classes[place], float(probabilities[place])) for place in places])
    return answers


def each_image(images: Any) -> Iterator[Any]:
    """Yield the images to classify; a folder stands for the image files below it."""
    several = isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray)
    for image in images if several or isinstance(images, Iterator) else [images]:
        if isinstance(image, str | Path) and Path(image).is_dir():
            yield from files_below(Path(image))
        else:
            yield image


def files_below(folder: Path) -> list[Path]:
    """Image files at any depth below a folder, sorted; hidden ones are left out, and links are followed."""
    found = sorted(map(Path, image_files(folder, Problems())))
    if not found:
        raise LowRankError(f"there is no image below {folder}.")
    return found


def _with_preparation(model: Trained | nn.Module | str | Path) -> Trained:
    if isinstance(model, Trained):
        return model
    found = carried_by(model) if isinstance(model, nn.Module) else load_checkpoint(model)
    if found is None:
        raise LowRankError(
            "predict needs a trained network, which knows its classes and how images are prepared: give a run's "
            "directory, or what load, load_pretrained or fit made."
        )
    return found


def _pixels(image: Any, trained: Trained) -> Tensor:
    """Pixels [C, H, W]: whole at the one size of the training images, else framed as these were."""
    size = (trained.image[1], trained.image[2]) if trained.image else None
    framing = frame(size, Augment() if size else trained.augment, train=False, fill=())
    name = str(image) if isinstance(image, str | Path) else f"the {type(image).__name__}"
    try:
        data = _encoded(image)
        framed = framing(decode_image(data, channels=trained.channels, at_least=framing.at_least), None)
    except OSError as error:
        raise LowRankError(f"{name} cannot be read ({error.strerror or error}).") from error
    except BadImageError as error:
        raise LowRankError(f"{name} is not an image that can be used: {error}.") from error
    return stack([framed.tobytes()], framed.height, framed.width, trained.channels)[0].permute(2, 0, 1)


def _encoded(image: Any) -> bytes:
    """The bytes of an image file; pixels are written as PNG, so that they take the same way as a file."""
    if isinstance(image, str | Path):
        return read_image(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    pillow = require("PIL.Image", extra="data", purpose="reading images")
    if not isinstance(image, pillow.Image):
        image = pillow.fromarray(_array(image))
    out = io.BytesIO()
    image.save(out, "TIFF" if image.mode in ("F", "CMYK") else "PNG")
    return out.getvalue()


def _array(image: Any) -> Any:
    """An array [H, W] or [H, W, C] of uint8 that Pillow takes, from an array or from a tensor [C, H, W]."""
    numpy = require("numpy", extra="data", purpose="reading images")
    if isinstance(image, Tensor):
        image = image.detach().cpu().movedim(0, -1).numpy() if image.ndim == 3 else image.detach().cpu().numpy()
    if not hasattr(image, "__array__"):
        raise LowRankError(
            f"predict takes paths, folders, bytes, PIL images, arrays and tensors, not a {type(image).__name__}."
        )
    pixels = numpy.asarray(image)
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    shaped = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if pixels.dtype != numpy.uint8 or not shaped:
        raise LowRankError(
            f"an image is an array [H, W] or [H, W, C], or a tensor [C, H, W], of uint8, not {pixels.dtype} "
            f"{list(pixels.shape)}."
        )
    return numpy.ascontiguousarray(pixels)


def _whole_to_window(images: Tensor, trained: Trained) -> Tensor:
    """Scale and crop preprocessed images: whitening needs the whole image."""
    if not trained.image:
        return images
    window = trained.augment.window(images.shape[2], images.shape[3], train=False)
    return centre_crop(resize_shorter(images, trained.augment.resize), window)
