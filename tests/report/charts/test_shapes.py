"""The shapes of filters as stacked bars."""

from __future__ import annotations

import pytest
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.method.finalize_shapes import LearnedShapes
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.report.charts import shape_bars, shape_colours
from lowrank_cnn.report.figures import draw_figure


def test_bars_are_shares_of_the_dense_filters():
    dense = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3))
    shapes = {"0": "exact(3x1=4, 1x3=8)", "1": "exact(in=12)", "2": "exact(3x3=8, in=12)"}
    net = LearnedShapes({name: parse_scheme(text) for name, text in shapes.items()}).apply(dense)
    bars = {(bar["layer"], bar["shape"]): bar["share"] for bar in shape_bars(net)}
    assert bars == {("0", "3x1"): 0.25, ("0", "1x3"): 0.5, ("2", "3x3"): 1.0}
    assert shape_bars(net)[0]["spoken"] == "0: 4 of 16 filters are 3x1"


def test_layers_that_stayed_dense_and_layers_that_became_points_are_shown():
    dense = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3))
    shapes = {"1": "exact(1x1=8)", "2": "exact(1x1=4)", "3": "exact(3x3=8, in=4)"}
    net = LearnedShapes({name: parse_scheme(text) for name, text in shapes.items()}).apply(dense)
    bars = [(bar["layer"], bar["shape"], bar["share"]) for bar in shape_bars(net)]
    assert bars == [("0", "3x3", 1.0), ("1", "1x1", 1.0), ("3", "3x3", 1.0)]


def test_shapes_of_one_kind_share_a_hue_and_none_has_the_colour_of_another():
    names = ["5x5", "1x1", "3x3", "1x3", "3x1", "1x5", "5x1", "1x7", "7x1", "5x3"]
    colours = shape_colours(names)
    assert list(colours)[:4] == ["3x1", "5x1", "7x1", "1x3"]
    assert len(set(colours.values())) == len(names)


def test_a_network_without_spatial_convs_is_refused():
    with pytest.raises(lr.LowRankError, match="no spatial"):
        shape_bars(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_the_figure_is_drawn(tmp_path):
    assert "1x3" in draw_figure("shapes", tmp_path / "shapes.svg").read_text()
