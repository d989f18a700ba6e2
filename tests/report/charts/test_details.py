from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lowrank_cnn.report.charts import DETAILS, MOST_BARS, NEEDED, confusion_spec, details_charts, details_data
from lowrank_cnn.report.records import Records
from lowrank_cnn.report.results import gather


def charts_of(records: Records) -> dict[str, dict]:
    return {f"{chart['network']} on {chart['trained']}": chart for chart in details_charts(gather(records))}


def test_the_answers_of_all_runs_of_a_network_are_one_chart(records: Records):
    chart = charts_of(records)["nin on CIFAR-10, nin-paper"]
    assert chart["runs"] == 3
    cells = confusion_spec(chart)["datasets"]["cells"]
    assert chart["images"] == sum(cell["n"] for cell in cells) == sum(map(sum, chart["confusion"]))
    for name in chart["classes"]:
        assert sum(cell["share"] for cell in cells if cell["true"] == name) == pytest.approx(1)
    shares = [bar["share"] for bar in chart["by_class"]]
    assert shares == sorted(shares)
    assert chart["pairs"][0]["name"].endswith(f"taken for class {int(chart['pairs'][0]['name'].split()[1]) + 1}")
    assert chart["worst"][0]["image"] == "val/class 3/0007.png"


def test_of_many_classes_the_hardest_are_shown(records: Records):
    found = next(one for one in details_data(gather(records)) if one["network"] == "vgg11-gmp")
    classes = found["charts"]["classes"]
    assert len(classes["datasets"]["bars"]) == MOST_BARS
    assert f"the {MOST_BARS} hardest of 100" in classes["title"]["text"]
    assert found["charts"]["confusion"]["encoding"]["x"]["axis"]["labels"] is False


def test_the_specifications_are_complete(records: Records):
    for found in details_data(gather(records)):
        assert list(found["charts"]) == list(NEEDED)
        for spec in found["charts"].values():
            open_places = set(re.findall(r"'({\w+})'", str(spec)))
            assert open_places <= {"{colour}"}  # which the page fills in by its theme
        assert set(found["colours"]) == {"light", "dark"}
    for chart in details_charts(gather(records)):
        for specify in DETAILS.values():
            assert not re.search(r"'{\w+}'", str(specify(chart)))


def test_networks_without_details_have_no_charts(records: Records):
    plain = [replace(run, details=None) for run in records.runs]
    assert details_charts(gather(Records(plain))) == []
    few = [
        replace(run, details=replace(run.details, confusion=(), bins=())) for run in records.runs if run.details
    ]
    assert list(details_data(gather(Records(few)))[0]["charts"]) == ["classes", "pairs"]
