"""Tests of shapes have a clock that counts, because measured times differ from run to run."""

import pytest

from lowrank_cnn.choose import shape_costs as shape_times
from tests.shapes.driver import counted_times


@pytest.fixture(autouse=True)
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_times, "measure", counted_times)
