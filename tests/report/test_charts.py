"""The data and the specifications of charts, and the colours that all of them share."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowrank_cnn.report import Records
from lowrank_cnn.report.charts import LAYER_COLOURS, MOST_BARS, curves_spec, details_data
from lowrank_cnn.report.results import gather
from lowrank_cnn.report.style import COLOURS, OTHERS, label_rows, network_looks, save_charts
from lowrank_cnn.report.trade import (
    DENSE,
    LOW_RANK,
    TradePoint,
    trade_chart,
    trade_charts,
    trade_points,
    trade_spec,
)

EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}
"""How a colour looks to readers without one kind of cone (Machado et al. 2009), on linear RGB."""


def linear(colour: str) -> torch.Tensor:
    values = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return torch.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    v = rows @ rgb / torch.tensor([0.9505, 1.0, 1.089])
    x, y, z = torch.where(v > 0.008856, v.clamp_min(0) ** (1 / 3), 7.787 * v + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("eyes", EYES.values(), ids=EYES)
def test_colours_are_distinct_to_colour_blind_readers(page, eyes):
    ours = ([pair[page] for pair in pairs] for pairs in (COLOURS.values(), OTHERS))
    for palette in (*ours, LAYER_COLOURS.values()):
        seen = [lab(torch.tensor(eyes, dtype=torch.float) @ linear(colour)) for colour in palette]
        # What is just seen apart side by side is 2.3.
        assert min(float((p - q).norm()) for p, q in itertools.combinations(seen, 2)) > 20


@pytest.mark.parametrize(("page", "background"), [(0, "#ffffff"), (1, "#181d23")])
def test_colours_stand_out_from_the_page(page, background):
    def light(colour: str) -> float:
        return float(linear(colour) @ torch.tensor([0.2126, 0.7152, 0.0722])) + 0.05

    for pair in (*COLOURS.values(), *OTHERS):
        dark, bright = sorted((light(pair[page]), light(background)))
        assert bright / dark > 2.9


def trade_of(records: Records, **wanted: str) -> list[dict]:
    found = trade_charts(trade_points(gather(records)))
    return [chart for chart in found if all(chart[key] == value for key, value in wanted.items())]


def test_recipes_are_never_mixed_in_one_chart(records: Records):
    others = [replace(run, recipe="another", top1=0.1) for run in records.runs if run.network.name == "nin"]
    both = Records([*records.runs, *others])
    by_recipe = {c["recipe"]: c["points"] for c in trade_of(both, data="CIFAR-10", metric="top1", axis="macs")}
    assert list(by_recipe) == ["nin-paper", "another"]
    assert [p["y"] for p in by_recipe["another"] if p["kind"] == DENSE] == [pytest.approx(0.1)]


def test_fronts_arrows_and_intervals_are_of_the_right_points(records: Records):
    (chart,) = trade_of(records, data="CIFAR-10", metric="top1", axis="macs")
    places = {kind: {(p["x"], p["y"]) for p in chart["points"] if p["kind"] == kind} for kind in (DENSE, LOW_RANK)}
    for corner in chart["fronts"]:  # a front joins points of one protocol only
        ours = (corner["x"], corner["y"]) in places[DENSE] | places[LOW_RANK]
        assert ours == (corner["front"] == "nin-paper")
    assert {corner["front"] for corner in chart["fronts"]} == {"nin-paper", "published"}
    assert {(a["x"], a["y"]) for a in chart["arrows"]} == places[DENSE]
    assert {(a["x2"], a["y2"]) for a in chart["arrows"]} == places[LOW_RANK]
    for point in chart["points"]:
        height = point["high"] - point["low"]
        assert (0 < height < 0.02) if point["kind"] in places else height == 0


def test_the_answers_of_all_runs_of_a_network_are_one_chart(records: Records):
    found = {f"{one['network']} on {one['trained']}": one for one in details_data(gather(records))}
    one = found["nin on CIFAR-10, nin-paper"]
    runs = [run for run in records.runs if run.network.name == "nin" and run.details]
    assert sum(map(sum, one["confusion"])) == sum(int(run.details.confusion.sum()) for run in runs if run.details)
    shares = [bar["share"] for bar in one["charts"]["classes"]["datasets"]["bars"]]
    assert shares == sorted(shares)
    first = one["charts"]["pairs"]["datasets"]["bars"][0]["name"]
    assert first.endswith(f"taken for class {int(first.split()[1]) + 1}")
    assert "off by 9.99% on average" in one["charts"]["calibration"]["title"]
    assert one["worst"][0]["image"] == "val/class 3/0007.png"


def test_the_page_gets_complete_charts_and_of_many_classes_the_hardest(records: Records):
    for found in details_data(gather(records)):
        assert list(found["charts"]) == ["confusion", "classes", "pairs", "calibration"]
        assert set(re.findall(r"'({\w+})'", str(found["charts"]))) == {"{colour}"}  # filled in by the theme
        assert set(found["colours"]) == {"light", "dark"}
    found = next(one for one in details_data(gather(records)) if one["network"] == "vgg11-gmp")
    classes = found["charts"]["classes"]
    assert len(classes["datasets"]["bars"]) == MOST_BARS
    assert f"the {MOST_BARS} hardest of 100" in classes["title"]
    assert found["charts"]["confusion"]["encoding"]["x"]["axis"]["labels"] is False


def test_a_run_of_one_epoch_is_a_dot():
    look = {"light": "#0072b2", "dash": [1, 0]}
    one = {"group": "one", "look": look, "epochs": [1], "accuracy": [None], "train_accuracy": [0.3], "test": None}
    spec = curves_spec("runs", [one])
    assert spec["datasets"]["ends"] == spec["datasets"]["curves"] == [{"group": "one", "epoch": 1, "value": 0.3}]
    assert spec["title"]["subtitle"] == "Lines: training images, mean over runs; bands: lowest to highest run"
    tested = curves_spec("runs", [{**one, "test": 0.2}])
    assert tested["title"]["subtitle"].endswith("dots: test images, each run")
    assert tested["layer"][1]["encoding"]["y"]["title"] == "Accuracy"  # of both kinds of images


def test_low_rank_networks_beside_a_dense_one_have_colours_of_their_own():
    kinds = {"nin": "dense", "nin-c3": "low-rank", "nin-c3-lr": "low-rank", "nin+thin": "thin"}
    colours = [look["light"] for look in network_looks(kinds).values()]
    assert len(set(colours)) == 4
    assert [colours[0], colours[3]] == [COLOURS[kind][0] for kind in ("dense", "thin")]


def test_costs_begin_at_zero(records: Records):
    assert all(chart["costs"]["linear"][0] == 0 for chart in trade_of(records))


def test_all_points_are_labelled_or_none():
    points = [{"x": i, "y": i, "label": str(i)} for i in range(100)]
    assert label_rows(points) == []
    assert [row["label"] for row in label_rows(points[:9]) if not row["block"]] == list("012345678")


@pytest.mark.parametrize(("number", "apart"), [(5, 1.0), (25, 0.0)])
def test_a_picture_without_room_for_all_labels_has_none(tmp_path: Path, number: int, apart: float):
    places = [(f"network {i}", {"top1": 0.5 + apart * i / 10, "batch": 1 + apart * i}) for i in range(number)]
    points = [TradePoint(name, "dense", "", "", values) for name, values in places]
    out = save_charts([trade_spec(trade_chart(points, "batch", "top1"))], tmp_path / "out.svg")
    shown = set(re.findall(r">(network \d+)<", out.read_text()))
    assert len(shown) == (number if apart else 0)
