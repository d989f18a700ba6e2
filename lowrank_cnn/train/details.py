"""Evaluation in detail: accuracy per class, confused classes, worst images, calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowrank_cnn.data import Split
from lowrank_cnn.data.images.thumbnail import thumbnail

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
