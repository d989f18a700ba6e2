"""The answer of a comparison: the networks timed once more with their trained weights, a sentence and a table."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowrank_cnn.choose.candidates import DENSE
from lowrank_cnn.choose.choice import Choice, Contender, choose, milliseconds
from lowrank_cnn.choose.comparing import Comparing
from lowrank_cnn.choose.frontier import DesignRow, DesignTime, in_words, kind_of
from lowrank_cnn.core.environment import environment
from lowrank_cnn.core.errors import LowRankError, MissingExtra, option
from lowrank_cnn.core.files import below, write_json
from lowrank_cnn.core.progress import step
from lowrank_cnn.core.text import counted, text_table
from lowrank_cnn.train.run_folder import load_record


@dataclass(frozen=True)
class Comparison:
    """The answer: a sentence, a table, and a folder with every run, the record, a picture and a page.

    `winner` is the run folder of the network to take, ready for `lr.export`.
    """

    folder: Path
    choice: Choice
    table: list[dict[str, Any]]
    remarks: tuple[str, ...]
    winner: Path
    picture: Path | None
    page: Path | None

    @property
    def sentence(self) -> str:
        return self.choice.sentence

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The headings and lines of the table."""
        lines = []
        for row in self.table:
            accuracies = (row["accuracy"], row["held_out"])
            shown = ["" if share is None else f"{100 * share:.1f}%" for share in accuracies]
            lines.append((row["network"], f"{row['macs']:.2f}", milliseconds(row["ms"]), *shown, str(row["runs"])))
        return ("network", "MACs", "time", "test", "held out", "runs"), lines

    def __str__(self) -> str:
        names, lines = self.rows()
        table = text_table([names[0], *(f">{name}" for name in names[1:])], lines)
        return "\n".join([table, "", self.sentence, *self.remarks])

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON can hold."""
        gap = self.choice.gap
        return {
            "sentence": self.sentence,
            "take": self.choice.taken.name,
            "decided": self.choice.decided,
            "gap": gap and {"points": gap.points, "low": gap.low, "high": gap.high},
            "rows": self.table,
            "remarks": list(self.remarks),
            "folder": str(self.folder),
            "winner": str(self.winner),
            "picture": self.picture and str(self.picture),
            "page": self.page and str(self.page),
        }


def answer(comparing: Comparing, names: Sequence[str]) -> Comparison:
    rows = [comparing.rows[name] for name in names if not comparing.rows[name].failed]
    runs = min((len(row.runs) for row in rows), default=0)
    if not runs:
        raise LowRankError(f"no network was trained in the time: give more {option('minutes')}.")
    step("the trained networks are timed")
    _time_trained(comparing, rows)
    contenders = [
        Contender(
            in_words(row),
            kind_of(row),
            comparing.ms(row),
            sum(run.held_out or 0.0 for run in row.runs[:runs]) / runs,
            comparing.found.right_answers(row)[:runs],
        )
        for row in rows
    ]
    per_run = sum(run.wall for row in rows for run in row.runs[:runs]) / runs / 60
    spent = (comparing.spent + time.monotonic() - comparing.began) / 60
    epochs, usual = comparing.plan["epochs"], comparing.recipe.epochs
    length = f"{epochs} of {counted(usual, 'epoch')}" if epochs < usual else ""
    choice = choose(
        contenders, comparing.wish, minutes=lambda more: spent + (more - runs) * per_run, length=length
    )
    taken = next(row for row in rows if in_words(row) == choice.taken.name)
    winner = _copy_winner(comparing, taken)
    comparing.keep(sentence=choice.sentence)
    picture, page = _picture(comparing), _page(comparing, choice.sentence)
    return Comparison(
        comparing.found.folder,
        choice,
        _table(comparing, rows, contenders),
        _remarks(comparing, choice, names),
        winner,
        picture,
        page,
    )


def _time_trained(comparing: Comparing, rows: Sequence[DesignRow]) -> None:
    """All finalists once more, in turns, with their trained weights and, in an engine, their very files."""
    made, target = {}, comparing.target
    for row in rows:
        seed = row.runs[0].seed
        folder = comparing.folder(row, seed)
        if target.engine and (files := sorted(folder.glob("net.*"))):
            made[row.name] = next(f for f in files if f.suffix == target.suffix)
            continue
        made[row.name] = comparing.prepared(comparing.trained(row, seed).network, row.name)
    times = target.times(made, comparing.images, repeats=21)
    dense = times[DENSE.name].ms if DENSE.name in times else next(iter(times.values())).ms
    for row in rows:
        sample, (choice, tries) = times[row.name], target.choice_of(made[row.name])
        row.timing = DesignTime(sample.ms, sample.low, sample.high, dense, comparing.batch, choice, tries)
        _write_timings(comparing, row)
    comparing.keep()


def _write_timings(comparing: Comparing, row: DesignRow) -> None:
    """A record of the time beside that of each run, for the page."""
    assert row.timing is not None
    target, total = comparing.target, {"ms": row.timing.ms, "low": row.timing.low, "high": row.timing.high}
    values = {"kind": "timing", "input": list(comparing.images.shape), "total": total}
    values |= {"macs": row.macs * len(comparing.images)}
    values |= {"device": target.device, "runtime": target.engine or "optimize", "environment": environment()}
    for run in row.runs:
        folder = comparing.folder(row, run.seed)
        write_json(folder / "timing.json", {"model": load_record(folder).model, **values})


def _table(
    comparing: Comparing, rows: Sequence[DesignRow], contenders: Sequence[Contender]
) -> list[dict[str, Any]]:
    """All networks, the slowest first; those that were only tried have no test accuracy."""
    dense, by_name = comparing.rows[DENSE.name], {one.name: one for one in contenders}
    table = []
    for row in comparing.rows.values():
        one = by_name.get(in_words(row))
        tried = max((max(each.accuracies, default=0.0) for each in row.tries), default=None)
        table.append(
            {
                "network": in_words(row),
                "kind": kind_of(row),
                "macs": row.macs / dense.macs,
                "params": row.params / dense.params,
                "ms": comparing.ms(row),
                "accuracy": one.accuracy if one else None,
                "held_out": one.held_out if one else tried,
                "runs": one.runs if one else 0,
                "rate": row.rate,
            }
        )
    return sorted(table, key=lambda row: -row["ms"])


def _remarks(comparing: Comparing, choice: Choice, names: Sequence[str]) -> tuple[str, ...]:
    """The limits of the answer, and what a longer budget would decide."""
    told = [choice.more] if choice.more else []
    epochs, usual = comparing.plan["epochs"], comparing.recipe.epochs
    if epochs < usual:
        spent = (comparing.spent + time.monotonic() - comparing.began) / 60
        more = math.ceil(spent * usual / epochs)
        told.append(f"{option('minutes', more)} would allow for {usual} epochs.")
    failed = [in_words(row) for row in map(comparing.rows.__getitem__, names) if row.failed]
    if failed:
        told.append(f"Left out, since a loss was not finite: {', '.join(failed)}.")
    unsteady = [row for row in comparing.rows.values() if row.timing and row.timing.high > 1.5 * row.timing.low]
    if unsteady:
        told.append("Times are unsteady: another process ran meanwhile, so compare again on an idle machine.")
    return tuple(told)


def _copy_winner(comparing: Comparing, row: DesignRow) -> Path:
    """The first run of the network to take, in a folder of its own."""
    source, winner = (
        comparing.folder(row, row.runs[0].seed),
        below(comparing.found.folder, comparing.found.folder / "winner"),
    )
    if winner.exists():
        shutil.rmtree(winner)
    shutil.copytree(source, winner)
    return winner


def _picture(comparing: Comparing) -> Path | None:
    from lowrank_cnn.report.trade import draw_frontier  # report builds on choose

    with suppress(MissingExtra):
        return draw_frontier(comparing.found, comparing.found.folder / "compare.svg")
    return None


def _page(comparing: Comparing, sentence: str) -> Path | None:
    from lowrank_cnn.report import write_report

    with suppress(MissingExtra):
        return write_report(
            [comparing.found.folder / "runs"], comparing.found.folder / "report.html", answer=sentence
        )
    return None
