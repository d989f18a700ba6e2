import math
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.models import list_models
from lowrank_cnn.paper.gaps import (
    FAILS,
    HOLDS,
    QUESTIONS,
    UNDECIDED,
    Scores,
    answers,
    judge,
    order,
    pooled_deviation,
    t95,
)
from lowrank_cnn.paper.published import published

VGG = [name for name in list_models() if name.startswith("vgg")]


def scores(**ours):
    """Published figures of some networks (dashes as underscores), and ours."""
    named = {name.replace("_", "-"): value for name, value in ours.items()}
    return [Scores(name, published()[name].top1, value, published()[name].macs) for name, value in named.items()]


def test_a_gap_comes_with_the_error_of_the_difference_of_two_means():
    found = list(answers(scores(vgg11_gmp=(0.60, 0.62), vgg11_gmp_lr=(0.605, 0.615))))
    (gap,) = found
    deviation = math.sqrt((stdev((0.60, 0.62)) ** 2 + stdev((0.605, 0.615)) ** 2) / 2)
    assert gap.question == "lr matches the dense network"
    assert gap.ours == pytest.approx(0.0)
    assert gap.error == pytest.approx(100 * deviation * math.sqrt(1 / 2 + 1 / 2))
    assert gap.published == pytest.approx(100 * (0.67608 - 0.685))
    assert gap.mac_ratio == pytest.approx(0.335, abs=0.001)


@pytest.mark.parametrize(
    ("expected", "gap", "verdict"),
    [
        ("above", 2.0, HOLDS),
        ("above", 0.5, UNDECIDED),
        ("above", -2.0, FAILS),
        ("below", -1.0, HOLDS),
        ("below", -2.0, UNDECIDED),
        ("below", -5.0, FAILS),
        ("below", 0.5, UNDECIDED),
        ("below", 2.0, FAILS),
        ("match", 0.5, HOLDS),
        ("match", -1.0, UNDECIDED),
        ("match", 5.0, HOLDS),
        ("match", -3.0, FAILS),
    ],
)
def test_a_verdict_needs_the_whole_interval(expected, gap, verdict):
    assert judge(expected, gap, 0.4, 10) == verdict


def test_single_seeds_decide_nothing():
    (gap,) = answers(scores(vgg11_gmp=(0.60,), vgg11_gmp_lr=(0.10,)))
    assert (gap.error, gap.verdict) == (None, UNDECIDED)


def test_a_network_with_one_seed_borrows_the_deviation_of_the_others():
    found = answers(scores(vgg11_gmp=(0.60, 0.61), vgg11_gmp_lr=(0.30,), vgg11_gmp_sf=(0.5, 0.51)))
    by_network = {gap.network: gap for gap in found}
    assert by_network["vgg11-gmp-lr"].verdict == FAILS
    assert by_network["vgg11-gmp-lr"].error > by_network["vgg11-gmp-sf"].error


def test_the_paper_answers_its_own_questions_as_it_says():
    """Every expectation agrees in sign with the published table; matches lie within a point or nearly so."""
    for question in QUESTIONS:
        gap = 100 * (published()[question.network].top1 - published()[question.base].top1)
        low, high = {"above": (0, 9), "below": (-2, 0), "match": (-1.05, 1.05)}[question.expected]
        assert low < gap < high, question


def test_the_published_order_agrees_with_itself():
    found = order(scores(**{name.replace("-", "_"): (published()[name].top1,) for name in VGG}))
    assert (found.n, found.pairs, found.alike) == (8, 28, 28)
    assert found.rank_correlation == pytest.approx(1)
    assert found.linear_correlation == pytest.approx(1)


def test_a_reversed_order_disagrees():
    found = order(scores(**{name.replace("-", "_"): (1 - published()[name].top1,) for name in VGG}))
    assert found.alike == 0
    assert found.rank_correlation == pytest.approx(-1)


def test_an_order_of_equals_says_nothing():
    found = order(scores(vgg11=(0.5,), vgg11_gmp=(0.5,), vgg11_gmp_sf=(0.5,)))
    assert (found.alike, found.rank_correlation) == (0, None)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), max_size=5))
def test_pooled_deviation_lies_between_those_of_the_networks(runs):
    deviation, freedom = pooled_deviation(runs)
    alone = [stdev(values) for values in runs if len(values) > 1]
    assert freedom == sum(len(values) - 1 for values in runs)
    if deviation is None:
        assert not alone
    else:
        assert min(alone) - 1e-9 <= deviation <= max(alone) + 1e-9


def test_students_t_falls_to_the_normal_distributions():
    values = [t95(freedom) for freedom in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert t95(30) == pytest.approx(2.042, abs=0.005)
    assert values[-1] == pytest.approx(1.972, abs=0.005)
