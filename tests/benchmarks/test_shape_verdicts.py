"""Learned shapes and rivals at equal MACs and at equal time: what takes less time is no equal."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from lowrank_cnn.choose.verdict import DIVERGED, EARLY, NO, OPEN, YES


@pytest.fixture(scope="module")
def shape_verdicts(benchmark_module):
    return benchmark_module("shape_verdicts")


@pytest.fixture
def book(benchmark_module, tmp_path):
    run_book = benchmark_module("run_book")
    found = run_book.RunBook(tmp_path / "record.json", "learned-shapes", {})

    def add(way: str, accuracy: float, ms: float | None, seeds: int = 4, dense: float = 4.0) -> None:
        """Runs of one way, of which one in so many images is right, in the same order for all ways."""
        kept = run_book.kept_answers(torch.arange(2000) < round(2000 * accuracy))
        for seed in range(seeds):
            row: dict[str, Any] = {"way": way, "phase": "full", "rate": 1.0, "seed": seed, "macs": 0.5, **kept}
            found.rows.append(row if seed or ms is None else {**row, "ms": {"ours": ms, "dense": dense}})

    found.runs = add
    return found


@pytest.mark.parametrize(
    ("accuracy", "ms", "seeds", "verdict"),
    [
        (0.60, 2.0, 4, YES),
        (0.60, 2.5, 4, YES),  # the rival has more time and is worse
        (0.60, 1.9, 4, OPEN),  # and it might win with as much time
        (0.80, 2.0, 4, NO),
        (0.80, 1.5, 4, NO),
        (0.80, 2.1, 4, OPEN),
        (0.60, 2.0, 3, EARLY),
    ],
)
def test_verdicts_depend_on_time(shape_verdicts, book, accuracy, ms, seeds, verdict):
    book.runs("thin", accuracy, ms, seeds)
    book.runs("proximal", 0.7, 3.0, dense=6.0)  # a slower run: times are shares of the dense network's
    (one,) = shape_verdicts.judged(book)["equal_time"]
    assert (one["ours"], one["theirs"], one["verdict"]) == ("proximal", "thin", verdict)
    assert one["time"] == pytest.approx(ms / 2)


def test_the_size_of_a_rival_with_the_nearest_time_is_taken(shape_verdicts, book):
    book.runs("thin", 0.6, 1.5)
    book.runs("thin:0.7", 0.65, 2.01)
    book.runs("proximal", 0.7, 2.0)
    book.runs("energy", 0.7, None)  # not timed
    found = shape_verdicts.judged(book)
    assert [(one["ours"], one["theirs"]) for one in found["equal_time"]] == [("proximal", "thin:0.7")]
    assert [(one["ours"], one["theirs"]) for one in found["answers"]] == [("proximal", "thin"), ("energy", "thin")]
    assert "may take as long" not in shape_verdicts.shown(book, found)


def test_a_size_is_proposed_where_times_differ(shape_verdicts, book):
    book.runs("thin", 0.6, 1.6)
    book.runs("proximal", 0.7, 2.0)
    told = shape_verdicts.shown(book, shape_verdicts.judged(book))
    assert "thin takes 0.80 of the time of proximal: --ways thin:0.625 may take as long." in told


def test_a_way_that_diverged_once_is_not_judged_by_its_other_runs(shape_verdicts, book):
    book.runs("thin", 0.6, 2.0)
    book.runs("proximal", 0.7, 2.0)
    book.rows.append({"way": "proximal", "phase": "full", "rate": 1.0, "seed": 4, "top1": None, "diverged": True})
    found = shape_verdicts.judged(book)
    assert {one["verdict"] for one in (*found["answers"], *found["equal_time"])} == {DIVERGED}


def test_names_of_ways(shape_verdicts):
    assert shape_verdicts.read_way("thin:0.6") == "thin:0.6"
    assert shape_verdicts.needs("again:0.6") == ("proximal:0.6",)
    for text in ("thinner", "thin:", "thin:2", "thin:0.6x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of dense, thin"):
            shape_verdicts.read_way(text)
