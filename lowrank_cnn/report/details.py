"""How a network answered its test images: by class, which classes it confuses, the worst images, calibration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowrank_cnn.report.fields import items, mapping, number, share, text, whole

MOST_CLASSES = 1000
MOST_WORST = 20
LARGEST_THUMBNAIL = 20_000
_PICTURE = re.compile(r"data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+")

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class WrongAnswer:
    """A test image that a network got wrong; `thumbnail` is a data URI where the record carries the image."""

    image: str
    true: str
    predicted: str
    probability: float | None
    loss: float | None
    thumbnail: str | None = None


@dataclass(frozen=True)
class AnswerDetails:
    """What `result["details"]` of a record holds, as counts that can be added up over runs.

    `per_class` has the images and the right answers of each class. `confusion` counts images by true and predicted
    class; it is empty where the record has no matrix. `pairs` are a class, what it was taken for, and how often.
    `bins` have the images, the sum of their confidences and the right answers, by rising confidence.
    """

    classes: tuple[str, ...]
    per_class: Rows
    confusion: Rows = ()
    pairs: tuple[tuple[str, str, int], ...] = ()
    bins: Rows = ()
    worst: tuple[WrongAnswer, ...] = ()

    @property
    def calibration_error(self) -> float | None:
        """The distance of confidence from accuracy, averaged over images; None without any."""
        images = sum(n for n, _, _ in self.bins)
        return sum(abs(confidence - right) for _, confidence, right in self.bins) / images if images else None


def read_details(values: Mapping[str, Any]) -> AnswerDetails | None:
    """The details in an untrusted record; None if it has none."""
    rows = [mapping(row) for row in items(values.get("per_class"))[:MOST_CLASSES]]
    if not rows:
        return None
    return AnswerDetails(
        classes=tuple(text(row.get("class")) or "unnamed" for row in rows),
        per_class=tuple(_counts(row, "accuracy") for row in rows),
        confusion=_matrix(values.get("confusion"), len(rows)),
        pairs=tuple(filter(None, map(_pair, items(values.get("most_confused"))))),
        bins=tuple(
            _counts(mapping(row), "confidence", "accuracy")
            for row in items(mapping(values.get("calibration")).get("bins"))
        ),
        worst=tuple(filter(None, map(_wrong, items(values.get("worst"))[:MOST_WORST]))),
    )


def _counts(row: Mapping[str, Any], *shares: str) -> tuple[float, ...]:
    """A number of images, with the counts that each share amounts to."""
    n = whole(row.get("n")) or 0
    return n, *(n * (share(row.get(name)) or 0.0) for name in shares)


def _matrix(value: object, classes: int) -> Rows:
    rows = [[whole(cell) or 0 for cell in items(row)] for row in items(value)]
    square = [len(row) for row in rows] == [classes] * classes
    return tuple(map(tuple, rows)) if square else ()


def _pair(value: object) -> tuple[str, str, int] | None:
    row = mapping(value)
    true, predicted, n = text(row.get("true")), text(row.get("predicted")), whole(row.get("n"))
    return (true, predicted, n) if true and predicted and n else None


def _wrong(value: object) -> WrongAnswer | None:
    row = mapping(value)
    image, true, predicted = (text(row.get(name)) for name in ("image", "true", "predicted"))
    if not (image and true and predicted):
        return None
    given = row.get("thumbnail")
    shown = isinstance(given, str) and len(given) <= LARGEST_THUMBNAIL and _PICTURE.fullmatch(given)
    picture = given if shown else None
    return WrongAnswer(image, true, predicted, share(row.get("probability")), number(row.get("loss")), picture)


def pool_answers(details: Sequence[AnswerDetails]) -> AnswerDetails:
    """The answers of several runs together; those of other classes or bins than the first run's are left out."""
    first = details[0]
    alike = [one for one in details if _shape(one) == _shape(first)]
    confusion = _summed([one.confusion for one in alike])
    worst = sorted((image for one in alike for image in one.worst), key=lambda image: image.loss or 0.0)
    hardest = {image.image: image for image in worst}  # of an image that several runs got wrong, the largest loss
    return AnswerDetails(
        classes=first.classes,
        per_class=_summed([one.per_class for one in alike]),
        confusion=confusion,
        pairs=_most_confused(first.classes, confusion) if confusion else first.pairs,
        bins=_summed([one.bins for one in alike]),
        worst=tuple(sorted(hardest.values(), key=lambda image: -(image.loss or 0.0))[:MOST_WORST]),
    )


def _shape(details: AnswerDetails) -> tuple[object, ...]:
    return details.classes, len(details.confusion), len(details.bins)


def _summed(tables: Sequence[Rows]) -> Rows:
    """Tables of one shape, added cell by cell."""
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))


def _most_confused(classes: Sequence[str], confusion: Rows) -> tuple[tuple[str, str, int], ...]:
    wrong = [
        (classes[i], classes[j], int(n))
        for i, row in enumerate(confusion)
        for j, n in enumerate(row)
        if n and i != j
    ]
    return tuple(sorted(wrong, key=lambda pair: -pair[2]))
