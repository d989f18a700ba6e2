from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.report.records import LONGEST_TEXT, first, items, mapping, number, share, sizes, text, whole

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(JSON)
def test_any_value_is_read_as_what_is_asked_for_or_not_at_all(value: object):
    assert isinstance(mapping(value), dict)
    assert isinstance(items(value), list)
    assert (found := text(value)) is None or 0 < len(found) <= LONGEST_TEXT
    assert (found := number(value)) is None or math.isfinite(found)
    assert (found := whole(value)) is None or found >= 0
    assert (found := share(value)) is None or 0 <= found <= 1
    assert all(size > 0 for size in sizes(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1e19, True, "5", None])
def test_what_is_no_measurement_is_no_number(value: object):
    assert number(value) is None


def test_a_size_with_a_hole_is_no_size():
    assert sizes([3, 224, 224]) == (3, 224, 224)
    assert sizes([3, None, 224]) == sizes("3x224") == ()


def test_the_first_spelling_that_has_a_value_is_taken():
    assert first({"a": None, "b": 0, "c": 1}, "a", "b", "c") == 0
    assert first({}, "a") is None
