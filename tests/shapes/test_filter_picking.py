"""Shapes of one layer are picked by the views that they keep, in units, at the least loss."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.choose.shape_choice import alike, pick_units, share_out, slope, worth


def random_kept(seed: int, units: int, shapes: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(units, shapes, 5, generator=draw).double() * (torch.rand(shapes, 5, generator=draw) > 0.4)


@settings(max_examples=30)
@given(st.integers(0, 999), st.floats(0, 0.3), st.floats(0, 0.2))
def test_no_change_of_one_unit_would_be_better(seed, price, split):
    kept = random_kept(seed, 5, 3) + 1e-3
    whole, prices, splits = (
        kept.amax(1).sum(0),
        price * torch.arange(3.0).double(),
        torch.full((3,), split).double(),
    )

    def value(choice: tuple[int, ...]) -> float:
        total = kept[torch.arange(5), list(choice)].sum(0)
        return float(worth(total, whole).log() - prices[list(choice)].sum() - split * (len(set(choice)) - 1))

    chosen, found = pick_units(kept, whole, prices, splits)
    assert found == pytest.approx(value(tuple(chosen.tolist())))
    for unit, shape in product(range(5), range(3)):
        other = chosen.tolist()
        other[unit] = shape
        assert value(tuple(other)) <= found + 1e-8


def test_filters_that_are_all_alike_share_two_shapes_that_are_nearly_as_good():
    upright, lying = [1.0, 1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.95, 0.95, 0.5]
    kept = torch.tensor([upright, lying]).double().repeat(8, 1, 1)
    assert pick_units(kept, kept.amax(1).sum(0), torch.zeros(2).double())[0].bincount().tolist() == [4, 4]


def test_a_direction_in_which_nothing_is_seen_gets_no_filters():
    upright, lying = [1.0, 1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.1, 0.1, 0.5]
    kept = torch.tensor([upright, lying]).double().repeat(8, 1, 1)
    assert pick_units(kept, kept.amax(1).sum(0), torch.zeros(2).double())[0].tolist() == [0] * 8


def test_a_shape_that_costs_too_much_is_never_taken():
    kept = random_kept(3, 6, 3) + 0.1
    prices = torch.tensor([0.0, torch.inf, 0.0]).double()
    assert 1 not in pick_units(kept, kept.amax(1).sum(0), prices)[0].tolist()


def test_worth_grows_as_its_slope_says():
    share, step = torch.tensor([0.1, 0.5, 0.9]).double(), 1e-6
    whole = torch.ones(1).double()
    grown = torch.stack([worth((one + step)[None], whole) - worth(one[None], whole) for one in share])
    torch.testing.assert_close(grown / grown[0], slope(share) / slope(share[:1]), rtol=1e-4, atol=0)
    assert float(worth(whole, whole)) == pytest.approx(1)


@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 4))
def test_filters_are_shared_out_as_wanted(seed, shapes):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, shapes, generator=draw).double()
    wanted = torch.randint(0, shapes, (12,), generator=draw).bincount(minlength=shapes)
    assert torch.equal(share_out(scores, wanted).bincount(minlength=shapes), wanted)
    own = scores.argmax(1)
    assert torch.equal(share_out(scores, own.bincount(minlength=shapes)), own)


@settings(max_examples=30)
@given(st.integers(0, 999), st.booleans())
def test_filters_move_one_by_one_at_the_least_loss(seed, rounded):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(12, 4, generator=draw)
    scores = (3 * scores).round() if rounded else scores  # many losses are equal then, and the first counts
    wanted = torch.randint(4, (12,), generator=draw).bincount(minlength=4)
    choice = scores.argmax(1)
    while bool(((spare := choice.bincount(minlength=4) - wanted) > 0).any()):
        moves = [(f, s) for f, s in product(range(12), range(4)) if spare[choice[f]] > 0 > spare[s]]
        place, shape = min(moves, key=lambda move: float(scores[move[0], choice[move[0]]] - scores[move]))
        choice[place] = shape
    assert torch.equal(share_out(scores, wanted), choice)


def test_filters_of_one_best_shape_are_neighbours():
    scores = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    shapes = scores[alike(scores)].argmax(1)
    assert (shapes.diff() >= 0).all()
