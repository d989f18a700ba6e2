"""Verdicts on the questions of a record, and how certain a difference of two designs is."""

from __future__ import annotations

import datetime

import pytest
import torch

from lowrank_cnn.choose.candidates import CANDIDATES, FAMILIES, LEARNED
from lowrank_cnn.choose.frontier import DesignRow, Frontier, RateTry, load_frontier
from lowrank_cnn.choose.verdict import (
    DIVERGED,
    EARLY,
    NO,
    UNEQUAL,
    YES,
    add_answers,
    answer,
    compare,
    read_questions,
    resampled_gaps,
)
from lowrank_cnn.core.numbers import student_t

DENSE = {"dense": (0.93, 1.0, 32), "dense@0.5": (0.9, 0.5, 32)}


def test_the_questions_name_families_and_designs_that_exist():
    questions = read_questions()
    assert datetime.date.fromisoformat(questions["date"])
    assert set(questions["designs"]) == {*CANDIDATES, LEARNED}
    assert {one["family"] for one in questions["sets"]} == set(FAMILIES)
    assert questions["alpha"] == 0.01


def test_a_design_is_held_against_the_thin_network_that_takes_as_long(make_frontier):
    found = make_frontier(
        {"dense": (0.93, 1.0, 32), "dense@0.7": (0.8, 0.7, 32), "dense@0.5": (0.7, 0.5, 32), "lr": (0.88, 0.5, 32)}
    )
    better, faster = answer(found, resamples=2000)
    assert (better.question, better.control, better.time) == ("better", "dense@0.5", 1.0)
    assert (faster.question, faster.control) == ("faster", "dense@0.7")
    assert faster.time == pytest.approx(0.5 / 0.7)
    assert better.verdict == faster.verdict == YES
    assert better.corrected >= better.p
    assert better.runs == (32, 32)


def test_a_larger_dense_network_that_takes_less_time_is_the_rival(make_frontier):
    thin = {"dense@0.7": (0.8, 0.5, 32), "dense-64s@0.7": (0.85, 0.45, 32)}
    found = make_frontier({"dense": (0.93, 1.0, 32), **thin, "lr": (0.7, 0.5, 32)})
    found.rows[2].macs = 600_000
    better, _ = answer(found, resamples=500)
    assert better.control == "dense-64s@0.7"


def test_a_design_with_branches_is_held_against_dense_networks_with_branches(
    make_frontier,
):
    dense = {"dense": (0.93, 1.0, 32), "dense@0.5": (0.7, 0.5, 32)}
    alone = make_frontier({**dense, "lr-branches": (0.88, 0.5, 32)})
    assert answer(alone, resamples=500) == []
    row = DesignRow(
        {**alone.rows[1].design, "name": "dense-branches@0.5", "scheme": "dense(branches)"}, 10**6, 10**5
    )
    row.timing, row.runs = alone.rows[1].timing, alone.rows[1].runs
    alone.rows.append(row)
    (better,) = answer(alone, resamples=500)
    assert better.control == "dense-branches@0.5"


def fewer_runs(found: Frontier) -> None:
    found.rows[2].runs.pop()


def tuned(found: Frontier) -> None:
    found.rows[2].tries = [RateTry(0.5, [0.8]), RateTry(1.0, [0.9])]


def all_tuned(found: Frontier) -> None:
    for row in found.rows:
        row.tries = [RateTry(0.5, [0.8])]


def diverged(found: Frontier) -> None:
    found.rows[2].failed = [33]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(id, NO), (all_tuned, NO), (fewer_runs, EARLY), (tuned, UNEQUAL), (diverged, DIVERGED)],
)
def test_there_is_no_verdict_before_all_runs_are_made_alike(make_frontier, change, verdict):
    found = make_frontier({**DENSE, "lr": (0.7, 0.5, 32)})
    change(found)
    assert [one.verdict for one in answer(found, resamples=2000)] == [verdict, verdict]


def test_what_was_not_asked_is_not_judged(make_frontier):
    found = make_frontier({"dense": (0.9, 1.0, 2), "lr-new": (0.9, 0.5, 2)})
    assert answer(found) == []
    found.about["family"] = "vgg11"
    assert answer(found) == []


def test_answers_are_kept_in_the_record(make_frontier):
    found = make_frontier({"dense": (0.93, 1.0, 4), "lr": (0.88, 0.5, 4), "learned-run7": (0.99, 0.5, 4)})
    add_answers(found, resamples=500)
    kept = load_frontier(found.folder).answers
    assert {one["design"] for one in kept} == {"lr", "learned-run7"}  # learned networks by their common name


def answers(runs: int, share: float, seed: int, *, noise: float = 0.1) -> torch.Tensor:
    hard = torch.rand(2000, generator=torch.Generator().manual_seed(0))  # the same images for all
    draw = torch.Generator().manual_seed(seed)
    offsets = 0.02 * torch.randn(runs, 1, generator=draw)  # some runs are luckier than others
    return hard + noise * torch.randn(runs, 2000, generator=draw) + offsets < share


def by_hand(ours: torch.Tensor, theirs: torch.Tensor, resamples: int) -> torch.Tensor:
    """The plain bootstrap: draw images, then runs, and average."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(resamples):
        images = torch.randint(0, ours.shape[1], (ours.shape[1],), generator=draw)
        means = []
        for side in (ours, theirs):
            runs = torch.randint(0, len(side), (len(side),), generator=draw)
            means.append(side[runs][:, images].double().mean())
        found.append(100 * (means[0] - means[1]))
    return torch.stack(found)


def test_resampling_spreads_as_the_plain_bootstrap_does():
    ours, theirs = answers(12, 0.9, 1), answers(12, 0.88, 2)
    fast, plain = resampled_gaps(ours, theirs, resamples=4000, seed=0), by_hand(ours, theirs, 400)
    assert fast.mean() == pytest.approx(float(plain.mean()), abs=0.2)
    # Twelve runs in the plain bootstrap show 11/12 of the variance between runs.
    assert float(plain.std()) == pytest.approx(float(fast.std()), rel=0.15)


def test_machines_that_choose_other_signs_of_eigenvectors_find_the_same(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = answers(4, 0.9, 1), answers(4, 0.88, 2)
    here = resampled_gaps(ours, theirs, resamples=100, seed=0)
    decomposed = torch.linalg.eigh

    def flipped(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = decomposed(matrix)
        return values, vectors * torch.tensor([1.0, -1.0]).repeat(4)

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    torch.testing.assert_close(resampled_gaps(ours, theirs, resamples=100, seed=0), here)


def test_a_gap_that_is_there_is_found_and_one_that_is_not_is_not():
    same = compare(answers(16, 0.9, 1), answers(16, 0.9, 2), margin=0.0, alpha=0.01)
    assert same.low < 0 < same.high
    assert same.p > 0.01
    better = compare(answers(16, 0.95, 1), answers(16, 0.85, 2), margin=0.2, alpha=0.01)
    assert better.low > 0.2
    assert better.p < 0.001
    assert better.points == pytest.approx(10, abs=2.5)


@pytest.mark.parametrize("runs", [4, 16])
def test_a_gap_of_nothing_is_seldom_found(runs: int):
    """Few runs do not tell how much runs differ: a plain bootstrap of four claims a gap too often."""
    trials, alpha = 120, 0.1
    gaps = [
        compare(answers(runs, 0.9, 2 * n), answers(runs, 0.9, 2 * n + 1), margin=0.0, alpha=alpha, resamples=300)
        for n in range(trials)
    ]
    assert sum(gap.p < alpha for gap in gaps) <= 1.5 * alpha * trials
    assert sum(not gap.low < 0 < gap.high for gap in gaps) <= 1.5 * alpha * trials


def test_the_spread_of_seeds_is_that_of_students_t():
    """Where images add nothing: a gap of two designs whose runs differ, and whose images are all alike."""
    share = torch.tensor([0.2, 0.4, 0.5, 0.9, 0.6])
    ours = torch.arange(1000) < 1000 * share[:, None]
    gaps = resampled_gaps(
        ours.repeat_interleave(1000, 1), ours[:1].repeat_interleave(1000, 1), resamples=40000, seed=0
    )
    found = (torch.quantile(gaps, 0.975) - torch.quantile(gaps, 0.025)) / 2
    reach = student_t(0.975, 4) * 100 * float(share.std()) / 5**0.5
    assert float(found) == pytest.approx(reach, rel=0.12)
