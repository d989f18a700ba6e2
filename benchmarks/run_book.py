"""The record of many training runs: written after each run, continued by the next start, within a time budget."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_record
from lowrank_cnn.frontier.record import pack, unpack
from lowrank_cnn.frontier.resampling import RESAMPLES, compare
from lowrank_cnn.system.statistics import holm
from lowrank_cnn.system.text import duration

YES, NO, OPEN = "yes", "no", "undecided"


class BudgetSpent(Exception):
    """The next run would not end within the budget."""


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

    def run(self, make: Callable[[], Mapping[str, Any]], **key: Any) -> dict[str, Any]:
        """The row of a key: the one in the record, or what `make` gives, written at once."""
        known = self.find(**key)
        if known is not None:
            return known
        spent = time.monotonic() - self.began
        if spent + self._expected(key) > self.budget:
            raise BudgetSpent
        start = time.monotonic()
        row = {**key, **make()}
        row["wall"] = round(time.monotonic() - start, 2)
        self.rows.append(row)
        self.save()
        shown = " ".join(map(str, key.values()))
        print(f"[{duration(spent + row['wall'])}] {shown}: {_told(row)} in {duration(row['wall'])}", flush=True)
        return row

    def _expected(self, key: Mapping[str, Any]) -> float:
        """The longest run of the same way (the first value of the key), else the longest of all."""
        name = next(iter(key))
        alike = [row["wall"] for row in self.rows if row.get(name) == key[name]]
        return max(alike or [row["wall"] for row in self.rows], default=0.0)

    def save(self, **more: Any) -> None:
        write_record(self.path, self.kind, about=dict(self.about), **more, rows=self.rows, by_line="rows")


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
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """For each pair (ours, theirs): is ours better by the margin? Intervals resample seeds and images.

    Verdicts follow Holm's correction over all pairs: yes where p is below alpha, no where the interval lies below
    the margin.
    """
    both = [(a, b) for a, b in pairs if runs.get(a) and runs.get(b)]
    how = {"margin": margin, "alpha": alpha, "resamples": resamples}
    gaps = [compare(answers_of(runs[a]), answers_of(runs[b]), **how) for a, b in both]
    found = []
    for (ours, theirs), gap, p in zip(both, gaps, holm([gap.p for gap in gaps]), strict=True):
        verdict = YES if p < alpha else NO if gap.high < margin else OPEN
        values = {"gap": gap.points, "low": gap.low, "high": gap.high, "p": gap.p, "corrected": p}
        found.append({"ours": ours, "theirs": theirs, "margin": margin, **values, "verdict": verdict})
    return found
