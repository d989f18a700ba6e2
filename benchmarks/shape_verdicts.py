"""The ways that `learned_shapes` compares, and which is better: at equal MACs, and at equal measured time.

A rival with as many MACs may take more or less time. A way can therefore be trained in several sizes: `thin:0.6`
is a thin network with 0.6 of the MACs. At equal time each learned way is compared with the size of a rival whose
time is nearest to its own. A win counts only over a rival that takes as long, or longer, within the tolerance; a
defeat only by one that takes no longer.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from math import log
from statistics import mean, stdev
from typing import Any

from benchmarks.run_book import FULL, TRY, Row, RunBook, answer_table, paired_answers
from lowrank_cnn.choose.verdict import DIVERGED, NO, OPEN, UNTUNED, YES, read_questions
from lowrank_cnn.core.text import text_table

SHAPES = ("kx1", "1xk", "1x1", "kxk")
FIXED = {"strips": ("kx1", "1xk"), "points": ("1x1",)}
"""Fixed shares: the filters beside kxk ones."""
LEARNING: dict[str, dict[str, Any]] = {
    "proximal": {},
    "strips-kxk": {"shapes": ("kx1", "1xk", "kxk")},
}
"""Options of `learn_shapes` for each learned way."""
MECHANISMS, TIMED = ("gates", "loss", "energy", "regrowth"), "latency"
"""Mechanisms that lost to `proximal`, and `proximal` within a share of the time, which lost to fixed strips.

Records have runs of them, but their code was removed.
"""
LEARNED = ("proximal", "again", *MECHANISMS, "strips-kxk", TIMED)
RECORDED = ("dense", "thin", *FIXED, *LEARNED)
WAYS = tuple(way for way in RECORDED if way not in (*MECHANISMS, TIMED))
_TITLES = {"answers": "At equal MACs", "equal_time": "At equal time", "mechanisms": "Ways to learn shapes"}

Runs = Mapping[str, Sequence[Row]]
Answers = list[dict[str, Any]]


def base_way(way: str) -> str:
    """A way without its size.

    >>> base_way("thin:0.6")
    'thin'
    """
    return way.partition(":")[0]


def needs(way: str) -> tuple[str, ...]:
    """The ways that a way needs the result of: `again` has the shapes that `proximal` learned in the same size."""
    return (way.replace("again", "proximal"),) if base_way(way) == "again" else ()


def read_way(text: str) -> str:
    """A way as it is named in the record: `thin`, or `thin:0.6` with another share of the MACs than `--macs`."""
    way, colon, share = text.partition(":")
    if way not in WAYS or (colon and not re.fullmatch(r"0?\.\d+", share)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(WAYS)}, nor one with a size as in thin:0.6"
        )
    return text


def judged(book: RunBook) -> dict[str, Answers]:
    """The answers of a record to the pre-registered questions.

    - `answers`: each learned way against each rival, at equal MACs.
    - `equal_time`: the same at equal time; empty before the networks are timed.
    - `mechanisms`: the mechanism that was kept against the others, by any gap. These pairs are not pre-registered.
    """
    asked, runs = read_questions(), full_runs(book)
    own = asked["learned_shapes"]
    how: dict[str, Any] = {"margin": own["better_by"], "alpha": own["alpha"], "least_runs": own["seeds"]}
    pairs = [(way, rival) for way in LEARNED for rival in own["rivals"]]
    mechanisms = [("proximal", way) for way in MECHANISMS]
    by_any: dict[str, Any] = {**how, "margin": 0.0}
    found = {
        "answers": paired_answers(pairs, runs, **how),
        "equal_time": _at_equal_time(runs, LEARNED, own["rivals"], tolerance=asked["timing"]["tolerance"], **how),
        "mechanisms": paired_answers(mechanisms, runs, **by_any),
    }
    diverged = {row["way"] for row in book.of(FULL) if row["top1"] is None}
    tried = {row["way"] for row in book.of(TRY)}
    for one in (one for answers in found.values() for one in answers):
        if not {one["ours"], one["theirs"]} <= tried:
            one["verdict"] = UNTUNED
        elif diverged & {one["ours"], one["theirs"]}:  # the other runs alone would overrate the way
            one["verdict"] = DIVERGED
    return found


def full_runs(book: RunBook) -> dict[str, list[Row]]:
    """The runs of each way that did not diverge, in the order of the ways."""
    ways = sorted({row["way"] for row in book.of(FULL)}, key=lambda way: (RECORDED.index(base_way(way)), way))
    return {way: [row for row in book.of(FULL, way=way) if row["top1"] is not None] for way in ways}


def _at_equal_time(
    runs: Runs, learned: Sequence[str], rivals: Sequence[str], *, tolerance: float, **how: Any
) -> Answers:
    """The answers for each learned way, in all its sizes, and each rival.

    `time` is the rival's as a share of ours; `how` goes to `paired_answers`.
    """
    times = _times(runs)
    pairs = [
        (way, min(sizes, key=lambda one: abs(log(times[one] / times[way]))))
        for way in times
        for rival in rivals
        if base_way(way) in learned and (sizes := [one for one in times if base_way(one) == rival])
    ]
    found = paired_answers(pairs, runs, **how)
    for one in found:
        one["time"] = times[one["theirs"]] / times[one["ours"]]
        one["tolerance"] = tolerance
        unequal = one["verdict"] == YES and one["time"] < 1 - tolerance
        unequal |= one["verdict"] == NO and one["time"] > 1 + tolerance
        one["verdict"] = OPEN if unequal else one["verdict"]
    return found


def _times(runs: Runs) -> dict[str, float]:
    """Milliseconds of the ways that were timed, each by the network of its first seed.

    Ways that were timed in different runs are compared by the dense network, which every run times beside them.
    """
    found = {way: row["ms"] for way, rows in runs.items() for row in rows if "ms" in row}
    dense = next((ms["dense"] for ms in found.values()), 1.0)
    return {way: ms["ours"] * dense / ms["dense"] for way, ms in found.items()}


def _sizes_to_add(answers: Sequence[Mapping[str, Any]], runs: Runs) -> list[str]:
    """One sentence for each rival whose time differs: the size that would take about as long."""
    told = []
    for one in answers:
        theirs, time = one["theirs"], one["time"]
        macs = runs[theirs][0]["macs"] / time
        if abs(time - 1) > one["tolerance"]:
            add = f": --ways {base_way(theirs)}:{macs:.3f} may take as long" if macs < 1 else ""
            told.append(f"{theirs} takes {time:.2f} of the time of {one['ours']}{add}.")
    return told


def shown(book: RunBook, verdicts: Mapping[str, Answers]) -> str:
    """The record as text: the ways, the answers, and the sizes of rivals that are missing."""
    runs, lines = full_runs(book), []
    times = _times(runs)
    for way, found in runs.items():
        if found:
            scores = [100 * row["top1"] for row in found]
            spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            ms = f"{times[way]:.3f}" if way in times else ""
            macs = f"{mean(row['macs'] for row in found):.3f}"
            lines.append((way, macs, ms, f"{mean(scores):.2f}{spread}", len(found)))
    ways = text_table(("way", ">of the MACs", ">ms", ">top-1 %", ">n"), lines)
    answers = [f"{title}\n{answer_table(verdicts[name])}" for name, title in _TITLES.items() if verdicts[name]]
    return "\n\n".join([ways, *answers, *_sizes_to_add(verdicts["equal_time"], runs)])
