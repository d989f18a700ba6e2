"""Learned shapes beside their rivals, in miniature: a record that is continued, and verdicts."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shlex
from pathlib import Path
from typing import Any

import pytest

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import open_data
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.train import get_recipe


@pytest.fixture(scope="module")
def learned_shapes(benchmark_module):
    return benchmark_module("learned_shapes")


SMALL = shlex.split(
    "--data digits --limit 32 --network nin --width 0.05 --recipe digits --set epochs=2 --set batch_size=16 "
    "--set crop=16 --macs 0.6 --multiple 1 --device cpu --seeds 1"
)


def test_ways_are_trained_in_turn_and_judged(learned_shapes, tmp_path: Path, capsys):
    out = tmp_path / "shapes.json"
    common = [*SMALL, "--out", str(out)]
    learned_shapes.main([*common, "--budget", "0", "--ways", "thin"])
    assert "the same command continues" in capsys.readouterr().out
    learned_shapes.main([*common, "--ways", "thin", "again", "strips-kxk"])
    record = json.loads(out.read_text())
    assert [row["way"] for row in record["rows"]] == ["thin", "proximal", "again", "strips-kxk"]
    learned_shapes.main([*common, "--macs", "0.05", "--ways", "strips", "--out", str(tmp_path / "least.json")])
    assert "strips is left out: macs=0.05 is below" in capsys.readouterr().out
    assert record["rows"][1]["shapes"] == record["rows"][2]["shapes"]
    assert all(row["macs"] <= 0.62 for row in record["rows"])
    assert {(one["ours"], one["theirs"]) for one in record["answers"]} == {
        ("proximal", "thin"), ("again", "thin"), ("strips-kxk", "thin"),
    }  # fmt: skip
    assert all(one["margin"] == 0.5 for one in record["answers"])
    assert record["mechanisms"] == []


def _full(way: str, seed: int = 0) -> dict:
    return {"way": way, "phase": "full", "rate": 1.0, "seed": seed}


def test_every_way_tries_the_same_rates_on_images_held_out(learned_shapes, tmp_path: Path):
    out = tmp_path / "tuned.json"
    more = shlex.split("--ways again --rates 1 1e9 --limit 40 --train 30 --set norm=none")
    with pytest.raises(LowRankError, match="less than the 32 training images"):
        learned_shapes.main([*SMALL, "--train", "32", "--out", "unused.json"])
    learned_shapes.main([*SMALL, *more, "--out", str(out)])
    record = json.loads(out.read_text())
    tries = [row for row in record["rows"] if row["phase"] == "try"]
    full = [row for row in record["rows"] if row["phase"] == "full"]
    assert [(row["way"], row["rate"]) for row in tries] == [
        ("proximal", 1.0), ("again", 1.0), ("proximal", 1e9), ("again", 1e9),
    ]  # fmt: skip
    assert [row["diverged"] for row in tries if row["rate"] == 1e9] == [True, True]
    assert [(row["way"], row["rate"], row["images"]) for row in full] == [("proximal", 1, 40), ("again", 1, 40)]
    assert tries[0]["images"] == 10


@pytest.fixture
def bench(learned_shapes, tmp_path: Path):
    options = learned_shapes._options([*SMALL, "--out", str(tmp_path / "shapes.json")])
    recipe = get_recipe("digits", epochs=2, batch_size=16, crop=16)
    book = learned_shapes.RunBook(options.out, learned_shapes.KIND, {})
    images = learned_shapes.run_book.split_for_tries(open_data("digits", limit=32, progress=False))
    return learned_shapes.ShapeBench(*images, recipe, options, book)


def test_a_fixed_share_is_the_largest_within_the_budget(learned_shapes, bench):
    dense = count(bench.dense(0), bench.size).macs
    for strips in learned_shapes.FIXED.values():
        found = bench.fixed(strips, 0.6)
        parts = dict(found.shapes)["kxk"]
        more = (*((shape, n * (63 - parts) / (64 - parts)) for shape, n in found.shapes[:-1]), ("kxk", parts + 1))
        costs = [
            count(convert(bench.dense(0), scheme, allow_costlier=True), bench.size).macs / dense
            for scheme in (found, dataclasses.replace(found, shapes=more))
        ]
        assert costs[0] <= 0.6 < costs[1]


def test_a_share_of_the_time_is_asked_for_where_the_way_says_so(learned_shapes, bench, monkeypatch):
    asked: dict[str, Any] = {}

    def learn_shapes(*_: Any, **how: Any) -> None:
        asked.update(how)
        raise LowRankError("this is all that was asked")

    monkeypatch.setattr(learned_shapes.learning, "learn_shapes", learn_shapes)
    with pytest.raises(LowRankError, match="all that was asked"):
        bench.run(_full("latency:0.75"))
    assert (asked["latency"], asked["batch"], "macs" in asked) == (0.75, 256, False)


def test_networks_are_timed_once_and_beside_the_dense_one(learned_shapes, bench, monkeypatch: pytest.MonkeyPatch):
    measured: list[list[str]] = []

    def measure(runs, **_):
        measured.append([name for name, run in runs.items() if run() is not None])
        return {name: Sample(2.0, 1.9, 2.1, 21) for name in runs}

    monkeypatch.setattr(learned_shapes, "optimize", lambda network, images, compile: network)
    monkeypatch.setattr(learned_shapes, "measure", measure)
    copy = pickle.loads(pickle.dumps(bench))  # as another process gets it
    bench.book.add({**_full("proximal"), **copy(_full("proximal"))})
    for _ in range(2):
        bench.time_all()
    bench.book.add({**_full("points:0.7"), **bench(_full("points:0.7"))})
    bench.time_all()
    assert measured == [["dense", "proximal"], ["dense", "points:0.7"]]
    assert [row["ms"] for row in bench.book.rows] == 2 * [{"ours": 2.0, "low": 1.9, "high": 2.1, "dense": 2.0}]
    assert bench.book.rows[0]["macs"] <= 0.6 < bench.book.rows[1]["macs"] <= 0.7
    assert bench.book.rows[1]["scheme"].startswith("mixture(1x1=")
