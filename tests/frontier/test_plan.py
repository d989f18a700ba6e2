from __future__ import annotations

import pytest

from lowrank_cnn.choose.candidates import FrontierPlan
from lowrank_cnn.core.errors import LowRankError


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"match": ("size",)}, "macs or time"),
        ({"seeds": -1}, "0 or more"),
        ({"rates": (0.0,)}, "learning rate"),
        *(
            ({"budget": seconds}, "budget, in seconds, must be a number above 0")
            for seconds in (-1.0, 0.0, float("nan"))
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict, sentence: str):
    with pytest.raises(LowRankError, match=sentence):
        FrontierPlan(**wrong)


def test_without_a_clock_nothing_is_matched_by_time():
    plan = FrontierPlan(batch=0, widen=("time", "macs"))
    assert plan.match == plan.widen == ("macs",)


def test_a_teacher_that_is_no_design_is_refused():
    assert FrontierPlan(teacher="dense@1.5").teacher == "dense@1.5"
    with pytest.raises(LowRankError, match="width is a number"):
        FrontierPlan(teacher="dense@wide")
