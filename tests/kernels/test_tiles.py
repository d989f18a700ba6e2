import pytest

from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.kernels.problem import shares


@pytest.mark.parametrize(("tiles", "boxes"), [(36, 12544), (8, 12544), (144, 3136), (18, 3136), (96, 3136)])
def test_shares_leave_few_programs_idle(tiles, boxes):
    programs = 264
    count = shares(tiles, boxes, programs)
    rounds = ceil_div(tiles * count, programs)
    assert rounds * ceil_div(boxes, count) < 1.06 * tiles * boxes / programs


def test_there_are_no_more_shares_than_boxes():
    assert shares(1, 3, 264) <= 3
    assert shares(1000, 1, 264) == 1


def test_little_work_is_not_cut_at_all():
    assert shares(264, 100, 264) == 1
