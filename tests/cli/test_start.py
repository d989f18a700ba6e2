"""The commands models, count, recipes, demo and shrink, as a user types them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from lowrank_cnn.cli import demo as module
from lowrank_cnn.cli.demo import demo
from lowrank_cnn.deploy.timing import time_model
from lowrank_cnn.train import RECIPES, load_record


def test_count_prints_the_published_integers_as_json(output_of):
    printed = json.loads(output_of("count", "vgg11-gmp-lr", "--convention", "paper", "--json"))
    assert (printed["model"], printed["convention"]) == ("vgg11-gmp-lr", "paper")
    assert (printed["macs"], printed["params"]) == (2518134440, 26054888)
    assert printed["input"] == [3, 224, 224]
    assert printed["layers"][0]["name"] == "features.conv1_1"


def test_count_takes_any_network(output_of, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 9, 3, padding=1))\n")
    dense, low_rank = (
        json.loads(output_of("count", f"{own}:net", "--input", "3x8x8", "--json", *more))["macs"]
        for more in ([], ["--scheme", "lr"])
    )
    assert (dense, low_rank) == (9 * 27 * 64, 9 * 9 * 64)


@pytest.mark.parametrize(
    "arguments", [["models"], ["recipes"], ["count", "vgg11-gmp-lr-join"], ["count", "googlenet-lr-conv1"]]
)
def test_tables_fit_eighty_columns(output_of, arguments: list[str]):
    shown = output_of(*arguments)
    assert "conv3_reduce " in shown or "googlenet-lr-conv1" not in arguments
    assert max(map(len, shown.splitlines())) <= 80


def test_models_lists_costs_and_accuracy_as_json(output_of):
    rows = {row["network"]: row for row in json.loads(output_of("models", "--json"))}
    assert len(rows) == 22
    assert rows["airbench"]["top1"] is None
    assert rows["nin-c3-lr"]["macs"] == 104260224
    assert rows["vgg11"]["top5"] == 0.8617


def test_recipes_are_listed_with_every_field_as_json(output_of):
    assert all(name in output_of("recipes") for name in RECIPES)
    assert json.loads(output_of("recipes", "--json"))["modern"]["lr"] == RECIPES["modern"].lr


def test_it_trains_both_twins_once_compares_them_and_writes_a_report(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("lowrank_cnn.deploy.timing.time_model", partial(time_model, repeats=3))
    monkeypatch.setattr(module, "WIDTH", 0.05)
    said: list[str] = []
    (dense, low_rank), report = demo(tmp_path, epochs=1, device="cpu", limit=64, say=said.append)
    assert [line.split(" network")[0] for line in said] == ["Training the dense", "Training the low-rank"]
    assert (dense["name"], low_rank["name"]) == ("dense", "low-rank")
    assert low_rank["macs"] < 0.6 * dense["macs"]
    assert low_rank["params"] < dense["params"]
    assert min(dense["ms_per_image"], low_rank["ms_per_image"]) > 0
    assert load_record(tmp_path / "low-rank" / "record.json").result["macs"] == low_rank["macs"]
    assert "nin lr width 0.05" in report.read_text()

    before = (tmp_path / "dense" / "record.json").stat().st_mtime_ns
    monkeypatch.setattr("lowrank_cnn.report.write_report", lambda runs, page: page)
    (again, _), _ = demo(tmp_path, epochs=1, device="cpu", limit=64)
    assert again["top1"] == dense["top1"]
    assert (tmp_path / "dense" / "record.json").stat().st_mtime_ns == before


def test_the_command_prints_the_ratios(output_of, monkeypatch):
    fields = ("name", "top1", "n", "macs", "params", "ms_per_image")
    figures = (("dense", 0.9, 500, 200, 50, 2.0), ("lr", 0.91, 500, 100, 20, 1.5))
    twins = [dict(zip(fields, row, strict=True)) for row in figures]
    monkeypatch.setattr(module, "demo", lambda *_, **__: (twins, Path("report.html")))
    assert "+1.0 points x 0.50 x 0.40 x 0.75" in " ".join(output_of("demo").split())


def test_photographs_are_stored_smaller_and_bad_ones_named(output_of, tmp_path):
    image = pytest.importorskip("PIL.Image")
    parquet = pytest.importorskip("pyarrow.parquet")
    photos, small = tmp_path / "photos", tmp_path / "small"
    (photos / "train" / "cat").mkdir(parents=True)
    for number in range(3):
        image.new("RGB", (80, 60), (number, 90, 9)).save(photos / "train" / "cat" / f"{number}.jpg")
    (photos / "train" / "cat" / "broken.jpg").write_bytes(b"no image")
    printed = json.loads(output_of("shrink", photos, small, "--side", "32", "--json"))
    shards = list(small.glob("*.parquet"))
    assert printed["bytes"] == sum(shard.stat().st_size for shard in shards)
    assert sum(sum(counts.values()) for counts in printed["problems"].values()) == 1
    assert sum(parquet.read_table(shard).num_rows for shard in shards) == 3
    assert f"lowrank train NETWORK --data {small}" in output_of("shrink", photos, small).replace("\n", "")
