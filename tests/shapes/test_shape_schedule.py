"""Shapes are chosen after each epoch of the first part of a run, within a budget that falls."""

from __future__ import annotations

from lowrank_cnn.choose.learn_shapes import ShapeSchedule


def test_the_budget_falls_to_its_target():
    schedule = ShapeSchedule(None, 0.4, 10)  # type: ignore[arg-type]
    shares = [schedule.share_after(epoch) for epoch in range(11)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[4], schedule.changes_until) == (1.0, 0.4, 6)
