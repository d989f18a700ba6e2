from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn


class NeedsValues(nn.Module):
    """Cannot be built on the meta device, and gives a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.convs = torch.ones(1).item(), convs()

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"out": self.convs(x) * self.scale, "more": [x]}


def convs(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 4, 1))


def broken() -> nn.Module:
    raise RuntimeError("no such thing\nand more")


NETWORKS = {
    "plain": convs,
    "values": NeedsValues,
    "large": lambda: convs(400),
    "mixer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)),
    "broken": broken,
}


@pytest.fixture
def examine(benchmark_module, monkeypatch: pytest.MonkeyPatch):
    """Examine one of the stand-ins for networks of timm."""

    def find(text: str) -> SimpleNamespace:
        return SimpleNamespace(network=NETWORKS[text](), size=lambda _: (3, 8, 8))

    monkeypatch.setattr("lowrank_cnn.cli.source.find_model", find)
    return lambda text: benchmark_module("zoo_network").examine(text, "lr-join", 5000)


@pytest.mark.parametrize("name", ["plain", "values"])
def test_a_network_is_converted_counted_and_run(examine, name: str):
    row = examine(name)
    assert (row["network"], row["outcome"], row["input"]) == (name, "converted", "3x8x8")
    assert (row["macs_before"], row["macs_after"]) == (64 * (24 + 576 + 32), 64 * (24 + 192 + 64 + 32))
    assert (row["changed"], row["kept"]) == (1, {"its kernel is 1x1": 2})


def test_what_stands_in_the_way_is_said_in_a_line(examine):
    assert examine("mixer")["outcome"] == "nothing to convert"
    large = examine("large")
    assert (large["outcome"], large["changed"]) == ("counted", 1)
    assert "M parameters" in large["why"]
    failed = examine("broken")
    assert (failed["outcome"], failed["why"]) == ("failed", "RuntimeError: no such thing")
