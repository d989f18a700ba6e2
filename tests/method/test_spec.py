import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.spec import Composite, FilterGroup


def test_a_composites_arithmetic():
    composite = Composite.of([(3, 1, 8), FilterGroup(1, 5, 4)])
    assert composite.filters == 12
    assert composite.kernel == (3, 5)
    assert composite.fan_out == 3 * 8 + 5 * 4
    assert composite.weights(10) == 10 * 44


def test_filters_of_one_to_three_sides_and_depthwise_ones():
    assert [FilterGroup(*sizes).taps for sizes in ((5, 8), (3, 1, 8), (3, 3, 3, 8))] == [5, 3, 27]
    assert FilterGroup(7, 7, 96, depthwise=True).weights(96) == 49 * 96
    for group in (FilterGroup(3, 8), FilterGroup(3, 3, 8, depthwise=True)):
        with pytest.raises(LowRankError, match="2-D filters that are as deep as its input"):
            CompositeConv2d(8, [group])


@pytest.mark.parametrize("group", [(0, 3, 4), (3, 3, -1), (3,), (3, 3, 3, 3, 8), (3, 3, 1.5)])
def test_bad_groups_are_refused(group: tuple):
    with pytest.raises(LowRankError, match="filter group"):
        Composite.of([group])
