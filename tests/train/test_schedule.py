"""Learning rates against numbers worked out by hand, and the levelling-off rule step by step."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from lowrank_cnn.train.optimizers import LevelOff, learning_rate
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.score import LossEvaluation


@pytest.mark.parametrize(
    ("schedule", "iteration", "share"),
    [
        ("constant", 50, 1),
        ("paper", 0, 1),
        ("paper", 20_000, 1 / 2),  # 1 / (1 + 0.1 * 0.0005 * 20000)
        ("paper", 1_000_000, 1 / 51),
        ("poly", 0, 1),
        ("poly", 75, 1 / 2),
        ("poly", 100, 0),
        ("poly", 101, 0),
        ("cosine", 0, 1),
        ("cosine", 50, 1 / 2),
        ("cosine", 25, (1 + math.sqrt(0.5)) / 2),
        ("cosine", 100, 0),
    ],
)
def test_the_rate_follows_its_schedule(schedule, iteration, share):
    recipe = Recipe(schedule=schedule, lr=0.1, weight_decay=5e-4, power=0.5, epochs=20)
    assert learning_rate(recipe, iteration, per_epoch=5) == pytest.approx(0.1 * share)


def test_warm_up_rises_linearly_and_the_cosine_starts_after_it():
    recipe = Recipe(lr=0.4, schedule="cosine", warmup=2.0, epochs=10)
    rates = [learning_rate(recipe, t, per_epoch=5) for t in range(50)]
    assert rates[:3] == pytest.approx([0.04, 0.08, 0.12])
    assert rates[9] == rates[10] == pytest.approx(0.4)
    assert rates[30] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_drops_divide_the_rate():
    recipe = Recipe(lr=0.1, schedule="paper", weight_decay=5e-4, epochs=1)
    assert learning_rate(recipe, 20_000, per_epoch=10, drops=2) == pytest.approx(0.0005)
    assert learning_rate(Recipe(lr=0.1), 7, per_epoch=10) == 0.1


def test_levelling_off_drops_then_stops_when_a_drop_does_not_help():
    rule = LevelOff(patience=2, levels=5)
    accuracies = [0.5, 0.6, 0.6, 0.6, 0.7, 0.7, 0.6, 0.7, 0.7]
    verdicts = [rule.update(accuracy, epoch) for epoch, accuracy in enumerate(accuracies, 1)]
    assert verdicts == ["go", "go", "go", "drop", "go", "go", "drop", "go", "stop"]
    assert rule.drops == [4, 7]


def test_levelling_off_stops_after_the_last_level():
    rule = LevelOff(patience=1, levels=1)
    assert [rule.update(a, e) for e, a in enumerate([0.1, 0.1, 0.2, 0.2], 1)] == ["go", "drop", "go", "stop"]


def test_a_gain_below_the_least_is_none():
    rule = LevelOff(patience=2, levels=1, min_delta=0.01)
    assert [rule.update(a, e) for e, a in enumerate([0.5, 0.505, 0.509], 1)] == ["go", "go", "drop"]
    assert rule.best == 0.5


def test_the_rule_goes_on_from_its_saved_state():
    accuracies = [0.5, 0.5, 0.6, 0.6, 0.6, 0.7, 0.7, 0.7, 0.7]
    whole = LevelOff(patience=2, levels=3)
    expected = [whole.update(a, e) for e, a in enumerate(accuracies, 1)]
    for cut in range(len(accuracies)):
        first, second = LevelOff(patience=2, levels=3), LevelOff(patience=2, levels=3)
        verdicts = [first.update(a, e) for e, a in enumerate(accuracies[:cut], 1)]
        second.restore(json.loads(json.dumps(first.state())))
        verdicts += [second.update(a, e) for e, a in enumerate(accuracies[cut:], cut + 1)]
        assert verdicts == expected


def test_a_loss_that_falls_has_not_levelled_off():
    rule = LevelOff(patience=2, levels=0)
    assert [rule.update(-loss, e) for e, loss in enumerate([5.0, 4.0, 3.0, 2.0], 1)] == ["go"] * 4


def test_a_loss_that_is_nan_comes_last():
    rule = LevelOff(patience=1, levels=0)
    ranks = [LossEvaluation(loss, 1).rank for loss in (float("nan"), 2.0, float("nan"))]
    assert [rule.update(rank, epoch) for epoch, rank in enumerate(ranks, 1)] == ["go", "go", "stop"]
    assert rule.best == -2.0
