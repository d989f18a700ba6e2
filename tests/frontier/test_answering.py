from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from lowrank_cnn.choose.candidates import CANDIDATES, FAMILIES, LEARNED
from lowrank_cnn.choose.frontier import DesignRow, Frontier, RateTry, load_frontier
from lowrank_cnn.choose.verdict import DIVERGED, EARLY, NO, UNEQUAL, YES, add_answers, answer, read_questions


def test_the_questions_name_families_and_designs_that_exist():
    questions = read_questions()
    assert datetime.date.fromisoformat(questions["date"])
    assert set(questions["designs"]) == {*CANDIDATES, LEARNED}
    assert {one["family"] for one in questions["sets"]} == set(FAMILIES)
    assert questions["alpha"] == 0.01


def test_a_design_is_held_against_the_thin_network_that_takes_as_long(make_frontier: Callable[..., Frontier]):
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


def test_a_larger_dense_network_that_takes_less_time_is_the_rival(make_frontier: Callable[..., Frontier]):
    thin = {"dense@0.7": (0.8, 0.5, 32), "dense-64s@0.7": (0.85, 0.45, 32)}
    found = make_frontier({"dense": (0.93, 1.0, 32), **thin, "lr": (0.7, 0.5, 32)})
    found.rows[2].macs = 600_000
    better, _ = answer(found, resamples=500)
    assert better.control == "dense-64s@0.7"


def test_a_design_with_branches_is_held_against_dense_networks_with_branches(
    make_frontier: Callable[..., Frontier],
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


def test_what_loses_is_said(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 32), "dense@0.5": (0.9, 0.5, 32), "lr": (0.7, 0.5, 32)})
    assert [one.verdict for one in answer(found, resamples=2000)] == [NO, NO]


def test_there_is_no_verdict_before_the_registered_number_of_runs(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 32), "dense@0.5": (0.9, 0.5, 32), "lr": (0.7, 0.5, 31)})
    assert {one.verdict for one in answer(found, resamples=500)} == {EARLY}


def test_there_is_no_verdict_where_one_side_was_tuned_more(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 32), "dense@0.5": (0.9, 0.5, 32), "lr": (0.7, 0.5, 32)})
    tries = [RateTry(0.5, [0.8]), RateTry(1.0, [0.9])]
    for rows, verdict in ((found.rows[2:], UNEQUAL), (found.rows, NO)):
        for row in rows:
            row.tries = tries
        assert {one.verdict for one in answer(found, resamples=500)} == {verdict}


def test_there_is_no_verdict_where_runs_diverged(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 32), "dense@0.5": (0.9, 0.5, 32), "lr": (0.7, 0.5, 32)})
    found.rows[2].failed = [33]
    assert {one.verdict for one in answer(found, resamples=500)} == {DIVERGED}


def test_what_was_not_asked_is_not_judged(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.9, 1.0, 2), "lr-new": (0.9, 0.5, 2)})
    assert answer(found) == []
    assert answer(make_other(found)) == []


def make_other(found: Frontier) -> Frontier:
    return Frontier(found.folder, {**found.about, "family": "vgg11"}, found.images, found.rows)


def test_learned_networks_are_judged_by_their_common_name(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 4), "learned-run7": (0.99, 0.5, 4)})
    assert {one.design for one in answer(found, resamples=500)} == {"learned-run7"}


def test_answers_are_kept_in_the_record(make_frontier: Callable[..., Frontier]):
    found = make_frontier({"dense": (0.93, 1.0, 4), "lr": (0.88, 0.5, 4)})
    add_answers(found, resamples=500)
    assert [one["design"] for one in load_frontier(found.folder).answers] == ["lr", "lr"]
