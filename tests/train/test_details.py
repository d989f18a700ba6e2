"""Accuracies per class, confusion, worst images and calibration, against what a few lines of Python count."""

from __future__ import annotations

import json

import pytest
import torch

from lowrank_cnn.train.details import BINS, MOST_CLASSES, DetailsCollector, EvaluationDetails

CLASSES = ("cat", "dog", "owl")


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
    return collector.details("photo {}".format)


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
