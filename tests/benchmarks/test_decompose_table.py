"""The table of decomposing against training from scratch, on a few small digits."""

from __future__ import annotations

import json
import sys

import pytest

from lowrank_cnn.train import load_record


@pytest.fixture
def table(benchmark_module, monkeypatch, tmp_path):
    """Run the benchmark with these arguments, in a folder of its own, and read a record."""
    module = benchmark_module("decompose")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, out: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["decompose", *arguments, "--out", out])
        module.main()
        return json.loads((tmp_path / out).read_text())

    return run


TINY = [
    "--data=digits", "--recipe=digits", "--width=0.06", "--limit=80", "--schemes=separable", "--shares=0.6",
    "--device=cpu", "--epochs=2", "--tune=1",
]  # fmt: skip


@pytest.mark.nightly
def test_every_way_is_trained_and_seeds_are_merged(table, tmp_path, capsys):
    first = table(*TINY, "--seed", "0", "--test", out="0.json")
    ways = [(row["way"], row["epochs"]) for row in first["rows"]]
    assert ways == [("dense", 2), ("decomposed", 0), ("fine-tuned", 1), ("from scratch", 2), ("from scratch", 3)]
    dense, *small = first["rows"]
    assert len({(row["macs"], row["params"]) for row in small}) == 1
    assert 0.5 < small[0]["macs"] / dense["macs"] <= 0.6
    assert all(0 <= row["test"] <= 1 for row in first["rows"])
    shapes = {
        json.dumps(load_record(path).model["conversion"])
        for path in (tmp_path / "runs" / "decompose" / "seed0").iterdir()
        if not path.name.startswith("dense")
    }
    assert len(shapes) == 1
    lr = load_record(tmp_path / "runs" / "decompose" / "seed0" / "fine-tuned-separable-0.6-1").recipe["lr"]
    assert lr == first["setting"]["tune_lr"] < 0.1
    again = table(*TINY, "--seed", "0", "--budget", "100", out="again.json")
    assert [row["top1"] for row in again["rows"]] == [row["top1"] for row in first["rows"]]
    (tmp_path / "1.json").write_text(json.dumps(first).replace('"seed": 0', '"seed": 1'))
    both = table("--merge", "0.json", "1.json", out="both.json")
    assert [line["n"] for line in both["table"]] == [2] * 5
    assert both["table"][0]["stdev"] == 0
    assert "1.000 of the MACs" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_new_is_started_when_time_is_up(table):
    record = table(*TINY, "--seed", "0", "--budget", "0.001", "--test", out="0.json")
    assert record["rows"] == []
    with pytest.raises(SystemExit, match="another setting"):
        table(*TINY, "--tune-lr", "0.5", "--seed", "0", out="0.json")
    with pytest.raises(SystemExit, match="give the images"):
        table("--seed", "0", out="0.json")
