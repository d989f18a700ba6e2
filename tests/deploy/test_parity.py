"""A file that gives other results than its network is not written, whichever output and size it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy import parity as module
from lowrank_cnn.deploy.engines.request import Call, ExportRequest, free_axes
from lowrank_cnn.deploy.parity import parity


class Two(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"double": 2 * x, "largest": x.flatten(1).argmax(1)}


def compare(
    monkeypatch: pytest.MonkeyPatch, run, network: nn.Module | None = None, dynamic=("batch", "width")
) -> float:
    """The error of a file that computes `run`, a function of an array."""
    network = Two()
    call = Call.of(network, torch.randn(2, 1, 4, 4))
    request = ExportRequest(network, call, ("double", "largest"), free_axes(call, ("batch", "width")))
    monkeypatch.setattr(module, "open_engine", lambda path, trusted: lambda inputs: run(inputs["image"]))
    return parity(Path("net.pt2"), request, network)


def right(x):
    return {"double": 2 * x, "largest": x.reshape(len(x), -1).argmax(1)}


def test_equal_outputs_pass(monkeypatch):
    assert compare(monkeypatch, right) == 0
    assert 0 < compare(monkeypatch, lambda x: {**right(x), "double": 2.00001 * x}) < 1e-4


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda x: {**right(x), "double": 2.1 * x}, "double of the exported network"),
        (lambda x: {**right(x), "largest": right(x)["largest"] * 0 - 1}, "largest of the exported network"),
        (lambda x: {"double": 2 * x}, "largest of the exported network"),
        (lambda x: {**right(x), "double": 2 * x * (float("nan") if len(x) == 3 else 1)}, "input of 3x1x4x4"),
        (lambda x: {**right(x), "double": 2 * x[..., :4]}, "input of 2x1x4x6"),
        (lambda x: {**right(x), "largest": right(x)["largest"].astype("float32")}, "largest of the exported"),
    ],
)
def test_any_other_output_at_any_size_is_refused(monkeypatch, run, says: str):
    with pytest.raises(LowRankError, match=says):
        compare(monkeypatch, run)


class Logarithm(nn.Module):
    """Gives NaN for random numbers, but not for the example."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"double": torch.log(x), "largest": x.flatten(1).argmax(1)}


def test_where_random_numbers_are_no_input_the_example_is_repeated(monkeypatch):
    network, call = Logarithm(), Call.of(Logarithm(), torch.rand(2, 1, 4, 4) + 0.01)
    request = ExportRequest(network, call, ("double", "largest"), free_axes(call, ("batch",)))
    sizes = []

    def run(inputs):
        sizes.append(len(inputs["image"]))
        found = network(torch.from_numpy(inputs["image"]))
        return {name: tensor.numpy() for name, tensor in found.items()}

    monkeypatch.setattr(module, "open_engine", lambda path, trusted: run)
    assert parity(Path("net.pt2"), request, network) == 0
    assert {1, 2, 3} <= set(sizes)
