"""Shapes cost the time that they take, alone and together in one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.choose import shape_costs as shape_times
from lowrank_cnn.choose.shape_choice import ShapeChooser
from lowrank_cnn.choose.shape_costs import corrected, mac_costs, shape_network, time_costs
from lowrank_cnn.core import clock
from lowrank_cnn.core.clock import Sample
from lowrank_cnn.method.channels import free_routes
from lowrank_cnn.method.schemes import parse_scheme

SIZE = (3, 8, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def test_times_are_measured_for_every_shape():
    dense = net()
    costs = time_costs(shape_network(dense, parse_scheme("learned(kx1, kxk)"), SIZE), dense, SIZE)
    assert costs.kind == "latency"
    assert costs.filters.keys() == {"0", "3"}
    assert all(cost > 0 for row in costs.filters.values() for cost in row)
    assert costs.dense >= costs.rest
    assert costs.splits.keys() == costs.filters.keys()


def test_several_shapes_cost_what_a_conv_of_all_of_them_takes(monkeypatch):
    dense = net()
    times = {(3, 1): 1.0, (1, 3): 2.0, (3, 3): 4.0, None: 5.0, "": 20.0}
    monkeypatch.setattr(
        "lowrank_cnn.choose.shape_costs.measure",
        lambda runs, **_: {name: Sample(times[name], 0, 0, 3) for name, run in runs.items() if run() is not None},
    )
    costs = time_costs(shape_network(dense, parse_scheme("learned(kx1, 1xk)"), SIZE), dense, SIZE)
    assert costs.filters["0"] == (1 / 8, 2 / 8)
    assert costs.splits["0"] == 5 - 1.5  # half of the filters have either shape
    assert costs.rest == 20 - 2 * 4


def test_other_processes_do_not_change_the_shares(monkeypatch):
    """A long run is interrupted in most turns, for longer than a short one takes."""
    turns = iter(range(1000))
    small, large = net(), net()
    large.slow = True

    def busy(run) -> float:
        taken = run()
        return taken + (4 if taken > 1 and next(turns) % 5 else 0)

    monkeypatch.setattr(shape_times, "measure", clock.measure)
    monkeypatch.setattr(clock, "_clock", busy)
    timed = shape_times.time_share(
        small, large, SIZE, prepare=lambda n, _: lambda: 3.0 if hasattr(n, "slow") else 1.0
    )
    assert timed == pytest.approx(1 / 3)


@pytest.mark.parametrize("factor", [3.0, 0.5])
def test_the_cost_of_several_shapes_is_corrected_by_whole_networks(monkeypatch, factor):
    dense = net()
    shaped = shape_network(dense, parse_scheme("learned(kx1, 1xk, kxk, multiple=1)"), SIZE)
    macs = mac_costs(shaped, dense, SIZE)
    guess = replace(macs, kind="latency", splits=dict.fromkeys(macs.filters, 0.01 * macs.dense))
    true = replace(guess, splits={name: factor * cost for name, cost in guess.splits.items()})
    tried: list[int] = []

    def true_time(settled: nn.Module, *_, **__) -> float:
        """The time of a network if each shape beyond the first costs `factor` times what was guessed."""
        composites = [m.composite for m in settled.modules() if isinstance(m, lr.CompositeConv2d)]
        tried.append(sum(len(composite.groups) - 1 for composite in composites))
        return lr.count(settled, SIZE).macs / macs.dense + factor * 0.01 * tried[-1]

    monkeypatch.setattr(shape_times, "time_share", true_time)
    found = corrected(guess, shaped, dense, SIZE, 0.6)
    assert found.splits == pytest.approx(true.splits, rel=1e-3)
    assert any(tried)
    assert (found.filters, found.rest, found.dense) == (macs.filters, macs.rest, macs.dense)
    assert ShapeChooser(free_routes(shaped, SIZE), found).choose(shaped, 0.6) <= 0.6
