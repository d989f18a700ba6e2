"""Verdicts on the questions of a record, and how certain a difference of two designs is."""

from __future__ import annotations

import datetime
import math
import shutil
from dataclasses import replace

import pytest
import torch

from lowrank_cnn.choose.candidates import CANDIDATES, FAMILIES, Design
from lowrank_cnn.choose.frontier import DesignRow, Frontier, RateTry, load_frontier
from lowrank_cnn.choose.verdict import (
    DIVERGED,
    EARLY,
    NO,
    SEARCHED,
    UNEQUAL,
    UNTUNED,
    YES,
    PairedGap,
    add_answers,
    answer,
    paired_gap,
    read_questions,
    time_share,
)
from lowrank_cnn.core.numbers import student_t

FEW = {"dense": (0.93, 1.0, 2), "dense@0.5": (0.9, 0.5, 2)}
DENSE = {"dense": (0.93, 1.0, 32), "dense@0.5": (0.9, 0.5, 32)}


def test_the_questions_name_families_and_designs_that_exist():
    questions = read_questions()
    assert datetime.date.fromisoformat(questions["date"])
    assert set(questions["designs"]) == {*CANDIDATES, "learned"}  # no design any more
    assert {one["family"] for one in questions["sets"]} == set(FAMILIES)
    assert questions["alpha"] == 0.01


def test_a_design_is_held_against_the_thin_network_that_takes_as_long(make_frontier):
    found = make_frontier(
        {"dense": (0.93, 1.0, 32), "dense@0.7": (0.8, 0.7, 32), "dense@0.5": (0.7, 0.5, 32), "lr": (0.88, 0.5, 32)}
    )
    better, faster = answer(found)
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
    better, _ = answer(found)
    assert better.control == "dense-64s@0.7"


def timed_again(found: Frontier, **shares: tuple[float, ...]) -> None:
    """Times from three processes, as shares of the dense network's."""
    for row in found.rows:
        of_dense = shares.get(row.name.replace("@0.", "_"), 3 * (row.timing.ratio,))
        row.timing.processes = [[2 * share, 2.0] for share in of_dense]


def test_the_time_of_a_verdict_has_its_interval_over_processes(make_frontier):
    found = make_frontier({**DENSE, "lr": (0.88, 0.5, 32)})
    better, _ = answer(found)
    assert (better.time, better.time_within) == (1.0, None)  # one timing, as in older records
    timed_again(found, lr=(0.6, 0.5, 0.5), dense_5=(0.61, 0.5, 0.49))
    better, _ = answer(found)
    logs = torch.tensor([0.6 / 0.61, 1.0, 0.5 / 0.49]).log()
    reach = student_t(0.975, 2) * float(logs.std()) / 3**0.5
    assert better.control == "dense@0.5"
    assert better.time == pytest.approx(math.exp(logs.mean()))
    assert better.time_within == pytest.approx((better.time * math.exp(-reach), better.time * math.exp(reach)))
    found.rows[2].timing.processes.pop(0)  # it came later
    share, low, high = time_share(found.rows[2], found.rows[1])
    assert low < share < high
    assert share == pytest.approx((0.5 / 0.49) ** 0.5)


def test_what_times_leave_open_counts_against_the_design(make_frontier):
    thin = {"dense@0.7": (0.9, 0.63, 32), "dense@0.6": (0.8, 0.52, 32), "dense@0.5": (0.7, 0.5, 32)}
    found = make_frontier({"dense": (0.93, 1.0, 32), **thin, "lr": (0.88, 0.5, 32)})
    assert [one.control for one in answer(found)] == ["dense@0.5", "dense@0.7"]
    timed_again(found, dense_6=(0.51, 0.52, 0.53), dense_7=(0.61, 0.63, 0.65))
    # dense@0.6 may take as long as lr, and dense@0.7 less than 1.25 times as long.
    assert [one.control for one in answer(found)] == ["dense@0.6", "dense"]
    # dense@0.6 surely takes 1.25 times as long, but dense@0.7 is larger and faster.
    timed_again(found, dense_6=(0.699, 0.7, 0.701), dense_7=(0.61, 0.63, 0.65))
    assert [one.control for one in answer(found)] == ["dense@0.5", "dense"]
    timed_again(found, dense_6=(0.519, 0.52, 0.521), dense_7=(0.629, 0.63, 0.631))
    assert [one.control for one in answer(found)] == ["dense@0.5", "dense@0.7"]


def test_a_design_with_branches_is_held_against_dense_networks_with_branches(
    make_frontier,
):
    dense = {"dense": (0.93, 1.0, 32), "dense@0.5": (0.7, 0.5, 32)}
    alone = make_frontier({**dense, "lr-branches": (0.88, 0.5, 32)})
    assert answer(alone) == []
    row = DesignRow(Design("dense-branches@0.5", "dense(branches)"), 10**6, 10**5)
    row.timing, row.runs = alone.rows[1].timing, alone.rows[1].runs
    alone.rows.append(row)
    (better,) = answer(alone)
    assert better.control == "dense-branches@0.5"


def fewer_runs(found: Frontier) -> None:
    found.rows[2].runs.pop()


def tuned(found: Frontier) -> None:
    found.rows[2].tries = [RateTry(0.5, [0.8]), RateTry(1.0, [0.9])]


def untuned(found: Frontier) -> None:
    for row in found.rows:
        row.tries = []


def diverged(found: Frontier) -> None:
    found.rows[2].failed = [33]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(id, NO), (untuned, UNTUNED), (fewer_runs, EARLY), (tuned, UNEQUAL), (diverged, DIVERGED)],
)
def test_there_is_no_verdict_before_all_runs_are_made_alike(make_frontier, change, verdict):
    found = make_frontier({**DENSE, "lr": (0.7, 0.5, 32)})
    change(found)
    assert [one.verdict for one in answer(found)] == [verdict, verdict]


def test_what_was_not_asked_is_not_judged(make_frontier):
    found = make_frontier({"dense": (0.9, 1.0, 2), "lr-new": (0.9, 0.5, 2)})
    assert answer(found) == []
    found.about["family"] = "vgg11"
    assert answer(found) == []


def test_questions_on_one_network_and_its_images_are_corrected_together_in_whatever_folder(make_frontier):
    found = make_frontier({**FEW, "lr": (0.91, 0.5, 2)})
    alone = add_answers(found)
    for name, about in (("same", {}), ("other", {"family": "nin"}), ("smaller", {"network": {"base": 0.5}})):
        other = replace(found, folder=found.folder.with_name(name), about=found.about | about)
        shutil.copytree(found.folder, other.folder)
        other.save()
    (found.folder.with_name("damaged")).mkdir()
    (found.folder.with_name("damaged") / "frontier.json").write_text("{")
    together = answer(found)
    assert [one.p for one in together] == [one.p for one in alone]
    smallest = min(range(len(alone)), key=lambda place: alone[place].p)
    assert 0 < alone[smallest].corrected < 0.5
    assert together[smallest].corrected == pytest.approx(2 * alone[smallest].corrected)  # twice as many questions


def test_what_weakens_a_verdict_is_said_beside_it(make_frontier):
    found = make_frontier({**FEW, "dense@0.4": (0.95, 0.4, 2), "lr": (0.7, 0.5, 2)})
    for row in found.rows:
        row.tries = [RateTry(rate, [0.9]) for rate in (0.5, 1.0, 2.0)]
    found.rows[3].rate = 2.0
    (better, _), above = answer(found), found.top1(found.rows[2]) - found.top1(found.rows[1])
    assert better.control == "dense@0.5"
    assert better.notes == (
        "the best rate of lr, 2, is at the edge of those tried",
        f"dense@0.4, with fewer MACs, is {above:.2f} points above dense@0.5",
    )
    assert better.params == pytest.approx(1.0)
    found.rows[3].rate = 1.0
    found.rows.pop(2)
    assert answer(found)[0].notes == ()


def test_a_smaller_network_of_another_record_counts_if_it_was_trained_alike(make_frontier):
    found = make_frontier({**FEW, "dense@0.4": (0.95, 0.4, 2), "lr": (0.7, 0.5, 2)})
    other = replace(found, folder=found.folder.with_name("other"), rows=[found.rows.pop(2)])
    shutil.copytree(found.folder, other.folder)
    for teacher, said in ((None, 1), ("dense", 0)):
        other.about = found.about | {"teacher": teacher}
        other.save()
        assert sum("dense@0.4, with fewer MACs" in note for note in answer(found)[0].notes) == said


def test_each_rival_of_a_search_is_a_question(make_frontier):
    rows = {
        "dense": (0.93, 1.0, 16),
        "dense-3x3": (0.95, 0.5, 16),
        "dense@0.5": (0.7, 0.4, 16),
        "dense@0.75": (0.8, 0.7, 0),
        "lr": (0.9, 0.5, 16),
    }
    found = make_frontier(rows, family="nin")
    answers = {one.control: one for one in answer(found)}
    asked = {name: (one.question, one.time, one.verdict) for name, one in answers.items()}
    assert asked == {"dense-3x3": (SEARCHED, 1.0, NO), "dense@0.5": (SEARCHED, 1.25, YES)}
    assert answers["dense@0.5"].notes[0] == "dense@0.5 takes only 0.80 of the time"


def test_answers_are_kept_in_the_record(make_frontier):
    found = make_frontier({"dense": (0.93, 1.0, 4), "lr": (0.88, 0.5, 4)})
    add_answers(found)
    kept = load_frontier(found.folder).answers
    assert {one["design"] for one in kept} == {"lr"}


def answers(runs: int, share: float, seed: int, *, noise: float = 0.1) -> torch.Tensor:
    hard = torch.rand(2000, generator=torch.Generator().manual_seed(0))  # the same images for all
    draw = torch.Generator().manual_seed(seed)
    offsets = 0.02 * torch.randn(runs, 1, generator=draw)  # some runs are luckier than others
    return hard + noise * torch.randn(runs, 2000, generator=draw) + offsets < share


def test_a_gap_that_is_there_is_found_and_one_that_is_not_is_not():
    same = paired_gap(answers(16, 0.9, 1), answers(16, 0.9, 2), margin=0.0, alpha=0.01)
    assert same.low < 0 < same.high
    assert same.p > 0.01
    better = paired_gap(answers(16, 0.95, 1), answers(16, 0.85, 2), margin=0.2, alpha=0.01)
    assert better.low > 0.2
    assert better.p < 0.001
    assert better.points == pytest.approx(10, abs=2.5)


@pytest.mark.parametrize(
    ("runs", "images", "by_run", "by_image"),
    [(8, 1000, 0.03, 0.3), (8, 1000, 0.2, 0.0), (8, 1000, 0.0, 0.3), (4, 1000, 0.05, 0.2), (2, 1000, 0.05, 0.3)],
)
def test_intervals_hold_the_true_gap_as_often_as_they_say(runs: int, images: int, by_run: float, by_image: float):
    """Two equally good designs: runs differ, images suit one of them, and single answers are chance."""
    draw = torch.Generator().manual_seed(0)

    def answers_to(difficulty: torch.Tensor) -> torch.Tensor:
        suits = by_image * torch.randn(images, generator=draw)
        luck = by_run * torch.randn(runs, 1, generator=draw)
        return torch.rand(runs, images, generator=draw) < torch.sigmoid(difficulty + suits + luck)

    trials, held, false = 300, 0, 0
    for _ in range(trials):
        difficulty = 2.2 + 2.2 * torch.randn(images, generator=draw)
        gap = paired_gap(answers_to(difficulty), answers_to(difficulty), margin=0.0, alpha=0.05)
        held, false = held + (gap.low < 0 < gap.high), false + (gap.p < 0.05)
    assert 0.92 <= held / trials <= 0.99
    assert false / trials <= 0.08


def test_the_spread_of_seeds_is_that_of_students_t():
    """Where images add nothing: a gap of two designs whose runs differ, and whose images are all alike."""
    share = torch.tensor([0.2, 0.4, 0.5, 0.9, 0.6])
    ours = (torch.arange(1000) < 1000 * share[:, None]).repeat_interleave(100, 1)
    gap = paired_gap(ours, ours[:1], margin=0.0, alpha=0.05)
    reach = student_t(0.975, 4) * 100 * float(share.std()) / 5**0.5
    assert (gap.high - gap.low) / 2 == pytest.approx(reach, rel=0.01)


def test_one_image_decides_nothing():
    ours, theirs = torch.ones(3, 1), torch.zeros(3, 1)
    assert paired_gap(ours, theirs, margin=0.2, alpha=0.01) == PairedGap(100.0, -100.0, 100.0, 1.0)


def test_runs_that_all_gave_the_same_answers_have_no_interval():
    ours = answers(1, 0.9, 1).expand(3, -1)
    assert paired_gap(ours, ours, margin=0.2, alpha=0.01) == PairedGap(0.0, 0.0, 0.0, 1.0)
