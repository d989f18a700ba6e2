"""Filters are bought where they keep most of the product of energies, and never more than can be paid."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lowrank_cnn.method.ranks import WHOLE, Curve, Step, by_macs, curves_of, estimated
from lowrank_cnn.method.scheme import parse_scheme
from lowrank_cnn.system.errors import LowRankError


@st.composite
def curves(draw: st.DrawFn) -> dict[str, Curve]:
    def curve() -> Curve:
        prices = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
        shares = sorted(draw(st.lists(st.floats(0.05, 0.95), min_size=len(prices), max_size=len(prices))))
        macs = [sum(prices[: i + 1]) for i in range(len(prices))]
        steps = [Step(i + 1, cost, share) for i, (cost, share) in enumerate(zip(macs, shares, strict=True))]
        return [*steps, Step(None, macs[-1] + draw(st.integers(1, 30)), 1.0)]

    return {name: curve() for name in "abc"[: draw(st.integers(1, 3))]}


def kept(found: dict[str, Curve], chosen: dict[str, int | None]) -> float:
    return math.prod(step.energy for name, curve in found.items() for step in curve if step.m == chosen[name])


@settings(max_examples=200)
@given(curves(), st.integers(5, 200))
def test_a_budget_is_kept_and_no_step_that_helps_is_left_unpaid(found: dict[str, Curve], budget: int):
    assume(sum(curve[0].macs for curve in found.values()) <= budget)
    chosen = by_macs(found, budget)
    spent = estimated(found, chosen)
    assert spent <= budget
    for name, curve in found.items():
        here = next(step for step in curve if step.m == chosen[name])
        more = here.energy * (1 + 1e-12)  # a gain that its logarithm shows
        better = [step for step in curve if step.energy > more and step.macs > here.macs]
        assert all(spent - here.macs + step.macs > budget for step in better)


@settings(max_examples=100)
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(3, 15))
def test_where_gains_shrink_in_equal_steps_nothing_keeps_more(gains: list[list[float]], budget: int):
    found = {}
    for name, own in zip("abc", gains, strict=False):
        logs = [-sum(sorted(own, reverse=True)[index:]) for index in range(len(own) + 1)]
        steps = [Step(index + 1, index + 1, math.exp(value)) for index, value in enumerate(logs)]
        found[name] = [*steps[:-1], Step(None, len(logs), 1.0)]
    choices = (
        dict(zip(found, steps, strict=True))
        for steps in product(*([step.m for step in c] for c in found.values()))
    )
    best = max(kept(found, choice) for choice in choices if estimated(found, choice) <= budget)
    assert kept(found, by_macs(found, budget)) == pytest.approx(best)


def test_a_layer_is_not_starved_for_one_that_is_whole_already():
    cheap = [Step(1, 1, 0.9), Step(None, 10, 1.0)]
    dear = [Step(m, 10 * m, m / 10) for m in range(1, 10)] + [Step(None, 100, 1.0)]
    assert by_macs({"cheap": cheap, "dear": dear}, 39) == {"cheap": 1, "dear": 3}


def test_a_step_without_gain_does_not_hide_the_one_behind_it():
    flat = [Step(1, 10, 0.3), Step(2, 20, 0.3), Step(None, 30, 1.0)]
    assert by_macs({"flat": flat}, 30) == {"flat": None}
    assert by_macs({"flat": flat}, 29) == {"flat": 1}


def test_less_than_the_fewest_filters_cost_is_refused():
    with pytest.raises(LowRankError, match="below what the fewest filters cost"):
        by_macs({"a": [Step(1, 10, 0.5)]}, 9)


@pytest.mark.parametrize("scheme", ["separable", "lr-join", "mixture(kx1=2, 1xk=1, join)"])
def test_filters_come_whole_where_a_layer_is_wide_and_singly_where_it_is_narrow(scheme: str):
    chosen = parse_scheme(scheme)
    for channels, whole in ((256, True), (8, False)):
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        found, _ = curves_of(nn.Sequential(conv), {"0": conv}, chosen, (channels, 8, 8))
        sizes = [step.m for step in found["0"] if step.m]
        assert sizes[0] == 1  # however little there is to spend
        taken = [replace(chosen, m=m).stages((3, 3), channels)[0] for m in sizes if m >= 3 * WHOLE or not whole]
        assert all(group.filters % WHOLE == 0 for basis in taken for group in basis.groups) is whole
        assert [step.macs for step in found["0"]] == sorted({step.macs for step in found["0"]})
