from __future__ import annotations

from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.core.numbers import (
    deviation,
    holm,
    mean,
    mean_interval,
    pearson,
    pooled_deviation,
    student_p,
    student_t,
)


def test_holms_correction_is_that_of_the_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("freedom", "right"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042)])
def test_students_t_is_that_of_the_tables(freedom: int, right: float):
    assert student_t(0.975, freedom) == pytest.approx(right, abs=0.0005)


def test_an_interval_over_seeds_holds_the_mean():
    centre, low, high = mean_interval([1.0, 2.0, 3.0])
    assert (centre, high - centre) == (2.0, pytest.approx(4.303 / 3**0.5, abs=1e-3))
    assert low < centre
    assert mean_interval([5.0]) == (5.0, 5.0, 5.0)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), max_size=5))
def test_pooled_deviation_lies_between_those_of_the_networks(runs):
    pooled, freedom = pooled_deviation(runs)
    alone = [stdev(values) for values in runs if len(values) > 1]
    assert freedom == sum(len(values) - 1 for values in runs)
    if pooled is None:
        assert not alone
    else:
        assert min(alone) - 1e-9 <= pooled <= max(alone) + 1e-9


def test_students_t_falls_to_the_normal_distributions():
    values = [student_t(0.975, freedom) for freedom in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert student_p(values[4], 5) == pytest.approx(0.975)


def test_the_mean_and_the_deviation_of_too_few_values_are_unknown():
    assert mean([]) is None
    assert mean([1.0, 2.0]) == 1.5
    assert deviation([1.0]) is None
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)


def test_no_correlation_where_there_is_none():
    assert pearson([1], [1]) is None
    assert pearson([1, 1, 1], [1, 2, 3]) is None
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
