"""The records in the repository: each verdict follows from its record, each figure from a commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import initialisation, shape_verdicts
from benchmarks.run_book import RunBook
from lowrank_cnn.choose.frontier import ANSWERS, load_frontier
from lowrank_cnn.choose.verdict import answer

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in RESULTS.glob(f"frontier/*/{ANSWERS}")))
def test_every_verdict_follows_from_its_record(folder: str):
    found = load_frontier(RESULTS / "frontier" / folder)
    kept = [{"time_within": None, **one} for one in found.answers]  # older records have one timing, without
    assert_equal(json.loads(json.dumps([asdict(one) for one in answer(found)])), kept)


@pytest.mark.parametrize("pattern", ["initialisation_*.json", "learned_shapes_*.json"])
def test_so_do_verdicts_on_initialisations_and_learned_shapes(pattern: str):
    for path in RESULTS.glob(pattern):
        kept = json.loads(path.read_text())
        book = RunBook(path, kept["kind"], kept["about"])
        learned = "way" in book.rows[0]
        told = shape_verdicts.judged(book) if learned else {"answers": initialisation.judged(book)}
        for name, answers in told.items():
            assert_equal(answers, kept[name])


def assert_equal(told: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """The same words, and the same numbers up to rounding."""
    for again, before in zip(told, kept, strict=True):
        numbers = {name for name, value in before.items() if isinstance(value, float)}
        assert {k: v for k, v in again.items() if k not in numbers} == {
            k: v for k, v in before.items() if k not in numbers
        }
        assert [again[name] for name in numbers] == pytest.approx([before[name] for name in numbers], rel=1e-6)


KNOWN = {
    "cpu_engines.json": 1,
}
"""Records with figures of uncommitted changes, and how many: they were measured while the code was being written,
and are to be measured again, on a CPU. New ones are refused."""


def commits(value: Any) -> Iterator[str]:
    """Every commit in a record, at any depth."""
    if isinstance(value, dict):
        yield from (known for name, known in value.items() if name == "commit" and isinstance(known, str))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from commits(inner)


def test_figures_come_from_a_commit():
    changed = {
        path.relative_to(RESULTS).as_posix(): sum(
            one.endswith("+") for one in commits(json.loads(path.read_text()))
        )
        for path in RESULTS.rglob("*.json")
    }
    assert {name: n for name, n in changed.items() if n} == KNOWN
