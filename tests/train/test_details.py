"""Accuracies per class, confusion, worst images and calibration, against what a few lines of Python count."""

from __future__ import annotations

import json

import pytest
import torch

from lowrank_cnn.data.decode import thumbnail
from lowrank_cnn.data.resident import ResidentSplit
from lowrank_cnn.data.types import Decoded
from lowrank_cnn.report.records import read_details
from lowrank_cnn.train.score import BINS, MOST_CLASSES, DetailsCollector, EvaluationDetails

CLASSES = ("cat", "dog", "owl")


def photos(images: torch.Tensor, labels: torch.Tensor) -> ResidentSplit:
    decoded = Decoded(images, labels, describe="photo {}".format)
    return ResidentSplit(lambda: decoded, (3, 8, 8))


@pytest.fixture
def details() -> EvaluationDetails:
    """Seven images: both dogs and one cat are right, two cats are taken for dogs; there is no owl."""
    sure, unsure = 4.0, 1.0
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 0])
    said = torch.tensor([0, 1, 1, 2, 1, 1, 0])
    logits = torch.zeros(7, 3)
    logits[torch.arange(7), said] = torch.tensor([sure, sure, unsure, unsure, sure, unsure, sure])
    collector = DetailsCollector(CLASSES, torch.device("cpu"))
    for part in (slice(0, 3), slice(3, 7)):
        collector.add(logits[part], labels[part])
    return collector.details(photos(torch.zeros(7, 3, 8, 8, dtype=torch.uint8), labels))


def test_counts(details: EvaluationDetails) -> None:
    assert details.confusion.tolist() == [[2, 2, 1], [0, 2, 0], [0, 0, 0]]
    assert details.per_class() == [
        {"class": "cat", "n": 5, "accuracy": 0.4},
        {"class": "dog", "n": 2, "accuracy": 1.0},
        {"class": "owl", "n": 0, "accuracy": None},
    ]


def test_right_answers_are_in_the_order_of_the_set(details: EvaluationDetails) -> None:
    assert details.right is not None
    assert details.right.tolist() == [True, False, False, False, True, True, True]
    assert DetailsCollector(CLASSES, torch.device("cpu")).details(None).right is None


def test_confused_pairs_are_sorted(details: EvaluationDetails) -> None:
    assert details.most_confused() == [
        {"true": "cat", "predicted": "dog", "n": 2, "share": 0.4},
        {"true": "cat", "predicted": "owl", "n": 1, "share": 0.2},
    ]
    assert len(details.most_confused(1)) == 1


def test_the_worst_images_are_found_by_their_place(details: EvaluationDetails) -> None:
    assert {image.image for image in details.worst} == {"photo 1", "photo 2", "photo 3"}
    worst = details.worst[0]
    assert worst.image == "photo 1"
    assert (worst.true, worst.predicted) == ("cat", "dog")
    probabilities = torch.tensor([0.0, 4.0, 0.0], dtype=torch.float64).softmax(0)
    assert worst.probability == pytest.approx(float(probabilities[1]), rel=1e-6)
    assert worst.loss == pytest.approx(-float(probabilities[0].log()), rel=1e-6)


def test_calibration(details: EvaluationDetails) -> None:
    sure, unsure = (float(torch.tensor([0.0, x, 0.0], dtype=torch.float64).softmax(0)[1]) for x in (4.0, 1.0))
    expected = (abs(4 * sure - 3) + abs(3 * unsure - 1)) / 7  # all sure answers share a bin, and so do the others
    assert int(sure * BINS) != int(unsure * BINS)
    assert details.calibration_error == pytest.approx(expected, rel=1e-6)
    assert sum(row["n"] for row in details.to_dict()["calibration"]["bins"]) == 7


def test_json_holds_all_of_it_and_no_huge_matrix(details: EvaluationDetails) -> None:
    written = json.loads(json.dumps(details.to_dict()))
    assert written["confusion"][0] == [2, 2, 1]
    assert written["worst"][0]["image"] == "photo 1"
    many = MOST_CLASSES + 1
    large = EvaluationDetails(tuple(map(str, range(many))), torch.eye(many).long(), details.bins)
    assert large.to_dict()["confusion"] is None
    assert large.to_dict()["most_confused"] == []


def test_the_worst_images_come_with_small_pictures() -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    images[2] = 255
    labels = torch.tensor([0, 0, 0, 1])
    collector = DetailsCollector(CLASSES, torch.device("cpu"))
    logits = torch.zeros(4, 3)
    logits[torch.arange(4), torch.tensor([0, 0, 1, 1])] = 4.0  # photo 2 alone is wrong
    collector.add(logits, labels)
    found = collector.details(photos(images, labels))
    [worst] = found.worst
    assert (worst.image, worst.thumbnail) == ("photo 2", thumbnail(images[2]))
    assert thumbnail(images[2]) not in (None, thumbnail(images[0]))
    assert read_details(found.to_dict()).worst[0].thumbnail == worst.thumbnail  # pyright: ignore[reportOptionalMemberAccess]
    assert "thumbnail" not in found.to_dict(pictures=False)["worst"][0]
