"""Benchmarks that train many runs: the record is continued, within its budget, and judged by paired intervals."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowrank_cnn as lr
from benchmarks import (
    common,
    decompose,
    learned_shapes,
    run_book,
    truncated,
)
from lowrank_cnn.choose.runs import WorkerPool
from lowrank_cnn.choose.trace import BudgetSpent
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import load_record
from lowrank_cnn.train.failure import NotFiniteError


def test_a_run_is_made_once_and_kept_at_once(tmp_path: Path):
    path, made = tmp_path / "runs.json", []

    def make(key: dict) -> dict:
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        made.append((key["way"], len(kept)))
        return run_book.timed(lambda: {"top1": 0.5})

    book = run_book.RunBook(path, "kind", {"width": 1})
    keys = [{"way": way, "seed": 0} for way in ("thin", "strips")]
    book.make(WorkerPool(make), keys)
    again = run_book.RunBook(path, "kind", {"width": 1})
    again.make(WorkerPool(make), keys)
    assert made == [("thin", 0), ("strips", 1)]
    assert [row["way"] for row in again.rows] == ["thin", "strips"]
    with pytest.raises(SystemExit, match="other settings"):
        run_book.RunBook(path, "kind", {"width": 2})


def test_a_record_that_is_continued_names_every_commit(tmp_path: Path, monkeypatch):
    path = tmp_path / "runs.json"
    for commit in ("one", "two", "two"):
        monkeypatch.setenv("LOWRANK_COMMIT", commit)
        run_book.RunBook(path, "kind", {}).add({"way": commit, "seed": 0, "top1": 0.5, "wall": 0.1})
    monkeypatch.setenv("LOWRANK_COMMIT", "three")
    run_book.RunBook(path, "kind", {}).save(summary=[])  # nothing was run: this is where runs were looked at
    known = json.loads(path.read_text())
    assert [one["commit"] for one in known["environments"]] == ["one", "two"]
    assert known["environment"]["commit"] == "two"


def test_a_penalty_takes_as_much_from_every_singular_value_and_leaves_fewer_filters():
    weight = torch.randn(8, 4, 3, 3, dtype=torch.float64)
    pair = lr.decompose(nn.Sequential(nn.Conv2d(4, 8, 3, bias=False).double()), "separable(m=5)", where="*")
    few = pair[0].weight
    for given, rank in ((weight, 12), (few, 5)):
        before, after = (
            torch.linalg.svdvals(w.permute(1, 3, 0, 2).reshape(12, 24))
            for w in (given, truncated.shrunk(given, 0.1))
        )
        assert (before > 1e-9).sum() == rank
        torch.testing.assert_close(after, (before - 0.1).clamp_min(0), rtol=0, atol=1e-9)


def test_no_run_begins_that_would_not_end_in_time(tmp_path: Path):
    book = run_book.RunBook(tmp_path / "runs.json", "kind", {}, budget=10.0)
    book.rows = [{"way": "slow", "seed": 0, "top1": 0.5, "wall": 30.0}, {"way": "quick", "top1": 0.5, "wall": 0.1}]
    pool = WorkerPool(lambda _: {"top1": 0.5, "wall": 0.1})
    book.make(pool, [{"way": "quick", "seed": 1}])
    for way in ("slow", "unknown"):
        with pytest.raises(BudgetSpent):
            book.make(pool, [{"way": way, "seed": 1}])
    assert len(book.rows) == 3


def test_a_run_that_cannot_be_made_is_told_of(tmp_path: Path):
    def make(key: dict) -> dict:
        raise LowRankError(f"{key['way']} cannot be made.")

    book, failed = run_book.RunBook(tmp_path / "runs.json", "kind", {}), []
    keys = [{"way": "thin", "seed": 0}]
    book.make(WorkerPool(make), keys, failed=lambda key, error: failed.append((key, str(error))))
    assert failed == [(keys[0], "thin cannot be made.")]
    with pytest.raises(LowRankError, match="thin cannot be made"):
        book.make(WorkerPool(make), keys)


def test_pairs_are_judged_together():
    draw = torch.Generator().manual_seed(0)
    runs = {
        name: [run_book.kept_answers(torch.rand(2000, generator=draw) < share) for _ in range(4)]
        for name, share in {"best": 0.9, "good": 0.8, "poor": 0.5, "as good": 0.8}.items()
    }
    assert run_book.answers_of(json.loads(json.dumps(runs["good"]))).shape == (4, 2000)
    pairs = [("best", "good"), ("good", "best"), ("best", "absent"), ("good", "as good")]
    better, worse, same = run_book.paired_answers(pairs, runs, margin=0.5, alpha=0.01)
    assert (better["verdict"], worse["verdict"], same["verdict"]) == ("yes", "no", "undecided")
    early = run_book.paired_answers(pairs, runs, margin=0.5, alpha=0.01, least_runs=5)
    assert {one["verdict"] for one in early} == {"too few runs"}
    assert better["corrected"] == pytest.approx(3 * better["p"])
    assert better["low"] < better["gap"] < better["high"]


def diverges() -> dict:
    raise NotFiniteError("the loss is not finite.")


def test_each_way_trains_at_the_rate_that_its_tries_found(tmp_path: Path):
    best, made = {"thin": 2.0, "gates": 0.5}, []

    def make(key: dict) -> dict:
        made.append(tuple(key.values()))
        if key["rate"] == 1.0 and key["phase"] == "try":  # a rate that diverges is not the best
            return {**run_book.finite(diverges), "wall": 0.0}
        return {"top1": 0.9 if key["rate"] == best[key["way"]] else 0.1, "wall": 0.0}

    def tuned(seeds: int, rates: tuple[float, ...] = (0.5, 1.0, 2.0)) -> None:
        book = run_book.RunBook(tmp_path / f"{len(rates)}.json", "kind", {})
        ways, seed = ["thin", "gates"], range(seeds)
        run_book.make_tuned(book, WorkerPool(make), "way", ways, rates=rates, tries=1, seeds=seed)

    tuned(1)
    assert [key[1] for key in made] == ["try"] * 6 + ["full"] * 2
    assert made[6:] == [("thin", "full", 2.0, 0), ("gates", "full", 0.5, 0)]
    made.clear()
    tuned(2)  # what was tried is not tried again
    assert made == [("thin", "full", 2.0, 1), ("gates", "full", 0.5, 1)]
    made.clear()
    tuned(1, rates=(1.0,))  # with one rate there is nothing to try
    assert made == [("thin", "full", 1.0, 0), ("gates", "full", 1.0, 0)]


def test_a_record_says_what_it_was_measured_with(tmp_path: Path):
    path = tmp_path / "new" / "a.json"
    common.write_record(path, "memory", rows=[1])
    found = json.loads(path.read_text())
    assert (found["kind"], found["rows"]) == ("memory", [1])
    assert found["environment"]["torch"]
    rows = [{"network": "a", "n": [1, 2]}, {"network": "b", "n": []}]
    common.write_record(path, "memory", by_line="rows", rows=rows, environment={"cpu": "other"})
    found = json.loads(path.read_text())
    assert (found["environment"], found["rows"]) == ({"cpu": "other"}, rows)
    assert path.read_text().count('\n  {"network"') == 2  # a line for each row


def test_runs_are_kept_and_other_records_refused(tmp_path: Path):
    path = tmp_path / "runs.json"
    assert common.earlier_runs(path, "speed") == []
    common.write_runs(path, "speed", [{"ms": 1}])
    assert common.earlier_runs(path, "speed") == [{"ms": 1}]
    with pytest.raises(SystemExit, match="no record of runs of memory"):
        common.earlier_runs(path, "memory")


SMALL = shlex.split(
    "--data digits --limit 32 --network nin --width 0.05 --recipe digits --set epochs=2 --set batch_size=16 "
    "--set crop=16 --macs 0.6 --multiple 1 --device cpu --seeds 1"
)


@pytest.mark.nightly
def test_ways_are_trained_in_turn_and_judged(tmp_path: Path, capsys):
    out = tmp_path / "shapes.json"
    common = [*SMALL, "--out", str(out)]
    learned_shapes.main([*common, "--budget", "0", "--ways", "thin"])
    assert "the same command continues" in capsys.readouterr().out
    learned_shapes.main([*common, "--ways", "thin", "again"])
    record = json.loads(out.read_text())
    assert [row["way"] for row in record["rows"]] == ["thin", "proximal", "again"]
    learned_shapes.main([*common, "--macs", "0.05", "--ways", "strips", "--out", str(tmp_path / "least.json")])
    assert "strips is left out: " in capsys.readouterr().out
    assert record["rows"][1]["shapes"] == record["rows"][2]["shapes"]
    assert all(row["macs"] <= 0.62 for row in record["rows"])
    assert {(one["ours"], one["theirs"]) for one in record["answers"]} == {
        ("proximal", "thin"), ("again", "thin"),
    }  # fmt: skip
    assert all(one["margin"] == 0.5 for one in record["answers"])
    assert record["mechanisms"] == []


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Run the benchmark with these arguments, in a folder of its own, and read a record."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, out: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["decompose", *arguments, "--out", out])
        decompose.main()
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
