from itertools import pairwise
from pathlib import Path

import pytest

from lowrank_cnn.report.records import Records
from lowrank_cnn.report.style import filled, label_rows, save_charts, with_labels


def test_placeholders_are_filled_at_any_depth():
    template = {"a": ["{x}", {"b": "{y}"}], "c": "{unknown}"}
    assert filled(template, {"{x}": 1, "{y}": {"d": 2}}) == {"a": [1, {"b": {"d": 2}}], "c": "{unknown}"}


def test_labels_are_placed_and_get_lines():
    compiled = {"marks": [{"type": "symbol", "name": "points_marks"}, {"type": "text", "name": "labels_marks"}]}
    marks = with_labels(compiled)["marks"]
    assert [mark.get("name") for mark in marks] == ["points_marks", "labels_marks", "leaders"]
    assert marks[1]["transform"][0]["type"] == "label"


def test_a_crowd_has_no_labels():
    points = [{"x": i, "y": i, "label": str(i)} for i in range(100)]
    assert label_rows(points, []) == []
    assert [row["label"] for row in label_rows(points[:2], []) if not row["block"]] == ["0", "1"]


def test_charts_stand_below_each_other(tmp_path: Path, records: Records):
    pytest.importorskip("vl_convert", reason="charts are drawn by vl-convert")
    spec = {"width": 80, "height": 50, "data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {}}
    one, two = (save_charts([spec] * n, tmp_path / f"{n}.svg").read_text() for n in (1, 2))
    assert (one.count("<svg"), two.count("<svg")) == (1, 3)


def test_places_that_labels_avoid_do_not_overlap():
    """Else they push each other aside, and take the room that labels need."""
    points = [{"label": name, "x": x, "y": y} for name, x, y in (("a", 0.0, 0.0), ("b", 10.0, 1.0))]
    long, short = ({"x": 0.0, "y": 0.0, "x2": x, "y2": 0.0} for x in (10.0, 0.01))
    places = [row["t"] for row in label_rows(points, [], [long, short]) if row["label"] == "\N{BULLET}"]
    assert len(places) == 60
    assert [b - a for a, b in pairwise(places)] == pytest.approx([1 / 60] * 59)
