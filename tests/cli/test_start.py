"""The commands models, count, recipes and demo, as a user types them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import lowrank_cnn as lr
from lowrank_cnn.cli import compare as module
from lowrank_cnn.train import RECIPES
from tests.cli.conftest import fits


def test_count_prints_the_published_integers_as_json(output_of):
    printed = json.loads(output_of("count", "vgg11-gmp-lr", "--convention", "paper", "--json"))
    assert (printed["model"], printed["convention"]) == ("vgg11-gmp-lr", "paper")
    assert (printed["macs"], printed["params"]) == (2518134440, 26054888)
    assert printed["input"] == [3, 224, 224]
    assert printed["layers"][0]["name"] == "features.conv1_1"


@pytest.mark.parametrize(
    "arguments", [["models"], ["recipes"], ["count", "vgg11-gmp-lr-join"], ["count", "googlenet-lr-conv1"]]
)
def test_tables_fit_eighty_columns(output_of, arguments: list[str]):
    shown = output_of(*arguments)
    assert "conv3_reduce " in shown or "googlenet-lr-conv1" not in arguments
    assert fits(shown)


def test_models_lists_costs_and_accuracy_as_json(output_of):
    rows = {row["network"]: row for row in json.loads(output_of("models", "--json"))}
    assert len(rows) == 28
    assert rows["airbench"]["top1"] is None
    assert rows["nin-c3-lr"]["macs"] == 104260224
    assert rows["vgg11"]["top5"] == 0.8617


def test_recipes_are_listed_with_every_field_as_json(output_of):
    assert all(name in output_of("recipes") for name in RECIPES)
    assert json.loads(output_of("recipes", "--json"))["modern"]["lr"] == RECIPES["modern"].lr


def test_the_demo_compares_three_networks_and_goes_on_where_it_was(tmp_path: Path, monkeypatch, output_of):
    monkeypatch.setattr(module, "WIDTH", 0.05)
    monkeypatch.setattr(module, "MINUTES", 0.01)
    optimize = partial(lr.optimize, repeats=3, cache=False)
    monkeypatch.setattr("lowrank_cnn.choose.target.optimize", lambda *given, **_: optimize(*given, compile=False))
    options = ("demo", "--epochs", "1", "--limit", "128", "--device", "cpu", "--out", str(tmp_path))
    told = json.loads(output_of(*options, "--json"))
    assert {row["kind"] for row in told["rows"]} == {"dense", "thin", "low-rank"}
    assert "nin" in Path(told["page"]).read_text()
    before = (tmp_path / "runs" / "dense-1" / "record.json").stat().st_mtime_ns
    assert "Take " in output_of(*options)
    assert (tmp_path / "runs" / "dense-1" / "record.json").stat().st_mtime_ns == before
