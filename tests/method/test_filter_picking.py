"""Shapes are picked in multiples, in runs where the order is fixed, and at the least loss."""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.method.filter_picking import pick_each, pick_segments


def scores_of(seed: int, filters: int, shapes: int) -> torch.Tensor:
    return torch.randn(filters, shapes, generator=torch.Generator().manual_seed(seed)).double()


@settings(max_examples=30)
@given(st.integers(0, 999), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.booleans())
def test_counts_are_multiples_and_something_stays(seed, unit, shapes, removable):
    scores = scores_of(seed, 16, shapes) - 2
    choice, kept = pick_each(scores, unit, removable=removable)
    counts = torch.bincount(choice[kept], minlength=shapes)
    assert (counts % unit == 0).all()
    assert kept.any()
    assert removable or kept.all()


def test_each_filter_takes_its_best_shape():
    scores = scores_of(0, 12, 3)
    choice, kept = pick_each(scores, 1)
    assert torch.equal(choice, scores.argmax(1))
    choice, kept = pick_each(scores, 1, removable=True)
    assert torch.equal(kept, scores.max(1).values > 0)


@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 4))
def test_segments_are_the_best_sorted_choice(seed, shapes):
    scores = scores_of(seed, 6, shapes)
    chosen = pick_segments(scores, 1)
    assert (chosen.diff() >= 0).all()
    every = (sum(row[s] for row, s in zip(scores.tolist(), way, strict=True))
             for way in combinations_with_replacement(range(shapes), 6))  # fmt: skip
    assert abs(float(scores.gather(1, chosen[:, None]).sum()) - max(every)) < 1e-9


def test_segments_come_in_units():
    assert pick_segments(scores_of(1, 12, 3), 4).view(3, 4).unique(dim=1).shape == (3, 1)
