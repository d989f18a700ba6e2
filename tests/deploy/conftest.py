"""What tests of deployment share; what an engine built for another torch refuses is skipped."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.optimize import optimize
from lowrank_cnn.method.schemes import build_conv

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
PINNED = f"torch=={torch.__version__.partition('+')[0]}" in PINS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """With the pinned versions nothing is skipped: there the two belong together."""
    try:
        return (yield)
    except LowRankError as error:
        if PINNED or "built for another torch" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def long_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize` has ten minutes: on a busy machine it would leave forms out after its half minute."""
    monkeypatch.setitem(inspect.unwrap(optimize).__kwdefaults__, "budget", 600.0)


class LowRankResidual(nn.Module):
    """A low-rank layer whose result is added to its input, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = build_conv(8, 8, 3, "lr")

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) + x).relu()


@pytest.fixture
def residual() -> nn.Module:
    """A low-rank layer of 8 channels with a residual, always with the same weights."""
    torch.manual_seed(0)
    return LowRankResidual().eval()


class Views(nn.Module):
    """Views its maps as vectors, which maps in channels_last do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Linear(8 * 900, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(x))
        return self.fc(y.view(y.size(0), -1))


@pytest.fixture
def views() -> nn.Module:
    """A network for images of 30x30 whose maps keep their memory format."""
    return Views().eval()


@pytest.fixture
def last_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `plan` and `optimize` measure last takes the least time, so that every rewriting is put to use."""

    def measured(things: Mapping[str, object], **_: object) -> dict[str, Sample]:
        return {name: Sample(1 / place, 0, 1, 3) for place, name in enumerate(things, 1)}

    monkeypatch.setattr("lowrank_cnn.deploy.plan.measure", measured)
    monkeypatch.setattr("lowrank_cnn.deploy.optimize.measure", measured)
