import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowrank_cnn.paper.published import rows
from lowrank_cnn.report.records import Records
from lowrank_cnn.report.results import gather
from lowrank_cnn.report.trade import (
    DENSE,
    LEAST_SPAN,
    LOW_RANK,
    least_span,
    pareto_front,
    published_point,
    trade_chart,
    trade_charts,
    trade_points,
    trade_spec,
)


def charts_of(records: Records, **wanted: str) -> list[dict]:
    found = trade_charts(trade_points(gather(records)))
    return [chart for chart in found if all(chart[key] == value for key, value in wanted.items())]


def test_every_cost_of_every_data_set_has_a_chart(records: Records):
    cifar = {c["axis"]: c for c in charts_of(records, data="CIFAR-10", metric="top1")}
    assert list(cifar) == ["GPU", "CPU", "macs", "params"]
    kinds = [point["kind"] for point in cifar["macs"]["points"]]
    assert (kinds.count(DENSE), kinds.count(LOW_RANK), len(kinds)) == (1, 2, 6)
    assert {c["data"] for c in charts_of(records)} == {"CIFAR-10", "tiny-imagenet-100", "ILSVRC", "Places"}
    assert charts_of(records)[0]["data"] == "CIFAR-10"  # what was trained here comes first


def test_recipes_are_never_mixed_in_one_chart(records: Records):
    others = [replace(run, recipe="another", top1=0.1) for run in records.runs if run.network.name == "nin"]
    both = Records([*records.runs, *others])
    by_recipe = {c["recipe"]: c["points"] for c in charts_of(both, data="CIFAR-10", metric="top1", axis="macs")}
    assert list(by_recipe) == ["nin-paper", "another"]
    assert [p["y"] for p in by_recipe["another"] if p["kind"] == DENSE] == [pytest.approx(0.1)]


def test_a_front_joins_points_of_one_protocol_only(records: Records):
    (chart,) = charts_of(records, data="CIFAR-10", metric="top1", axis="macs")
    ours = {(p["x"], p["y"]) for p in chart["points"] if p["kind"] in (DENSE, LOW_RANK)}
    for corner in chart["fronts"]:
        assert ((corner["x"], corner["y"]) in ours) == (corner["front"] == "nin-paper")
    assert {corner["front"] for corner in chart["fronts"]} == {"nin-paper", "published"}


def test_arrows_lead_from_the_dense_network_to_each_low_rank_one(records: Records):
    (chart,) = charts_of(records, data="CIFAR-10", metric="top1", axis="macs")
    (dense,) = (p for p in chart["points"] if p["kind"] == DENSE)
    assert {(a["x"], a["y"]) for a in chart["arrows"]} == {(dense["x"], dense["y"])}
    low_rank = {(p["x"], p["y"]) for p in chart["points"] if p["kind"] == LOW_RANK}
    assert {(a["x2"], a["y2"]) for a in chart["arrows"]} == low_rank


def test_a_front_never_goes_back(records: Records):
    """Costs that are shown alike may differ: the front is drawn by what they are."""
    alike = [
        replace(run, top1=0.9, params=118_900 if "c3" in run.network.name else 119_400) for run in records.runs
    ]
    for chart in charts_of(Records(alike)):
        for front in {corner["front"] for corner in chart["fronts"]}:
            costs = [corner["x"] for corner in chart["fronts"] if corner["front"] == front]
            assert costs == sorted(costs)


def test_points_have_the_interval_of_their_seeds(records: Records):
    (chart,) = charts_of(records, data="CIFAR-10", metric="top1", axis="macs")
    for point in chart["points"]:
        height = point["high"] - point["low"]
        assert (0 < height < 0.02) if point["kind"] in (DENSE, LOW_RANK) else height == 0


def test_several_crops_cost_several_times_as_much():
    points = {row.network: published_point(row) for row in rows() if row.crops > 1}
    assert points["googlenet-10-crop"].values["macs"] == 15910566800
    chart = trade_chart(list(points.values()), "macs", "top5", error=True)
    assert max(mark["x"] for mark in chart["points"]) == 144 * 1591056680


@pytest.mark.parametrize(
    ("measured", "span"),
    [
        ([], LEAST_SPAN),
        ([(0.999, 1000), (1.0, 1000)], LEAST_SPAN),
        ([(0.9, None)], LEAST_SPAN),
        ([(0.98, 1000), (0.981, 1000)], 6 * math.sqrt(0.98 * 0.02 / 1000)),
        ([(0.5, 4)], 1.0),
    ],
)
def test_an_axis_of_accuracies_is_as_wide_as_chance(measured: list, span: float):
    assert least_span(measured) == pytest.approx(span)


def test_an_axis_spans_two_points_and_stays_within_shares():
    points = [published_point(row) for row in rows() if row.table == "nin-cifar10"]
    low, high = trade_chart(points, "macs", "top1", error=True)["domain"]
    assert high - low >= LEAST_SPAN - 1e-12
    certain = [replace(point, values={**point.values, "top1": 1.0}) for point in points]
    low, high = trade_chart(certain, "macs", "top1")["domain"]
    assert (high, low) == (1.0, pytest.approx(1 - LEAST_SPAN))


def test_the_specification_holds_the_data_of_its_chart(records: Records):
    (chart,) = charts_of(records, data="CIFAR-10", metric="top1", axis="GPU")
    spec = trade_spec(chart)
    assert spec["datasets"]["points"] == chart["points"]
    assert spec["encoding"]["x"]["title"] == "Milliseconds per image on a GPU"
    assert spec["encoding"]["x"]["axis"]["format"] == "~r"  # 0.004 and not 4m, 110 and not 1.1e+2
    assert not re.search(r"'{\w+}'", str(spec))
    empty = trade_spec({**chart, "arrows": [], "fronts": []})
    assert [layer["name"] for layer in empty["layer"]] == ["intervals", "points", "labels"]


SMALL = st.integers(0, 6).map(float)


def dominated(point: tuple[float, float], by: tuple[float, float]) -> bool:
    return by != point and by[0] <= point[0] and by[1] >= point[1]


@given(st.lists(st.tuples(SMALL, SMALL), max_size=12))
def test_the_front_is_what_nothing_dominates(points: list[tuple[float, float]]):
    expected = {i for i, p in enumerate(points) if not any(dominated(p, q) for q in points)}
    front = pareto_front(points)
    assert set(front) == expected
    assert len(front) == len(expected)
    assert [points[i] for i in front] == sorted(points[i] for i in front)
