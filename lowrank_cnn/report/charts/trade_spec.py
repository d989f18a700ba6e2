"""The specification of accuracy against cost: what is drawn, and how it looks."""

from __future__ import annotations

from typing import Any

from lowrank_cnn.report.charts.vega import GREY, LABEL_LAYER, Spec, filled

DENSE, LOW_RANK = "dense, trained here", "low-rank, trained here"
BASELINE, PAPER, AUGMENTED = "published, baseline", "published, low-rank", "published, more augmentation"
KINDS = {
    BASELINE: ("square", "#c9a227"),
    PAPER: ("diamond", "#6fa8dc"),
    AUGMENTED: ("triangle-up", "#9e7bb5"),
    DENSE: ("circle", "#d55e00"),
    LOW_RANK: ("circle", "#0072b2"),
}
"""Shape and colour of each kind of point; our own are drawn last, over the published."""

_MIDDLE = "0.45 * scale('{0}', datum.{0}) + 0.55 * scale('{0}', datum.{0}2)"
_ANGLE = "atan2(scale('x', datum.x2) - scale('x', datum.x), scale('y', datum.y) - scale('y', datum.y2)) * 180 / PI"
SPEC: Spec = {
    "width": 620,
    "height": 380,
    "data": {"name": "points"},
    "encoding": {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": "{x}",
            "scale": {"zero": False, "nice": False},
            "axis": {"format": "~s", "tickCount": 7, "labelOverlap": True, "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": "{y}",
            "scale": {"zero": False, "nice": False},
            "axis": {"format": ".2~%", "tickCount": 6},
        },
    },
    "layer": [
        {
            "name": "fronts",
            "data": {"name": "fronts"},
            "mark": {
                "type": "line",
                "interpolate": "step-after",
                "strokeDash": [4, 3],
                "color": GREY,
                "clip": True,
            },
            "encoding": {"detail": {"field": "front"}, "order": {"field": "x"}},
        },
        {
            "name": "arrows",
            "data": {"name": "arrows"},
            "mark": {"type": "rule", "color": GREY, "strokeWidth": 1.2, "opacity": 0.6, "clip": True},
            "encoding": {"x2": {"field": "x2"}, "y2": {"field": "y2"}},
        },
        {
            "name": "heads",
            "data": {"name": "arrows"},
            "mark": {
                "type": "point",
                "shape": "triangle",
                "filled": True,
                "size": 55,
                "color": GREY,
                "angle": {"expr": _ANGLE},
                "clip": True,
            },
            "encoding": {
                "x": {"value": {"expr": _MIDDLE.format("x")}},
                "y": {"value": {"expr": _MIDDLE.format("y")}},
            },
        },
        {
            "name": "intervals",
            "mark": {"type": "rule", "strokeWidth": 1.5, "clip": True},
            "encoding": {
                "y": {"field": "low", "type": "quantitative", "title": "{y}"},
                "y2": {"field": "high"},
                "color": {"field": "kind", "type": "nominal"},
            },
        },
        {
            "name": "points",
            "mark": {
                "type": "point",
                "filled": True,
                "opacity": 1,
                "size": 110,
                "stroke": "white",
                "strokeWidth": 1,
                "clip": True,
                "tooltip": {"content": "data"},
            },
            "encoding": {
                "color": {"field": "kind", "type": "nominal", "title": None, "scale": "{colours}"},
                "shape": {"field": "kind", "type": "nominal", "title": None, "scale": "{shapes}"},
                "description": {"field": "spoken"},
            },
        },
        LABEL_LAYER,
    ],
}


def trade_spec(chart: dict[str, Any]) -> Spec:
    """The specification of a chart that is written to a file."""
    kinds = chart["kinds"]
    scales = {
        "{x}": chart["x"],
        "{y}": chart["y"],
        "{colours}": {"domain": kinds, "range": [KINDS[kind][1] for kind in kinds]},
        "{shapes}": {"domain": kinds, "range": [KINDS[kind][0] for kind in kinds]},
    }
    spec: Spec = filled(SPEC, scales)
    kind = "log" if chart["log"] else "linear"
    spec["encoding"]["x"]["scale"] = {"type": kind, "nice": False, "domain": chart["costs"][kind]}
    spec["encoding"]["y"]["scale"] |= {"domain": chart["domain"]}
    spec["layer"] = [layer for layer in spec["layer"] if chart[layer.get("data", {"name": "points"})["name"]]]
    spec["datasets"] = {name: chart[name] for name in ("points", "arrows", "fronts", "labels")}
    return spec
