from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import store as image_store
from lowrank_cnn.data.store import NO_LABEL, WRONG_LABEL, fingerprint_of_rows, labelled_rows
from lowrank_cnn.data.types import Problems


@dataclass
class Labels:
    """A store of labels alone."""

    labels: Tensor

    def where(self, row: int) -> str:
        return f"row {row}"

    def fingerprint(self) -> str:
        return "files"


def test_rows_whose_label_is_no_class_are_problems() -> None:
    problems = Problems()
    rows = labelled_rows(Labels(torch.tensor([0, 2, -1, 1, NO_LABEL])), 2, problems)  # type: ignore[arg-type]
    assert rows.tolist() == [0, 3]
    assert problems.found == [(WRONG_LABEL, "row 1: 2"), (WRONG_LABEL, "row 2: -1"), (WRONG_LABEL, "row 4: none")]


def test_so_many_wrong_labels_are_no_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_store, "MOST_WRONG", 3)
    with pytest.raises(LowRankError, match=r"4 of 5 labels, row 1 first, are none of the 2 classes"):
        labelled_rows(Labels(torch.tensor([0, 9, 9, 9, 9])), 2, Problems())  # type: ignore[arg-type]


def test_the_fingerprint_depends_on_rows_and_labels() -> None:
    store = Labels(torch.tensor([0, 1, 0]))
    one = fingerprint_of_rows(store, torch.tensor([0, 1]))  # type: ignore[arg-type]
    assert one == fingerprint_of_rows(Labels(torch.tensor([0, 1, 1])), torch.tensor([0, 1]))  # type: ignore[arg-type]
    assert one != fingerprint_of_rows(store, torch.tensor([0, 2]))  # type: ignore[arg-type]
    assert one != fingerprint_of_rows(Labels(torch.tensor([1, 1, 0])), torch.tensor([0, 1]))  # type: ignore[arg-type]
