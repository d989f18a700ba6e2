"""What `optimize` found is written to a file, made again without measuring, and compared where it is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy import block_forms as candidates
from lowrank_cnn.deploy.export import export, load
from lowrank_cnn.deploy.optimize import optimize, reoptimize
from lowrank_cnn.models import create_model

IMAGE = torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def planned_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured last takes the least time: the planned network, each block in its last way."""

    def measured(things: Mapping[str, object], *_: object, **__: object) -> dict[str, Sample]:
        return {name: Sample(1 / place, 0, 1, 3) for place, name in enumerate(things, 1)}

    monkeypatch.setattr("lowrank_cnn.deploy.plan.measure", measured)
    monkeypatch.setattr("lowrank_cnn.deploy.optimize.measure", measured)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return create_model("nin", width=0.05, norm="batch", scheme="lr-join").eval()


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("lowrank_cnn.deploy.plan.measure", refused)
    monkeypatch.setattr("lowrank_cnn.deploy.optimize.measure", refused)


def test_a_written_form_is_made_again_without_measuring(network, tmp_path: Path, request):
    fast = optimize(network, IMAGE, compile=False, cache=False)
    assert fast.report.choice == "planned, contiguous"
    assert fast.chosen["ways"]
    export(fast, tmp_path / "net.safetensors")
    request.getfixturevalue("without_measuring")
    again = load(tmp_path / "net.safetensors")
    torch.testing.assert_close(again(IMAGE), network(IMAGE), rtol=1e-4, atol=1e-4)
    assert again.chosen == json.loads(json.dumps(fast.chosen))
    kinds = [[type(part).__name__ for part in net.network.modules()] for net in (again, fast)]
    assert kinds[0] == kinds[1]
    assert notes(again).input_size == (3, 30, 30)
    export(again, tmp_path / "again.safetensors")
    assert load(tmp_path / "again.safetensors").report.choice == fast.report.choice


def test_a_form_that_differs_here_is_left_out_with_the_reason(network, tmp_path: Path, monkeypatch):
    fast = optimize(network, IMAGE, compile=False, cache=False)
    export(fast, tmp_path / "net.safetensors")

    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            return x * 2

    monkeypatch.setattr(candidates, "CANDIDATES", dict.fromkeys(candidates.CANDIDATES, lambda block: Wrong()))
    monkeypatch.setattr("lowrank_cnn.deploy.plan.CANDIDATES", candidates.CANDIDATES)
    again = load(tmp_path / "net.safetensors")
    assert again.report.choice == "as given"
    assert again.report.failed["planned, contiguous"]
    torch.testing.assert_close(again(IMAGE), network(IMAGE))


def test_a_network_that_changed_since_is_not_written(network, tmp_path: Path):
    fast = optimize(network, IMAGE, compile=False, cache=False)
    with torch.no_grad():
        next(network.parameters()).mul_(2)
    with pytest.raises(LowRankError, match="changed since it was optimised"):
        export(fast, tmp_path / "net.safetensors")
    with pytest.raises(LowRankError, match="merged, planned, optimised"):
        export(copy.deepcopy(fast), tmp_path / "net.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad",
    [{"ways": 3}, {"input": [2**20, 2**20]}, {"input": []}, {"times": {"a": "b"}}, {"choice": None, "input": 1}],
)
def test_damaged_choices_are_refused(network, bad: dict):
    chosen = {"choice": "as given", "ways": {}, "times": {}, "input": [1, 3, 30, 30]}
    with pytest.raises(LowRankError, match="damaged"):
        reoptimize(network, {**chosen, **bad})


def test_an_unknown_form_runs_as_given(network):
    found = reoptimize(network, {"choice": "faster", "ways": {}, "times": {}, "input": [1, 3, 30, 30]})
    assert found.report.choice == "as given"
    assert "no such form" in found.report.failed["faster"]
