"""Quotients and multiples, rounded up."""

import pytest

from lowrank_cnn.core.numbers import ceil_div, round_up


@pytest.mark.parametrize(("value", "step"), [(0, 3), (1, 3), (3, 3), (4, 3), (2**60 + 1, 2)])
def test_the_least_that_covers(value, step):
    assert (ceil_div(value, step) - 1) * step < value <= ceil_div(value, step) * step == round_up(value, step)
