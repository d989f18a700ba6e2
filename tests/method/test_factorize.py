"""Factors of a weight, and the budget that decides how many of them each layer gets."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.kernels.reference import compose
from lowrank_cnn.method.budget import Curve, Step, allocate, estimated
from lowrank_cnn.method.factorize import (
    centred,
    crossed_factors,
    grouped_weight,
    kept_energy,
    separable_factors,
)
from lowrank_cnn.method.spec import Composite


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_no_other_pair_of_the_same_rank_is_nearer():
    dense = weight(6, 4, 3, 3)
    best = separable_factors(dense, 3, axes=(1,))
    kept = kept_energy(dense, compose(*best))
    first, second = (factor.clone().requires_grad_() for factor in best)
    loss = (compose(first, second) - dense).square().sum()
    for gradient in torch.autograd.grad(loss, (first, second)):
        assert gradient.abs().max() < 1e-10
    shaken = [factor + 0.1 * torch.randn_like(factor) for factor in best]
    assert kept_energy(dense, compose(*shaken)) < kept


def test_the_fit_is_stationary():
    dense, basis = weight(12, 6, 3, 3), Composite.of([(3, 1, 4), (1, 3, 3)])
    filters, join = crossed_factors(dense, basis, sweeps=200)
    parts = [part.requires_grad_() for part in (*filters, join)]
    loss = (grouped_weight(parts[:-1], parts[-1], 1) - dense).square().sum()
    for gradient in torch.autograd.grad(loss, parts):
        assert gradient.abs().max() < 0.05 * loss.item() ** 0.5


@pytest.mark.parametrize("kernel", [(5, 5), (3, 1), (1, 1), (2, 4), (3, 3)])
def test_centring_keeps_the_centre_tap(kernel: tuple[int, int]):
    dense = weight(2, 2, 3, 3)
    moved = centred(dense, kernel)
    assert moved.shape[2:] == kernel
    centre = [(size - 1) // 2 for size in kernel]
    assert torch.equal(moved[:, :, centre[0], centre[1]], dense[:, :, 1, 1])


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
    return math.prod(step.energy for name, curve in found.items() for step in curve if step.scheme == chosen[name])


@settings(max_examples=80)
@given(curves(), st.integers(5, 200))
def test_a_budget_is_kept_and_no_step_that_helps_is_left_unpaid(found: dict[str, Curve], budget: int):
    assume(sum(curve[0].cost for curve in found.values()) <= budget)
    chosen = allocate(found, budget)
    spent = estimated(found, chosen)
    assert spent <= budget
    for name, curve in found.items():
        here = next(step for step in curve if step.scheme == chosen[name])
        more = here.energy * (1 + 1e-12)  # a gain that its logarithm shows
        better = [step for step in curve if step.energy > more and step.cost > here.cost]
        assert all(spent - here.cost + step.cost > budget for step in better)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(3, 15))
def test_where_gains_shrink_in_equal_steps_nothing_keeps_more(gains: list[list[float]], budget: int):
    found = {}
    for name, own in zip("abc", gains, strict=False):
        logs = [-sum(sorted(own, reverse=True)[index:]) for index in range(len(own) + 1)]
        steps = [Step(index + 1, index + 1, math.exp(value)) for index, value in enumerate(logs)]
        found[name] = [*steps[:-1], Step(None, len(logs), 1.0)]
    choices = (
        dict(zip(found, steps, strict=True))
        for steps in product(*([step.scheme for step in c] for c in found.values()))
    )
    best = max(kept(found, choice) for choice in choices if estimated(found, choice) <= budget)
    assert kept(found, allocate(found, budget)) == pytest.approx(best)


def test_less_than_the_fewest_filters_cost_is_refused():
    with pytest.raises(LowRankError, match="below what the fewest filters cost"):
        allocate({"a": [Step(1, 10, 0.5)]}, 9)
