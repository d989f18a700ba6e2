"""The record of many training runs: written after each run, continued by the next start, within a time budget.

Runs are made one after the other, or by several processes side by side. Either way this process writes the record.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_record
from lowrank_cnn.frontier.answering import EARLY, NO, OPEN, YES
from lowrank_cnn.frontier.record import pack, unpack
from lowrank_cnn.frontier.resampling import RESAMPLES, compare
from lowrank_cnn.frontier.tracing import BudgetSpent
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.statistics import holm
from lowrank_cnn.system.text import duration
from lowrank_cnn.train.side_by_side import WorkerPool

KEYS = ("phase", "way", "init", "rate", "seed")
"""The names that keys are made of."""
Key = dict[str, Any]
Row = dict[str, Any]


@dataclass
class RunBook:
    """Rows of one benchmark, each found by its key: the way that was trained, the seed, and the like.

    `about` holds the settings that all rows share. A record with other settings is not continued.
    """

    path: Path
    kind: str
    about: Mapping[str, Any]
    budget: float = float("inf")
    rows: list[dict[str, Any]] = field(default_factory=list)
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
        self.rows = known["rows"]

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

        A key waits until it is `ready`. `failed` is told of a run that cannot be made; without it that is raised.
        Raises `BudgetSpent` where the next run would not end in time.
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
        """Write a new row and tell of it."""
        self.rows.append(row)
        self.save()
        shown = " ".join(str(value) for name, value in row.items() if name in KEYS)
        spent = duration(time.monotonic() - self.began)
        print(f"[{spent}] {shown}: {_told(row)} in {duration(row['wall'])}", flush=True)

    def _expected(self, key: Mapping[str, Any]) -> float:
        """The longest run of the same way (the first value of the key), else the longest of all."""
        name = next(iter(key))
        alike = [row["wall"] for row in self.rows if row.get(name) == key[name]]
        return max(alike or [row["wall"] for row in self.rows], default=0.0)

    def save(self, **more: Any) -> None:
        write_record(self.path, self.kind, about=dict(self.about), **more, rows=self.rows, by_line="rows")


def timed(make: Callable[[], Row]) -> Row:
    """A row with the seconds that it took: the `wall` of a run."""
    start = time.monotonic()
    return {**make(), "wall": round(time.monotonic() - start, 2)}


def _told(row: Mapping[str, Any]) -> str:
    return "the loss was not finite" if row["top1"] is None else f"{100 * row['top1']:.2f}%"


def kept_answers(right: Tensor) -> dict[str, Any]:
    """Which test images a run got right, as bits in text, with the accuracy."""
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
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """For each pair (ours, theirs): is ours better by the margin? Intervals resample seeds and images.

    Verdicts follow Holm's correction over all pairs: yes where p is below alpha, no where the interval lies below
    the margin. With fewer than `least_runs` of either there is none yet.
    """
    both = [(a, b) for a, b in pairs if runs.get(a) and runs.get(b)]
    how = {"margin": margin, "alpha": alpha, "resamples": resamples}
    gaps = [compare(answers_of(runs[a]), answers_of(runs[b]), **how) for a, b in both]
    found = []
    for (ours, theirs), gap, p in zip(both, gaps, holm([gap.p for gap in gaps]), strict=True):
        verdict = YES if p < alpha else NO if gap.high < margin else OPEN
        verdict = EARLY if min(len(runs[ours]), len(runs[theirs])) < least_runs else verdict
        values = {"gap": gap.points, "low": gap.low, "high": gap.high, "p": gap.p, "corrected": p}
        found.append({"ours": ours, "theirs": theirs, "margin": margin, **values, "verdict": verdict})
    return found
