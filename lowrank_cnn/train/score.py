"""Top-1 and top-5 accuracy and mean loss of a network over a set, exact over any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LowRankError, first_line
from lowrank_cnn.core.modules import InputSize, batch_length, blank, call, checked_size, in_words, is_example
from lowrank_cnn.core.text import counted
from lowrank_cnn.data import Data, Split
from lowrank_cnn.data.decode import thumbnail
from lowrank_cnn.method.activations import evaluating
from lowrank_cnn.train.objective import Loss, class_scores, hits, ranking

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
        """For each class the number of its images, and the share that was recognised; None where it has none."""
        totals, right = self.confusion.sum(1).tolist(), self.confusion.diagonal().tolist()
        return [
            {"class": name, "n": n, "accuracy": correct / n if n else None}
            for name, n, correct in zip(self.classes, totals, right, strict=True)
        ]

    def most_confused(self, most: int = PAIRS) -> list[dict[str, Any]]:
        """Pairs of true and predicted class, the most frequent first; `share` is of the class's images."""
        wrong = self.confusion.clone()
        wrong.fill_diagonal_(0)
        counts, places = wrong.flatten().sort(descending=True, stable=True)
        totals = self.confusion.sum(1)
        return [
            {
                "true": self.classes[place // len(self.classes)],
                "predicted": self.classes[place % len(self.classes)],
                "n": count,
                "share": count / int(totals[place // len(self.classes)]),
            }
            for count, place in zip(counts[:most].tolist(), places[:most].tolist(), strict=True)
            if count
        ]

    @property
    def calibration_error(self) -> float:
        """The expected calibration error: how far confidence is from accuracy, averaged over images."""
        n, confidence, right = self.bins.double().unbind(1)
        return float((confidence - right).abs().sum() / n.sum().clamp_min(1))

    def to_dict(self, *, pictures: bool = True) -> dict[str, Any]:
        """In values that JSON can hold: the field `details` of a record's result.

        Without `pictures` the worst images are only named.
        """
        small = len(self.classes) <= MOST_CLASSES
        bins = [
            {"n": int(n), "confidence": confidence / n if n else None, "accuracy": right / n if n else None}
            for n, confidence, right in self.bins.tolist()
        ]
        return {
            "per_class": self.per_class(),
            "confusion": self.confusion.tolist() if small else None,
            "most_confused": self.most_confused(),
            "worst": [_told(image, pictures) for image in self.worst],
            "calibration": {"bins": bins, "error": self.calibration_error},
        }


def _told(image: WrongImage, picture: bool) -> dict[str, Any]:
    return {name: value for name, value in vars(image).items() if picture or name != "thumbnail"}


class DetailsCollector:
    """Gathers the details of an evaluation batch by batch, on the device."""

    def __init__(self, classes: Sequence[str], device: torch.device) -> None:
        self.classes = tuple(classes)
        number = len(self.classes)
        self.confusion = torch.zeros(number * number, dtype=torch.float64, device=device)
        self.bins = torch.zeros(BINS, 3, dtype=torch.float64, device=device)
        self.worst = torch.zeros(0, 5, dtype=torch.float64, device=device)
        """Rows of loss, place in the set, true class, predicted class and its probability."""
        self.right: list[Tensor] = []
        self.seen = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch; images come in the order of the set."""
        # By the scores, as accuracy is counted: probabilities round to equal ones more often.
        predicted = logits.argmax(1)
        confidence = logits.float().softmax(1).amax(1)
        self.right.append(predicted == labels)
        right = self.right[-1].double()
        places = labels * len(self.classes) + predicted
        self.confusion += torch.bincount(places, minlength=len(self.confusion))
        bins = (confidence * BINS).long().clamp(0, BINS - 1)
        rows = torch.stack([torch.ones_like(right), confidence.double(), right], dim=1)
        self.bins.index_add_(0, bins, rows)
        self._keep_worst(logits, labels, predicted, confidence)
        self.seen += len(labels)

    def _keep_worst(self, logits: Tensor, labels: Tensor, predicted: Tensor, confidence: Tensor) -> None:
        loss = functional.cross_entropy(logits.float(), labels, reduction="none")
        place = torch.arange(self.seen, self.seen + len(labels), device=labels.device)
        rows = torch.stack([t.double() for t in (loss, place, labels, predicted, confidence)], dim=1)
        rows = torch.cat([self.worst, rows[predicted != labels]])
        self.worst = rows[rows[:, 0].argsort(descending=True, stable=True)[:WORST]]

    def details(self, split: Split | None, add_up: Callable[[Tensor], Tensor] = Tensor.clone) -> EvaluationDetails:
        """All that was gathered; `split` has the images in the order they came, None leaves single images out."""
        number = len(self.classes)
        confusion = add_up(self.confusion).round().long().view(number, number).cpu()
        worst = self._worst_images(split) if split else ()
        right = torch.cat(self.right).cpu() if split and self.right else None
        return EvaluationDetails(self.classes, confusion, add_up(self.bins).cpu(), worst, right)

    def _worst_images(self, split: Split) -> tuple[WrongImage, ...]:
        return tuple(
            WrongImage(
                image=split.describe(int(place)),
                true=self.classes[int(true)],
                predicted=self.classes[int(said)],
                probability=probability,
                loss=loss,
                thumbnail=thumbnail(split.picture(int(place))),
            )
            for loss, place, true, said, probability in self.worst.tolist()
        )


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
    details: EvaluationDetails | None = field(default=None, repr=False, compare=False)

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
        """The figures in values that JSON can hold."""
        return {"top1": self.top1, "top5": None, "n": self.n, "loss": self.loss}


@torch.no_grad()
def score_by_loss(
    network: nn.Module, batches: Iterable[tuple[Any, Any]], loss: Loss, *, forward: Callable[[Any], Any]
) -> LossEvaluation:
    """The mean of a loss over all items, each batch weighted by its number of them."""
    total, right, n = 0.0, 0, 0
    answered = True
    with evaluating(network):
        for images, targets in batches:
            outputs = forward(images)
            n_images = batch_length(images)
            total += float(loss(outputs, targets)) * n_images
            found = hits(outputs, targets)
            answered = answered and found is not None
            right, n = right + int(found or 0), n + n_images
    return LossEvaluation(total / max(n, 1), n, right / max(n, 1) if answered else None)


def check_classes(data: Data) -> None:
    """Refuse a data set of one class: a network learns nothing from it, and every answer would be right."""
    if len(data.classes) < 2:
        names = ", ".join(map(str, data.classes)) or "none"
        raise LowRankError(
            f"{data.name} has fewer than two classes ({names}): give the folder that has a folder of images for "
            "each class, or a loss of your own for another task (fit(..., loss=...))."
        )


def check_outputs(network: nn.Module, size: InputSize, classes: int, *, output: str | None = None) -> None:
    """Refuse a network of other than one output per class, before any image is decoded.

    What fails here may still work on the device that trains: `check_fits` decides there.
    """
    outputs = outputs_here(network, size)
    if outputs is not None:
        _check_scores(outputs, classes, output)


@torch.no_grad()
def outputs_here(network: nn.Module, size: InputSize) -> Any:
    """What a network gives for one image where it is now; None if it fails here.

    A network whose weights are made by its first forward is not run: they depend on the seed.
    """
    weights = [*network.parameters(), *network.buffers()]
    if any(map(is_lazy, weights)):
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
    *,
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
            f"{counted(classes, 'class')}: build it with num_classes={classes}."
        )


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
    collector = DetailsCollector(classes, device) if classes else None
    with evaluating(network):
        for images, labels in batches:
            logits = class_scores((forward or partial(call, network))(images)).float()
            sums += _count(logits, labels)
            if collector:
                collector.add(logits, labels)
    top1, top5, n, loss = add_up(sums).tolist()
    result = Evaluation(top1 / max(n, 1), top5 / max(n, 1), int(n), loss / max(n, 1))
    return replace(result, details=collector.details(split, add_up)) if collector else result


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    ranked = ranking(logits)[:, :TOP_FIVE] == labels[:, None]
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    n = torch.full_like(loss, len(labels))
    return torch.stack([ranked[:, 0].sum(), ranked.sum(), n, loss]).double()
