import itertools
from pathlib import Path

import pytest

from lowrank_cnn.report.charts.vega import (
    COLOURS,
    DARK_COLOURS,
    filled,
    label_rows,
    looks,
    save_charts,
    with_labels,
)
from lowrank_cnn.report.records import Records

DEUTERANOPIA = ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969))
PROTANOPIA = ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052))
"""How a colour looks to readers without one kind of cone (Machado et al. 2009), on linear RGB."""


def linear(colour: str) -> list[float]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def lab(rgb: list[float]) -> list[float]:
    x, y, z = (
        sum(a * b for a, b in zip(row, rgb, strict=True)) / white
        for row, white in (
            ((0.4124, 0.3576, 0.1805), 0.9505),
            ((0.2126, 0.7152, 0.0722), 1.0),
            ((0.0193, 0.1192, 0.9505), 1.089),
        )
    )
    f = [max(v, 0.0) ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


@pytest.mark.parametrize("palette", [COLOURS, DARK_COLOURS])
@pytest.mark.parametrize("eyes", [None, DEUTERANOPIA, PROTANOPIA])
def test_colours_are_distinct_to_colour_blind_readers(palette, eyes):
    seen = []
    for colour in palette:
        rgb = linear(colour)
        seen.append(lab(rgb if eyes is None else [sum(a * b for a, b in zip(r, rgb, strict=True)) for r in eyes]))
    least = min(
        sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for p, q in itertools.combinations(seen, 2)
    )
    assert least > 20  # what is just seen apart side by side is 2.3


def test_no_two_of_many_networks_look_alike():
    found = looks([f"network {i}" for i in range(25)])
    pairs = list(zip(found["color"]["range"], map(tuple, found["dash"]["range"]), strict=True))
    assert len(set(pairs)) == 25


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
