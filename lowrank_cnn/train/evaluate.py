"""How good a network is: its scores, `evaluate` on images with labels, and `predict`, the classes of other images.

Scores are exact over any number of processes.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lowrank_cnn.core.compare import evaluating, unchanged
from lowrank_cnn.core.errors import LowRankError, check_choice, check_number, require, to_caller
from lowrank_cnn.core.modules import batch_length, call
from lowrank_cnn.core.numbers import accuracy
from lowrank_cnn.core.text import counted, first_few
from lowrank_cnn.data import Augment, Data, Preprocess, Problems, Split, make_loader, open_data
from lowrank_cnn.data.augment import centre_crop, resize_shorter
from lowrank_cnn.data.decode import BadImageError, decode_image, stack, thumbnail
from lowrank_cnn.data.folders import image_files
from lowrank_cnn.data.own import as_dataset, for_classes, in_short, is_dataset
from lowrank_cnn.data.store import counting, read_image
from lowrank_cnn.data.streamed import frame
from lowrank_cnn.data.types import places_by_name
from lowrank_cnn.method.select import check_values
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.failure import lost_process_as_user_error
from lowrank_cnn.train.inputs import (
    check_fits,
    check_network,
    evaluation_batch,
    input_size,
    open_for,
    preprocessing,
)
from lowrank_cnn.train.objective import Loss, class_scores, hits, ranking
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import Trained, carried_by, load_checkpoint, load_pretrained

__all__ = ["Evaluation", "Trained", "evaluate", "load_checkpoint", "load_pretrained", "predict"]

BINS = 15
"""Bins of confidence in which calibration is measured."""
WORST = 20
PAIRS = 20
MOST_CLASSES = 200
"""A record holds the whole confusion matrix of this many classes at most; of more, the most confused pairs."""


@dataclass(frozen=True)
class WrongImage:
    """A misclassified image: its file or row, its class, and the class that the network predicted."""

    image: str
    true: str
    predicted: str
    probability: float
    loss: float
    thumbnail: str | None = None
    """A small JPEG as a data URI, which the report shows."""


@dataclass(frozen=True)
class EvaluationDetails:
    """Counts behind an accuracy.

    `confusion` [true class, predicted class] counts images. `bins` [BINS, 3] holds for each bin of the highest
    probability the number of images, the sum of these probabilities and the number of right answers. `worst` are
    the wrong images of the largest loss, the largest first. `right` tells of each image, in the order of the set,
    whether its answer was right. Several processes together have neither of the two.
    """

    classes: tuple[str, ...]
    confusion: Tensor
    bins: Tensor
    worst: tuple[WrongImage, ...] = ()
    right: Tensor | None = None

    def per_class(self) -> list[dict[str, Any]]:
        """The number of images of each class, and the share that was recognised; None without images."""
        totals, right = self.confusion.sum(1).tolist(), self.confusion.diagonal().tolist()
        return [
            {"class": name, "n": n, "accuracy": correct / n if n else None}
            for name, n, correct in zip(self.classes, totals, right, strict=True)
        ]

    def most_confused(self, most: int = PAIRS) -> list[dict[str, Any]]:
        """Pairs of true and predicted class, the most frequent first; `share` is of the class's images."""
        wrong, totals = self.confusion.clone().fill_diagonal_(0), self.confusion.sum(1).tolist()
        counts, places = (found[:most].tolist() for found in wrong.flatten().sort(descending=True, stable=True))
        pairs = [(*divmod(place, len(self.classes)), n) for n, place in zip(counts, places, strict=True) if n]
        return [
            {"true": self.classes[true], "predicted": self.classes[predicted], "n": n, "share": n / totals[true]}
            for true, predicted, n in pairs
        ]

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: how far confidence is from accuracy, averaged over images."""
        n, confidence, right = self.bins.double().unbind(1)
        return float((confidence - right).abs().sum() / n.sum().clamp_min(1))

    def to_dict(self, *, pictures: bool = True) -> dict[str, Any]:
        """In values that JSON can hold; without `pictures` the worst images are only named."""
        bins = [
            {"n": int(n), "confidence": confidence / n if n else None, "accuracy": right / n if n else None}
            for n, confidence, right in self.bins.tolist()
        ]
        return {
            "per_class": self.per_class(),
            "confusion": self.confusion.tolist() if len(self.classes) <= MOST_CLASSES else None,
            "most_confused": self.most_confused(),
            "worst": [
                {name: value for name, value in vars(image).items() if pictures or name != "thumbnail"}
                for image in self.worst
            ],
            "calibration": {"bins": bins, "error": self.calibration_error},
        }


def answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Rows of loss, true class, predicted class and its probability, in double precision."""
    # Predicted by the scores, as accuracy is counted: probabilities round to equal ones more often.
    columns = (
        functional.cross_entropy(logits.float(), labels, reduction="none"),
        labels,
        logits.argmax(1),
        logits.float().softmax(1).amax(1),
    )
    return torch.stack([column.double() for column in columns], dim=1)


def details_of(
    rows: Tensor,
    classes: Sequence[str],
    split: Split | None = None,
    add_up: Callable[[Tensor], Tensor] = Tensor.clone,
) -> EvaluationDetails:
    """The details behind rows of `answers`. With a `split` of images in this order they name single images."""
    loss, true, predicted, confidence = rows.unbind(1)
    right, number = true == predicted, len(classes)
    places = (true * number + predicted).long()
    confusion = add_up(places.bincount(minlength=number * number)).view(number, number).cpu()
    bins = torch.zeros(BINS, 3, dtype=rows.dtype, device=rows.device)
    counted_in = (confidence.float() * BINS).long().clamp(0, BINS - 1)
    bins.index_add_(0, counted_in, torch.stack([torch.ones_like(loss), confidence, right.double()], dim=1))
    bins = add_up(bins).cpu()
    if split is None:
        return EvaluationDetails(tuple(classes), confusion, bins)
    wrong = (~right).nonzero().flatten()
    worst = wrong[loss[wrong].argsort(descending=True, stable=True)[:WORST]]
    images = tuple(
        WrongImage(
            image=split.describe(place),
            true=classes[int(true[place])],
            predicted=classes[int(predicted[place])],
            probability=float(confidence[place]),
            loss=float(loss[place]),
            thumbnail=thumbnail(split.picture(place)),
        )
        for place in worst.tolist()
    )
    return EvaluationDetails(tuple(classes), confusion, bins, images, right.cpu())


TOP_FIVE = 5
"""Top-5 counts an answer as right if the class is among this many; it is not shown for fewer classes."""


@dataclass(frozen=True)
class Evaluation:
    """The accuracy of a network on `n` images, as shares between 0 and 1, and its mean cross-entropy.

    `details` has accuracies per class, the confusion matrix, the worst images and the calibration.
    """

    top1: float
    top5: float
    n: int
    loss: float
    details: EvaluationDetails | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        top5 = f", top-5 {self.top5:.2%}" if self.top5 < 1 else ""
        return f"top-1 {accuracy(self.top1, self.n)}{top5}, loss {self.loss:.4f}, on {counted(self.n, 'image')}"

    @property
    def rank(self) -> float:
        """Networks are compared by this: larger is better."""
        return self.top1

    def to_dict(self) -> dict[str, float]:
        """The four figures in values that JSON can hold."""
        return {"top1": self.top1, "top5": self.top5, "n": self.n, "loss": self.loss}


@dataclass(frozen=True)
class LossEvaluation:
    """The mean of the user's own loss, and the accuracy if outputs are classes."""

    loss: float
    n: int
    top1: float | None = None
    details: None = None

    @property
    def rank(self) -> float:
        """Larger is better; a loss that is NaN comes last."""
        return -math.inf if math.isnan(self.loss) else -self.loss

    def to_dict(self) -> dict[str, float | None]:
        return {"top1": self.top1, "top5": None, "n": self.n, "loss": self.loss}


@torch.no_grad()
def score_by_loss(
    network: nn.Module, batches: Iterable[tuple[Any, Any]], loss: Loss, *, forward: Callable[[Any], Any]
) -> LossEvaluation:
    """The mean of a loss over all items, each batch weighted by its number of them."""
    total, n = 0.0, 0
    right: int | None = 0
    with evaluating(network):
        for images, targets in batches:
            outputs, length = forward(images), batch_length(images)
            total += float(loss(outputs, targets)) * length
            found = hits(outputs, targets)
            right = None if right is None or found is None else right + int(found)
            n += length
    return LossEvaluation(total / max(n, 1), n, None if right is None else right / max(n, 1))


@torch.no_grad()
def score(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device,
    forward: Callable[[Tensor], Tensor] | None = None,
    add_up: Callable[[Tensor], Tensor] = Tensor.clone,
    classes: Sequence[str] = (),
    split: Split | None = None,
) -> Evaluation:
    """Evaluate over batches; `add_up` sums a tensor over processes where there are several.

    With the names of the `classes` the result has details; `split` names and shows the worst images.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    rows = [torch.zeros(0, 4, dtype=torch.float64, device=device)]
    with evaluating(network):
        for images, labels in batches:
            logits = class_scores((forward or partial(call, network))(images)).float()
            ranked = ranking(logits)[:, :TOP_FIVE] == labels[:, None]
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            n = torch.full_like(loss, len(labels))
            sums += torch.stack([ranked[:, 0].sum(), ranked.sum(), n, loss]).double()
            if classes:
                rows.append(answers(logits, labels))
    top1, top5, n, loss = add_up(sums).tolist()
    details = details_of(torch.cat(rows), classes, split, add_up) if classes else None
    return Evaluation(top1 / max(n, 1), top5 / max(n, 1), int(n), loss / max(n, 1), details)


def averaged_views(forward: Callable[[Tensor], Tensor], recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """A forward that averages the logits of an image, its mirror image and two shifts, as the recipe says.

    The shifts, up and left and down and right, count for half.
    """

    def scores(images: Tensor) -> Tensor:
        return class_scores(forward(images), recipe.output)

    def mirrored(images: Tensor) -> Tensor:
        return (scores(images) + scores(images.flip(-1))) / 2 if recipe.test_mirror else scores(images)

    def shifted(images: Tensor) -> Tensor:
        step, (height, width) = recipe.test_shift, images.shape[2:]
        padded = functional.pad(images, (step,) * 4, mode="reflect")
        views = (padded[:, :, at : at + height, at : at + width] for at in (0, 2 * step))
        one, other = (mirrored(view.contiguous(memory_format=torch.channels_last)) for view in views)
        return mirrored(images) / 2 + (one + other) / 4

    return shifted if recipe.test_shift else mirrored


@lost_process_as_user_error()
def evaluate(
    model: Trained | nn.Module | str | Path,
    data: Data | Dataset | DataLoader | tuple[Any, Any] | str | Path,
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

    Views of an image are averaged if the recipe says so (`test_mirror`, `test_shift`).

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
    model = load_checkpoint(model) if isinstance(model, str | Path) else model
    known = model if isinstance(model, Trained) else carried_by(model)
    network = model.network if isinstance(model, Trained) else model
    source, data = data, _opened(data, network, known, recipe or Recipe())
    if known is None or (network is model and (preprocess or recipe)):
        recipe = recipe or Recipe()
        check_network(network, data, recipe, output=output)
        fitted = preprocess or preprocessing(data.train if len(data.train) else data.test, recipe)
        known = Trained(network, fitted, recipe, data.classes, data.test.size or ())
    trained = known.with_output(output)
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
    check_fits(network, size, len(trained.classes), place, trained.recipe.output)
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
    places = places.to(place)
    batches = ((images, places[labels]) for images, labels in loader.epoch(0))  # as the network numbers classes
    with unchanged(network):
        found = score(
            network,
            counting(batches, "Evaluating" if progress else "", len(data.test), lambda batch: len(batch[1])),
            device=place,
            forward=averaged_views(partial(call, network), trained.recipe),
            classes=trained.classes,
            split=data.test,
        )
    if math.isnan(found.loss):  # the argmax of NaN is still some class
        raise LowRankError(f"the network gives NaN on images of {data.name}, so it has no accuracy.")
    return found


def _opened(data: Any, network: nn.Module, known: Trained | None, recipe: Recipe) -> Data:
    """The data to test on; a data set without names of classes has those of a trained network."""
    if isinstance(data, Data):
        return data
    data = as_dataset(data)
    if not is_dataset(data):
        return open_data(data, only_test=True)
    recipe, classes = (known.recipe, known.classes) if known else (recipe, ())
    return for_classes(open_for(network, data, recipe, classes=classes))


def held_out_images(trained: Trained, source: str | Path, **options: Any) -> Data | None:
    """The set with the images to test on that training held out of it; None if it is not the set of that run."""
    if not trained.held_out:
        return None
    split = trained.held_out["val_split"]
    known = {"image_size": trained.size_option, "channels": trained.channels, "limit": split.get("limit")}
    try:
        data = open_data(source, **known, val_split=split["share"], **options)
    except LowRankError:  # such as a set that has test images
        return None
    return data if data.digest == trained.held_out["digest"] else None


def changed_set(trained: Trained, data: Data) -> str | None:
    """A warning where a set has the name of the one that the network was trained on, but not its digest."""
    if not trained.held_out or trained.held_out.get("name") != data.name:
        return None
    return (
        f"The network was trained on a set called {data.name}, which held other images then: it may have been "
        f"trained on most of these {counted(len(data.test), 'image')}, and then their accuracy says little."
    )


def match_classes(trained: Trained, data: Data) -> Tensor:
    """The place of each of the data's classes among the network's, by name: unknown ones could only be wrong."""
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
        python = f"open the data with image_size={size!r}, channels={trained.channels}"
        hint = to_caller(python, f"give --image-size {size}")
        raise LowRankError(
            f"the network was trained on images of {'x'.join(map(str, trained.image))}, {data.name} has images of "
            f"{theirs}: {hint}."
        )


@torch.no_grad()
def predict(
    model: Trained | nn.Module | str | Path,
    images: Any,
    *,
    top: int = 5,
    device: str = "auto",
    bad: Literal["refuse", "skip"] = "refuse",
    output: str | None = None,
) -> list[Any]:
    """For each image the likeliest classes with their probabilities, the likeliest first.

    `model` is a run's directory, an exported file, or a network that was loaded or trained. `images` is one image
    or a list of them. An image is a path, the bytes of a file, a PIL image, or uint8 values in an array [H, W] or
    [H, W, C] or in a tensor [C, H, W]; a volume is a tensor or array [C, D, H, W] such as it was trained on. A
    folder stands for all image files below it, sorted. With `bad="skip"` the answer for an image that cannot be
    read is None; else it is refused. `output` is the name or the number of the output with the class scores, of a
    network with several. Views of an image are averaged as in `evaluate`.

    >>> predict("runs/photos", ["holiday.jpg"], top=2)  # doctest: +SKIP
    [[('beach', 0.93), ('city', 0.05)]]
    """
    check_number("top", top, least=1, whole=True)
    check_choice("bad", bad, ("skip", "refuse"))
    known = load_checkpoint(model) if isinstance(model, str | Path) else model
    known = carried_by(known) if isinstance(known, nn.Module) else known
    if known is None:
        raise LowRankError(
            "predict needs a trained network, which knows its classes and how images are prepared: give a run's "
            "directory, or what load, load_pretrained or fit made."
        )
    trained, place = known.with_output(output), torch.device(resolve_device(device))
    network = trained.network.to(place)
    forward, preprocess = averaged_views(network, trained.recipe), trained.preprocess.to(place)
    answers: list[list[tuple[str, float]] | None] = []
    for image in each_image(images):
        try:
            pixels = _pixels(image, trained).to(place)
        except LowRankError:
            if bad == "refuse":
                raise
            answers.append(None)
            continue
        seen = preprocess(pixels[None])
        if len(trained.image) == 3:  # not scaled and cropped before: whitening needs the whole image
            window = trained.augment.window(seen.shape[2], seen.shape[3], train=False)
            seen = centre_crop(resize_shorter(seen, trained.augment.resize), window)
        with unchanged(network, evaluating=True):
            scores = forward(seen)
        if bool(scores.isnan().any()):
            raise LowRankError("the network gives NaN in place of class scores.")
        probabilities, places = scores.softmax(1)[0], ranking(scores)[0, :top].tolist()
        answers.append([(trained.classes[place], float(probabilities[place])) for place in places])
    return answers


def each_image(images: Any) -> Iterator[Any]:
    """Yield the images to classify; a folder stands for the image files at any depth below it, but hidden ones."""
    several = isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray)
    for image in images if several or isinstance(images, Iterator) else [images]:
        if isinstance(image, str | Path) and Path(image).is_dir():
            found = sorted(map(Path, image_files(Path(image), Problems())))
            if not found:
                raise LowRankError(f"there is no image below {image}.")
            yield from found
        else:
            yield image


def _pixels(image: Any, trained: Trained) -> Tensor:
    """Pixels [C, H, W]: whole at the one size of the training images, else framed as these were; or a volume."""
    if len(trained.image) > 3:
        if tuple(getattr(image, "shape", ())) != trained.image:
            wanted = "x".join(map(str, trained.image))
            raise LowRankError(f"the network takes volumes of {wanted}, not {in_short(image)}.")
        return torch.as_tensor(image)
    size = trained.image[1:] or None
    framing = frame(size, Augment() if size else trained.augment, train=False, fill=())
    name = str(image) if isinstance(image, str | Path) else f"the {type(image).__name__}"
    try:
        decoded = decode_image(_encoded(image), channels=trained.channels, at_least=framing.at_least)
        framed = framing(decoded, None)
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
