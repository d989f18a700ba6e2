"""Tests of shapes have a clock that counts, because measured times differ from run to run."""

import pytest

from lowrank_cnn.choose import learn_shapes as learning
from tests.shapes.driver import counted_times


@pytest.fixture(autouse=True)
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "measure", counted_times)
