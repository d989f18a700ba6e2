import math

from lowrank_cnn.deploy.timing import LayerTime
from lowrank_cnn.report.charts import layer_charts, layers_spec
from lowrank_cnn.report.records import NetworkId, Records, TimedNetwork


def test_layers_of_both_devices_stand_in_one_chart_each_with_its_own_share(records: Records):
    charts = {chart["title"]: chart for chart in layer_charts(records.timings)}
    ours = charts["nin-c3-lr, measured here"]
    series = {bar["series"] for bar in ours["layers"]}
    assert series == {"MACs", "CPU time", "GPU time"}
    for name in series:
        assert math.isclose(sum(bar["share"] for bar in ours["layers"] if bar["series"] == name), 1)
    bar = next(bar for bar in ours["layers"] if bar["series"] == "CPU time")
    assert bar["details"][0][1].endswith(f"{bar['share']:.1%} of the total")
    assert "CPU r = " in ours["note"]
    assert layers_spec(ours)["height"] == ours["height"] > 300


def test_the_published_timings_correlate_as_the_audit_says():
    (published,) = layer_charts([])
    assert len({bar["layer"] for bar in published["layers"]}) == 16
    assert "CPU r = 0.94, GPU r = 0.82" in published["note"]


def test_the_legend_names_only_devices_that_were_timed(records: Records):
    [chart, _] = layer_charts([timing for timing in records.timings if timing.device == "CPU"][:1])
    scale = layers_spec(chart)["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == ["MACs", "CPU time"]
    assert len(scale["range"]) == 2


def test_a_timing_without_layers_has_no_chart():
    layer = (LayerTime("a", "Conv2d", 1, 1.0),)
    alone = TimedNetwork("", NetworkId("nin"), "CPU", "torch", 1, 1.0, 1, 1, layer)
    assert len(layer_charts([alone])) == 1
