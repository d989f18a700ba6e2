"""Reports of conversions and plans print as tables; a plan says which blocks run in another way."""

import json

from torch import nn

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.notes import Decision, NetworkPlan, notes
from lowrank_cnn.method.convert import convert

ROWS = (
    Decision("conv1", "relu", 1000, {"as given": 2.0, "merged": 1.0}, "merged"),
    Decision("conv2", "", 2000, {"as given": 1.0}, "as given", {"merged": "another result"}),
)


def test_the_report_prints_as_a_table():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    assert str(notes(convert(net, "lr-join")).conversion).splitlines() == [
        "layer  filters  now                     weights  now",
        "0      3x3,8    3x1,4 + 1x3,4 -> 1x1,8      224  144",
        "",
        "left  layer   why",
        "1     Conv2d  its kernel is 1x1",
    ]


def plan(**options: object) -> NetworkPlan:
    made = {"used": True, **options}
    return NetworkPlan((1, 3, 8, 8), "cpu", ROWS, Sample(3, 3, 3, 3), Sample(2, 2, 2, 3), **made)


def test_it_prints_times_choices_and_reasons():
    text = str(plan())
    assert "conv1" in text
    assert "conv2, merged: another result" in text
    assert "3.000 ms before, 2.000 after; the plan is used" in text
    assert "as given" in str(plan(used=False)).splitlines()[-1]
    assert str(plan(reason="no graph")) == "not planned: no graph"
    assert json.dumps(plan().to_dict())


def test_ways_are_those_of_a_plan_that_is_used():
    assert plan().ways == {"conv1": "merged"}
    assert plan(used=False).ways == {}


def test_a_choice_is_taken_back_with_a_reason():
    back = ROWS[0].refused("it fails")
    assert (back.choice, back.failed) == ("as given", {"merged": "it fails"})
