"""A run that learns shapes keeps what it was asked for and what shapes cost, and goes on with the same alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowrank_cnn.choose import shape_costs as shape_budget
from lowrank_cnn.choose.learn_shapes import learned_scheme
from lowrank_cnn.choose.shape_choice import ShapeCosts
from lowrank_cnn.choose.shape_costs import COSTS, ShapeBudget, as_it_is, as_optimized, shape_network
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.run_folder import RunDirectory

SIZE = (1, 8, 8)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def budget(path: Path, batch: int | None = None, **asked: object) -> ShapeBudget:
    return ShapeBudget({"latency": 0.5, "by": "proximal", **asked}, RunDirectory(path), "cpu", batch)


def costs_of(plan: ShapeBudget, shapes=("kx1", "1xk", "kxk"), *, resume: bool = True) -> ShapeCosts:
    model = dense()
    return plan.costs(shape_network(model, learned_scheme(shapes), SIZE), model, SIZE, resume=resume)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The directory of a run that has begun."""
    plan = budget(tmp_path)
    plan.keep(costs_of(plan))
    (tmp_path / "recipe.json").write_text("{}")
    return tmp_path


def test_a_resumed_run_reads_the_times_that_were_measured(begun, monkeypatch):
    monkeypatch.setattr(shape_budget, "time_costs", lambda *_, **__: pytest.fail("measured again"))
    assert costs_of(budget(begun)).to_dict() == json.loads((begun / COSTS).read_text())["costs"]


def test_another_budget_or_mechanism_is_refused(begun):
    with pytest.raises(LowRankError, match=r"learns shapes with latency=0.5, not latency=0.4"):
        costs_of(budget(begun, latency=0.4))
    kept = (begun / COSTS).read_text()
    (begun / COSTS).write_text(kept.replace("proximal", "gates"))  # as an older version would write
    with pytest.raises(LowRankError, match=r"with by=gates, not by=proximal"):
        costs_of(budget(begun))


def test_the_costs_of_another_network_are_refused(begun):
    with pytest.raises(LowRankError, match="costs of another network"):
        costs_of(budget(begun), shapes=("kx1", "kxk"))


def test_what_was_left_by_a_run_that_never_began_is_measured_anew(begun, monkeypatch):
    (begun / "recipe.json").unlink()
    batches: list[int] = []
    measure = shape_budget.time_costs
    monkeypatch.setattr(
        shape_budget, "time_costs", lambda *given, **how: (batches.append(how["batch"]), measure(*given, **how))[1]
    )
    for resume in (True, False):
        costs_of(budget(begun, latency=0.4, batch=3), resume=resume)
    assert batches == [3, 3]


def test_a_directory_that_holds_a_run_keeps_its_costs(begun):
    before = (begun / COSTS).read_text()
    with pytest.raises(LowRankError, match="already holds a run"):
        costs_of(budget(begun), resume=False)
    assert (begun / COSTS).read_text() == before


@pytest.mark.parametrize("text", ["{", "[]", '{"asked": {}, "costs": {}}', '{"asked": {}, "costs": 3}'])
def test_a_damaged_file_is_named(begun, text):
    (begun / COSTS).write_text(text)
    with pytest.raises(LowRankError, match="holds no costs of shapes: remove it"):
        costs_of(budget(begun))


def test_the_result_is_timed_where_time_is_the_budget(tmp_path):
    share = budget(tmp_path).time_of(nn.Conv2d(1, 8, 1), dense(), SIZE)
    assert share is not None
    assert 0 < share < 1
    assert ShapeBudget({"macs": 0.5}, None, "cpu").time_of(dense(), dense(), SIZE) is None


@pytest.mark.parametrize(("device", "through"), [("cuda:0", as_optimized), ("cpu", as_it_is)])
def test_on_a_gpu_networks_are_timed_as_they_are_deployed(monkeypatch, device, through):
    used: list[Any] = []

    def timed(network: nn.Module, *_: Any, prepare: Any, **__: Any) -> float:
        used.append(prepare)
        return 0.5

    monkeypatch.setattr(shape_budget, "resolve_device", lambda _: device)
    monkeypatch.setattr(shape_budget, "time_share", timed)
    monkeypatch.setattr(ShapeBudget, "_placed", lambda _, model: model)
    assert ShapeBudget({"latency": 0.5}, None, device)._time_share(dense(), dense(), SIZE) == 0.5
    assert used == [through]


@torch.no_grad()
def test_an_optimised_network_is_timed_on_the_batch():
    network, image = dense().eval(), torch.randn(2, *SIZE)
    assert torch.allclose(as_optimized(network, image)(), network(image), atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_budget_of_time_is_kept_through_optimize():
    budget = ShapeBudget({"latency": 0.9}, None, "cuda", batch=8)
    costs = costs_of(budget)
    assert costs.rest >= 0
    assert all(cost > 0 for row in costs.filters.values() for cost in row)
    assert budget.time_of(dense(), dense(), SIZE) == pytest.approx(1, rel=0.5)


def test_the_last_choice_is_made_for_less_where_the_network_takes_longer(begun, monkeypatch):
    asked: list[float] = []
    times = iter([0.6, 0.52, 0.505])
    monkeypatch.setattr(ShapeBudget, "time_of", lambda *_: next(times))
    for _ in range(2):  # the second time as if the run had been killed before its next checkpoint
        budget(begun).choose_last(asked.append, dense(), blank=dense(), model=dense(), size=SIZE)
    assert asked == pytest.approx([0.5, 0.5 / 0.6 * 0.5, 0.5 / 0.6 * 0.5 * 0.5 / 0.52, asked[2]])
    assert costs_of(budget(begun)).to_dict() == json.loads((begun / COSTS).read_text())["costs"]


def test_the_fastest_choice_is_taken_where_none_is_within_the_budget(begun, monkeypatch):
    asked: list[float] = []
    times = iter([0.9, 0.7, 0.8, 0.75])
    monkeypatch.setattr(ShapeBudget, "time_of", lambda *_: next(times))
    budget(begun).choose_last(asked.append, dense(), blank=dense(), model=dense(), size=SIZE)
    assert len(asked) == 5
    assert asked[-1] == asked[1] == pytest.approx(0.4)
    assert json.loads((begun / COSTS).read_text())["last_share"] == asked[1]


def test_timing_draws_no_random_number(tmp_path):
    one, other = dense(), dense()
    state = torch.get_rng_state()
    budget(tmp_path).time_of(one, other, SIZE)
    assert torch.equal(state, torch.get_rng_state())
