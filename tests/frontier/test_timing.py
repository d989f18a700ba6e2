from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowrank_cnn.choose import trace as timing
from lowrank_cnn.choose.candidates import DENSE, FAMILIES, Builder, find_design
from lowrank_cnn.choose.trace import DesignClock, width_of_time


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize` returns the network itself: what it does is tested elsewhere, and takes its time."""

    def found(network: nn.Module, images: torch.Tensor, **_: object) -> nn.Module:
        network.report = SimpleNamespace(times={"as is": SimpleNamespace(ms=1.0)}, choice="as is")  # type: ignore[assignment]
        return network

    monkeypatch.setattr(timing, "optimize", found)


@pytest.mark.usefixtures("as_it_is")
def test_a_design_is_timed_beside_the_dense_network_of_its_family():
    builder = Builder(FAMILIES["airbench"], (1, 12, 12), 2, base=0.25)
    clock = DesignClock(builder, torch.device("cpu"), batch=2, compile=False, repeats=3)
    low_rank, dense = clock.time(find_design("lr")), clock.time(DENSE)
    assert dense.ratio == 1.0
    assert low_rank.ratio == low_rank.ms / low_rank.reference_ms
    for found in (dense, low_rank):
        assert 0 < found.low <= found.ms <= found.high
        assert (found.batch, found.choice, found.tries) == (2, "as is", {"as is": 1.0})


@pytest.mark.parametrize(
    ("measured", "target", "width"),
    [
        ({1.0: 4.0, 0.5: 1.0}, 2.25, 0.75),
        ({1.0: 4.0}, 1.0, 0.5),
        ({1.0: 4.0, 0.5: 1.0}, 16.0, 2.0),
        ({1.0: 0.05}, 1.0, 4.0),  # the widest there is
    ],
)
def test_a_width_is_found_by_time(measured: dict, target: float, width: float):
    assert width_of_time(measured, target) == width
