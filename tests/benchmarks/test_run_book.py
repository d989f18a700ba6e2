"""The record of many runs: continued, within its budget, and judged by paired intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowrank_cnn.choose.runs import WorkerPool
from lowrank_cnn.choose.trace import BudgetSpent
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.failure import NotFiniteError


@pytest.fixture(scope="module")
def run_book(benchmark_module):
    return benchmark_module("run_book")


def test_a_run_is_made_once_and_kept_at_once(run_book, tmp_path: Path):
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


def test_a_record_that_is_continued_names_every_commit(run_book, tmp_path: Path, monkeypatch):
    path = tmp_path / "runs.json"
    for commit in ("one", "two", "two"):
        monkeypatch.setenv("LOWRANK_COMMIT", commit)
        run_book.RunBook(path, "kind", {}).add({"way": commit, "seed": 0, "top1": 0.5, "wall": 0.1})
    monkeypatch.setenv("LOWRANK_COMMIT", "three")
    run_book.RunBook(path, "kind", {}).save(summary=[])  # nothing was run: this is where runs were looked at
    known = json.loads(path.read_text())
    assert [one["commit"] for one in known["environments"]] == ["one", "two"]
    assert known["environment"]["commit"] == "two"


def test_no_run_begins_that_would_not_end_in_time(run_book, tmp_path: Path):
    book = run_book.RunBook(tmp_path / "runs.json", "kind", {}, budget=10.0)
    book.rows = [{"way": "slow", "seed": 0, "top1": 0.5, "wall": 30.0}, {"way": "quick", "top1": 0.5, "wall": 0.1}]
    pool = WorkerPool(lambda _: {"top1": 0.5, "wall": 0.1})
    book.make(pool, [{"way": "quick", "seed": 1}])
    for way in ("slow", "unknown"):
        with pytest.raises(BudgetSpent):
            book.make(pool, [{"way": way, "seed": 1}])
    assert len(book.rows) == 3


def test_a_run_that_cannot_be_made_is_told_of(run_book, tmp_path: Path):
    def make(key: dict) -> dict:
        raise LowRankError(f"{key['way']} cannot be made.")

    book, failed = run_book.RunBook(tmp_path / "runs.json", "kind", {}), []
    keys = [{"way": "thin", "seed": 0}]
    book.make(WorkerPool(make), keys, failed=lambda key, error: failed.append((key, str(error))))
    assert failed == [(keys[0], "thin cannot be made.")]
    with pytest.raises(LowRankError, match="thin cannot be made"):
        book.make(WorkerPool(make), keys)


def test_pairs_are_judged_together(run_book):
    draw = torch.Generator().manual_seed(0)
    runs = {
        name: [run_book.kept_answers(torch.rand(2000, generator=draw) < share) for _ in range(4)]
        for name, share in {"best": 0.9, "good": 0.8, "poor": 0.5}.items()
    }
    assert run_book.answers_of(json.loads(json.dumps(runs["good"]))).shape == (4, 2000)
    pairs = [("best", "good"), ("good", "best"), ("best", "absent"), ("good", "good")]
    better, worse, same = run_book.paired_answers(pairs, runs, margin=0.5, alpha=0.01, resamples=2000)
    assert (better["verdict"], worse["verdict"], same["verdict"]) == ("yes", "no", "undecided")
    early = run_book.paired_answers(pairs, runs, margin=0.5, alpha=0.01, least_runs=5, resamples=100)
    assert {one["verdict"] for one in early} == {"too few runs"}
    assert better["corrected"] == pytest.approx(3 * better["p"])
    assert better["low"] < better["gap"] < better["high"]


def diverges() -> dict:
    raise NotFiniteError("the loss is not finite.")


def test_each_way_trains_at_the_rate_that_its_tries_found(run_book, tmp_path: Path):
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
