from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.data import ResidentSplit
from lowrank_cnn.report.records import LARGEST_THUMBNAIL, pool_answers, read_details
from lowrank_cnn.train.evaluate import DetailsCollector, EvaluationDetails

PICTURE = "data:image/png;base64,iVBORw0KGgo="


def evaluated(seed: int, images: int = 200) -> EvaluationDetails:
    draw = torch.Generator().manual_seed(seed)
    collector = DetailsCollector(("cat", "dog", "cow"), torch.device("cpu"))
    logits = 3 * torch.randn(images, 3, generator=draw)
    labels = torch.randint(0, 3, (images,), generator=draw)
    collector.add(logits, labels)
    return collector.details(ResidentSplit.of(torch.zeros(images, 1, 4, 4, dtype=torch.uint8), labels))


def test_the_details_of_a_record_are_those_of_the_evaluation():
    told = evaluated(0)
    found = read_details(told.to_dict())
    assert found is not None
    assert found.classes == told.classes
    assert found.confusion == tuple(map(tuple, told.confusion.tolist()))
    assert [right / n for n, right in found.per_class] == [row["accuracy"] for row in told.per_class()]
    assert found.calibration_error == pytest.approx(told.calibration_error)
    assert [image.image for image in found.worst] == [image.image for image in told.worst]


def test_runs_are_added_up_as_one_evaluation_of_all_their_images():
    both = [read_details(evaluated(seed).to_dict()) for seed in (0, 1)]
    total = pool_answers([one for one in both if one])
    confusion = evaluated(0).confusion + evaluated(1).confusion
    assert total.confusion == tuple(map(tuple, confusion.tolist()))
    assert sum(n for n, _ in total.per_class) == 400
    assert total.pairs[0][2] == int(confusion.masked_fill(torch.eye(3).bool(), 0).max())
    losses = [image.loss or 0.0 for image in total.worst]
    assert losses == sorted(losses, reverse=True)
    assert len({image.image for image in total.worst}) == len(losses) == 20


def test_runs_of_other_classes_are_not_added():
    one, other = read_details(evaluated(0).to_dict()), read_details({"per_class": [{"class": "x", "n": 9}]})
    assert one is not None
    assert other is not None
    assert pool_answers([one, other]).per_class == one.per_class


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (PICTURE, PICTURE),
        ("data:image/svg+xml;base64,AAAA", None),
        ("javascript:alert(1)", None),
        (PICTURE + "A" * LARGEST_THUMBNAIL, None),
        (5, None),
    ],
)
def test_a_thumbnail_is_a_small_picture_or_nothing(given: object, kept: str | None):
    worst = [{"image": "a.png", "true": "cat", "predicted": "dog", "thumbnail": given}]
    found = read_details({"per_class": [{"class": "cat", "n": 1}], "worst": worst})
    assert found is not None
    assert found.worst[0].thumbnail == kept


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON, JSON, JSON, JSON)
def test_whatever_a_record_holds_is_read(classes, confusion, pairs, worst, calibration):
    known = {"confusion": confusion, "most_confused": pairs, "worst": worst, "calibration": calibration}
    assert read_details({"per_class": classes, **known}) is None or isinstance(classes, list)
    found = read_details({"per_class": [{"class": "a", "n": 3, "accuracy": 0.5}], **known})
    assert found is not None
    assert pool_answers([found, found]).per_class == ((6, 3.0),)
