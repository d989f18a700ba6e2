"""The fewest operations to an accuracy: of the ways that reach it on held-out images, the cheapest is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import get_recipe


@pytest.fixture(scope="module")
def fewest_operations(benchmark_module):
    return benchmark_module("fewest_operations")


def arguments(out: Path, *more: str) -> list[str]:
    made = ["--data", "digits", "--limit", "40", "--width", "0.25", "--device", "cpu", "--out", str(out)]
    for setting in ("batch_size=16", "crop=12", "test_shift=0"):
        made += ["--set", setting]
    return [*made, "--tries", "1", "--seeds", "2", *more]


@pytest.mark.nightly
def test_the_cheapest_way_of_each_side_that_reaches_the_target_is_trained(fewest_operations, tmp_path, capsys):
    out = tmp_path / "products.json"
    ways = ["--ways", "dense 2", "dense 1", "mixture 2", "mixture 1 lr=0.5"]
    fewest_operations.main(arguments(out, *ways, "--target", "0"))
    record = json.loads(out.read_text())
    tries = [row["way"] for row in record["rows"] if row["phase"] == "try"]
    assert tries == ["dense 2", "dense 1", "mixture 2", "mixture 1 lr=0.5"]
    assert {row["images"] for row in record["rows"] if row["phase"] == "try"} == {4}  # held out
    full = [row for row in record["rows"] if row["phase"] == "full"]
    assert [(row["way"], row["images"]) for row in full] == [("dense 1", 40), ("mixture 1 lr=0.5", 40)] * 2
    assert all(row["seconds"] > 0 for row in full)
    found = {row["way"]: row for row in record["summary"]}
    assert found["dense 2"]["petaflop"] == pytest.approx(2 * found["dense 1"]["petaflop"])
    assert found["mixture 2"]["petaflop"] < found["dense 2"]["petaflop"]
    assert found["mixture 1 lr=0.5"]["runs"] == 2
    fewest_operations.main(arguments(out, *ways, "--target", "0"))
    assert json.loads(out.read_text())["rows"] == record["rows"]  # nothing is trained again
    assert "dense 1" in capsys.readouterr().out


def test_where_no_way_reaches_the_target_the_best_of_each_side_is_trained(fewest_operations, tmp_path):
    out = tmp_path / "products.json"
    fewest_operations.main(arguments(out, "--ways", "dense 1", "dense 3", "--target", "101", "--seeds", "1"))
    rows = json.loads(out.read_text())["rows"]
    held_out = {row["way"]: row["top1"] for row in rows if row["phase"] == "try"}
    [full] = [row for row in rows if row["phase"] == "full"]
    assert held_out[full["way"]] == max(held_out.values())


def test_the_target_of_tries_is_lower_by_what_the_first_way_is_below_its_known_accuracy(
    fewest_operations, monkeypatch, tmp_path
):
    scores = {"dense 12": 93.9, "dense 8": 93.75, "dense 10": 93.65}
    monkeypatch.setattr(fewest_operations, "_mean", lambda rows: scores[rows[0]["way"]])
    book = fewest_operations.RunBook(tmp_path / "none.json", "x", {})
    book.rows = [{"way": way, "phase": "try"} for way in scores]
    options = fewest_operations._options(
        ["--data", "-", "--known", "94.2", "--target", "94", "--ways", *scores],
    )

    class Bench:
        recipe = get_recipe("cifar10-fast")

        def petaflop(self, way: str) -> float:
            return {"dense 12": 3.0, "dense 8": 2.0, "dense 10": 1.0}[way]

    assert fewest_operations.chosen_ways(Bench(), book, options) == ["dense 8"]  # 94.0 - 0.3 is reached


@pytest.mark.parametrize("text", ["dense", "dense x", "dense 0", ""])
def test_a_way_without_epochs_is_refused_in_one_sentence(fewest_operations, text):
    with pytest.raises(LowRankError, match="a design and a number of epochs"):
        fewest_operations.parse_way(text, get_recipe("cifar10-fast"))


def test_the_warm_up_keeps_its_share_of_a_shorter_run(fewest_operations):
    way = fewest_operations.parse_way("mixture 6 lr=0.5 optimizer=muon", get_recipe("cifar10-fast"))
    assert (way.recipe.epochs, way.recipe.warmup, way.recipe.lr) == (6, pytest.approx(1.2), 0.5)
    assert way.recipe.optimizer == "muon"
    assert way.design.name == "mixture"
