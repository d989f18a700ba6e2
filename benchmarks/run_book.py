"""The record of many training runs: written after each run, continued by the next start, within a time budget.

Runs are made one after the other, or by several processes side by side. Either way this process writes the record.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_record
from lowrank_cnn.choose.frontier import pack, unpack
from lowrank_cnn.choose.runs import WorkerPool
from lowrank_cnn.choose.trace import BudgetSpent
from lowrank_cnn.choose.verdict import EARLY, NO, OPEN, YES, paired_gap, read_questions
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.numbers import holm
from lowrank_cnn.core.text import duration, p_value, text_table
from lowrank_cnn.data import Data
from lowrank_cnn.train.failure import NotFiniteError

KEYS = ("phase", "way", "init", "rate", "seed")
"""The names that keys are made of."""
TRY, FULL = "try", "full"
"""Phases of a run: on held-out training images, to find a learning rate, and on the test images."""
TUNING_SEED = 1000
"""The seed of the first try of each rate."""
Key = dict[str, Any]
Row = dict[str, Any]


@dataclass
class RunBook:
    """Rows of one benchmark, each with a key such as way and seed.

    `about` holds the settings that all rows share. A record with other settings is not continued. `environments`
    lists the environments of its runs, oldest first.
    """

    path: Path
    kind: str
    about: Mapping[str, Any]
    budget: float = float("inf")
    rows: list[dict[str, Any]] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.reload()

    def reload(self) -> None:
        """Read the rows on disk: another process may have added some."""
        if not self.path.exists():
            return
        known = json.loads(self.path.read_text())
        plain = json.loads(json.dumps(dict(self.about)))
        if known.get("kind") != self.kind or known.get("about") != plain:
            sys.exit(f"{self.path} holds runs with other settings: name another file by --out.")
        self.rows, self.environments = known["rows"], known.get("environments", [known["environment"]])

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row of a key, if it was run."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def make(
        self,
        pool: WorkerPool[Key, Row],
        keys: Iterable[Key],
        *,
        ready: Callable[[Key], bool] = lambda _: True,
        failed: Callable[[Key, LowRankError], None] | None = None,
    ) -> None:
        """Make the runs of these keys that are missing; each row is written as soon as the rows before it are.

        A key waits until it is `ready`. `failed` is called with the error of a run that cannot be made; without it
        the error is raised. Raises `BudgetSpent` if the next run would not end in time.
        """
        refused: list[Key] = []

        def may_begin(key: Key) -> bool:
            if time.monotonic() - self.began + self._expected(key) <= self.budget:
                return True
            refused.append(key)
            return False

        missing = [key for key in keys if self.find(**key) is None]
        for key, made in pool.results(missing, ready=ready, may_begin=may_begin):
            if not isinstance(made, LowRankError):
                self.add({**key, **made})
            elif failed is None:
                raise made
            else:
                failed(key, made)
        if refused:
            raise BudgetSpent

    def add(self, row: Row) -> None:
        """Write a new row and print it."""
        self.rows.append(row)
        self.note_machine()
        self.save()
        shown = " ".join(str(value) for name, value in row.items() if name in KEYS)
        spent = duration(time.monotonic() - self.began)
        print(f"[{spent}] {shown}: {_told(row)} in {duration(row['wall'])}", flush=True)

    def _expected(self, key: Mapping[str, Any]) -> float:
        """The longest run of the same way (the first value of the key), else the longest of all."""
        name = next(iter(key))
        alike = [row["wall"] for row in self.rows if row.get(name) == key[name]]
        return max(alike or [row["wall"] for row in self.rows], default=0.0)

    def note_machine(self) -> None:
        """Add the environment of this process, which has made a run or measured a time."""
        now = environment()
        if now["commit"] not in [known["commit"] for known in self.environments]:
            self.environments.append(now)

    def save(self, **more: Any) -> None:
        """Write the record. A machine that only computes verdicts is not added to its environments."""
        if not self.environments:
            self.note_machine()
        known = {"environment": self.environments[-1], "environments": self.environments}
        kept = {"about": dict(self.about), **more, **known}
        write_record(self.path, self.kind, **kept, rows=self.rows, by_line="rows")

    def of(self, phase: str, **key: Any) -> list[Row]:
        """The rows of one phase with these values; rows of records without tries are full runs."""
        known = [row for row in self.rows if row.get("phase", FULL) == phase]
        return [row for row in known if all(row.get(name) == value for name, value in key.items())]


def make_tuned(
    book: RunBook,
    pool: WorkerPool[Key, Row],
    name: str,
    values: Sequence[str],
    *,
    rates: Sequence[float],
    tries: int,
    seeds: Iterable[int],
    **how: Any,
) -> None:
    """Try every rate for each value of a key, then train each in full at its own best rate.

    Seeds come in turns: the first of all values, then the second. One rate alone is not tried. A value whose tries
    all failed gets no full runs. `how` goes to `RunBook.make`.
    """
    tried = [
        {name: value, "phase": TRY, "rate": rate, "seed": TUNING_SEED + place}
        for place in range(tries)
        for rate in rates
        for value in values
    ]
    if len(rates) > 1:
        book.make(pool, tried, **how)
    found = {value: book.of(TRY, **{name: value}) for value in values}
    best = {value: best_rate(rows) for value, rows in found.items() if rows}
    best = best if len(rates) > 1 else dict.fromkeys(values, rates[0])
    full = [{name: value, "phase": FULL, "rate": best[value], "seed": seed} for seed in seeds for value in best]
    book.make(pool, full, **how)


def compare_ways(
    book: RunBook,
    bench: Callable[[Key], Row],
    ways: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    asked: Mapping[str, Any],
    options: argparse.Namespace,
) -> None:
    """Try the factors of a question for each way, train each with all seeds, and answer it for these pairs."""
    seeds = range(1, options.seeds + 1)
    try:
        with WorkerPool(bench, options.processes) as pool:
            make_tuned(book, pool, "way", ways, rates=asked["factors"], tries=1, seeds=seeds)
    except BudgetSpent:
        print(f"The budget of {options.budget:.0f} s is spent: the same command continues.")
    runs = {way: [row for row in book.of(FULL, way=way) if row["top1"] is not None] for way in ways}
    how = {"margin": asked["margin"], "alpha": read_questions()["alpha"], "least_runs": asked["seeds"]}
    answers = paired_answers(pairs, runs, **how)
    means = {way: fmean(row["top1"] for row in rows) for way, rows in runs.items() if rows}
    book.save(summary=means, answers=answers)
    print(means, answer_table(answers), sep="\n")


def split_for_tries(data: Data, train: int | None = None, share: float = 0.1) -> tuple[Data, Data]:
    """The images of full runs, and those of tries, whose test images are held out from training.

    With `train`, both train on this many images, and all others are held out; else tries hold out a share.
    """
    total = len(data.train)
    if train is not None and not 0 < train < total:
        raise LowRankError(f"--train is less than the {total} training images there are, not {train}.")
    held_out = data.holdout(total - train if train else round(share * total), 0)
    return (replace(data, train=held_out.train) if train else data), held_out


def best_rate(rows: Sequence[Row]) -> float:
    """The rate with the best mean over its tries; a diverged try counts as zero."""
    means = {
        rate: fmean(0.0 if row.get("diverged") else row["top1"] for row in rows if row["rate"] == rate)
        for rate in {row["rate"] for row in rows}
    }
    return max(sorted(means), key=means.__getitem__)


def finite(run: Callable[[], Row]) -> Row:
    """The row of a run, or the row of one whose loss was not finite."""
    try:
        return run()
    except NotFiniteError:
        return {"top1": None, "diverged": True}


def timed(make: Callable[[], Row]) -> Row:
    """A row with the seconds that it took: the `wall` of a run."""
    start = time.monotonic()
    return {**make(), "wall": round(time.monotonic() - start, 2)}


def _told(row: Mapping[str, Any]) -> str:
    return "the loss was not finite" if row["top1"] is None else f"{100 * row['top1']:.2f}%"


def kept_answers(right: Tensor) -> dict[str, Any]:
    """The test images that a run got right, as bits in text, with the accuracy."""
    bits = base64.b64encode(pack(right)).decode()
    return {"top1": float(right.double().mean()), "images": len(right), "right": bits}


def answers_of(rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """The answers [runs, images] of some rows."""
    return torch.stack([unpack(base64.b64decode(row["right"]), row["images"]) for row in rows])


def paired_answers(
    pairs: Sequence[tuple[str, str]],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    margin: float,
    alpha: float,
    least_runs: int = 1,
) -> list[dict[str, Any]]:
    """For each pair (ours, theirs): is ours better by the margin? Intervals are over seeds and images.

    Verdicts use Holm's correction over all pairs: yes if p is below alpha, no if the interval lies below the
    margin. With fewer than `least_runs` of either there is no verdict.
    """
    both = [(a, b) for a, b in pairs if runs.get(a) and runs.get(b)]
    how = {"margin": margin, "alpha": alpha}
    gaps = [paired_gap(answers_of(runs[a]), answers_of(runs[b]), **how) for a, b in both]
    found = []
    for (ours, theirs), gap, p in zip(both, gaps, holm([gap.p for gap in gaps]), strict=True):
        verdict = YES if p < alpha else NO if gap.high < margin else OPEN
        verdict = EARLY if min(len(runs[ours]), len(runs[theirs])) < least_runs else verdict
        values = {"gap": gap.points, "low": gap.low, "high": gap.high, "p": gap.p, "corrected": p}
        found.append({"ours": ours, "theirs": theirs, "margin": margin, **values, "verdict": verdict})
    return found


def answer_table(answers: Sequence[Mapping[str, Any]]) -> str:
    """The answers of `paired_answers` as text."""
    lines = [
        (
            f"{one['ours']} over {one['theirs']} by {one['margin']:g}",
            f"{one['gap']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})",
            p_value(one["corrected"]),
            one["verdict"],
        )
        for one in answers
    ]
    return text_table(("question", ">gap, 99% interval", ">p, corrected", "verdict"), lines)
