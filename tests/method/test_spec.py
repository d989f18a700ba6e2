import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.spec import Composite, FilterGroup


def test_a_composites_arithmetic():
    composite = Composite.of([(3, 1, 8), FilterGroup(1, 5, 4)])
    assert composite.filters == 12
    assert composite.kernel == (3, 5)
    assert composite.fan_out == 3 * 8 + 5 * 4
    assert composite.weights(10) == 10 * 44


@pytest.mark.parametrize("group", [(0, 3, 4), (3, 3, -1), (3, 3), (3, 3, 1.5)])
def test_bad_groups_are_refused(group: tuple):
    with pytest.raises(LowRankError, match="filter group"):
        Composite.of([group])
