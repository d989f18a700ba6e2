import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lowrank_cnn.report.charts import (
    LEAST_SPAN,
    curves,
    layer_charts,
    least_span,
    pearson,
    points_of,
    scatters,
)
from lowrank_cnn.report.entries import gather
from lowrank_cnn.report.reading import read_record
from lowrank_cnn.report.records import Built, LayerTime, Records, Run, Timing
from lowrank_cnn.report.sections import summary_table


def test_every_cost_of_every_data_set_has_a_chart(records: Records):
    charts = scatters(points_of(gather(records)))
    cifar = [c for c in charts if c["data"] == "CIFAR-10" and c["metric"] == "top1"]
    assert [c["axis"] for c in cifar] == ["macs", "params", "CPU", "GPU"]
    sources = [point["source"] for point in cifar[0]["points"]]
    assert (sources.count("ours"), sources.count("published")) == (3, 3)
    assert [point["source"] for point in cifar[2]["points"]] == ["ours"] * 3
    assert {c["data"] for c in charts} == {"CIFAR-10", "tiny-imagenet-100", "ILSVRC", "Places"}


def test_each_recipe_has_charts_beside_all_of_them(records: Records):
    runs = [replace(run, recipe="another", top1=0.1) for run in records.runs if run.built.name == "nin"]
    charts = [c for c in scatters(points_of(gather(Records([*records.runs, *runs])))) if c["data"] == "CIFAR-10"]
    by_macs = {c["recipe"]: c["points"] for c in charts if (c["metric"], c["axis"]) == ("top1", "macs")}
    assert list(by_macs) == ["nin-paper", "another", "all"]
    assert [len(points) for points in by_macs.values()] == [3 + 3, 1 + 3, 4 + 3]


def test_top5_of_few_classes_is_left_out(runs: Path):
    record = json.loads((runs / "nin-0" / "record.json").read_text())
    for classes, metrics in ((5, {"top1"}), (6, {"top1", "top5"})):
        record["data"] |= {"name": "shapes", "classes": [str(i) for i in range(classes)]}
        entries = gather(Records([run for run in read_record(record, runs) if isinstance(run, Run)]))
        charts = [c for c in scatters(points_of(entries)) if c["data"] == "shapes"]
        assert {c["metric"] for c in charts} == metrics
        assert ("top-5" in summary_table(entries)) == ("top5" in metrics)


def test_a_front_never_goes_back(records: Records):
    """Costs that are shown alike may differ: the front is drawn by what they are."""
    alike = [replace(run, top1=0.9, params=118_900 if "c3" in run.built.name else 119_400) for run in records.runs]
    for chart in scatters(points_of(gather(Records(alike)))):
        costs = [chart["points"][i]["x"] for i in chart["front"]]
        assert costs == sorted(costs)


def test_points_know_how_far_their_seeds_lie_apart(records: Records):
    chart = next(c for c in scatters(points_of(gather(records))) if c["data"] == "CIFAR-10")
    spreads = [point["spread"] for point in chart["points"]]
    assert all(0 < spread < 0.01 for spread in spreads[:3])
    assert spreads[3:] == [None] * 3


def test_a_hair_less_compute_does_not_make_the_front(records: Records):
    """Our counts leave biases out, the published ones do not: the same network must not look cheaper for that."""
    (chart,) = (
        c
        for c in scatters(points_of(gather(records)))
        if (c["data"], c["metric"], c["axis"]) == ("CIFAR-10", "top1", "macs")
    )
    assert {chart["points"][i]["source"] for i in chart["front"]} == {"published"}


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


def test_charts_know_how_wide_their_axis_is(records: Records):
    few = [replace(run, n=100) for run in records.runs]
    for found, at_least in ((records.runs, LEAST_SPAN), (few, 0.15)):
        entries = gather(Records([*found]))
        chart = next(c for c in scatters(points_of(entries)) if c["data"] == "CIFAR-10")
        assert at_least <= chart["span"] < 2 * at_least
    watched = [replace(run, watched="test") for run in few]
    assert curves(gather(Records(watched)))[0]["span"] > curves(gather(Records(few)))[0]["span"] == LEAST_SPAN


def test_curves_keep_their_ends_and_are_not_endless(records: Records):
    found = curves(gather(records))
    assert len(found) == 15
    assert (found[0]["epochs"][0], found[0]["epochs"][-1]) == (1, 60)
    assert len(found[0]["loss"]) == len(found[0]["epochs"]) == 60


def test_layers_of_both_devices_stand_in_one_chart(records: Records):
    charts = {chart["title"]: chart for chart in layer_charts(records.timings)}
    ours = charts["nin-c3-lr, measured here"]
    assert [series["name"] for series in ours["series"]] == ["MACs", "CPU time", "GPU time"]
    assert "conv1_1" in ours["layers"]
    assert all(math.isclose(sum(series["shares"]), 1) for series in ours["series"])
    assert set(ours["correlations"]) == {"CPU", "GPU"}


def test_the_published_timings_correlate_as_the_audit_says():
    (published,) = layer_charts([])
    assert len(published["layers"]) == 16
    assert published["correlations"]["CPU"] == pytest.approx(0.94, abs=0.01)


def test_no_correlation_where_there_is_none():
    assert pearson([1], [1]) is None
    assert pearson([1, 1, 1], [1, 2, 3]) is None
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)


def test_a_timing_without_layers_has_no_chart():
    layer = (LayerTime("a", 1, 1.0),)
    alone = Timing("", Built("nin"), "CPU", "torch", 1, 1.0, 1, 1, layer)
    assert len(layer_charts([alone])) == 1
