"""Accuracy against measured time: the results of every frontier, and the questions asked before the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import mean
from typing import TYPE_CHECKING, Any

from tables import form
from tables.form import NO_RUNS, markdown, source, sources

if TYPE_CHECKING:
    from lowrank_cnn.choose.frontier import DesignRow, Frontier

FOLDER = "frontier"
VERDICT_COLUMNS = ["design", "<asked", "<rival", "gap", "low", "high", "time", "parameters", "p", "<verdict"]
WEAK = {"at the edge": "e", "with fewer MACs": "m", "takes only": "t"}
"""The letters of what weakens a verdict, by words of the note; the page explains them."""


def frontier() -> str:
    """For each record: its networks with all registered runs, by rising time; and where the records are."""
    shown = [found for found in _records() if found.about["family"] != "convnext"]  # depthwise.md has those
    told = [(found, text) for found in shown if (text := "".join(_record(found)))]
    places = {f"{FOLDER}/{found.folder.name}": found.environments for found, _ in told}
    return "\n".join(text for _, text in told) + sources(places) if told else NO_RUNS


def verdicts() -> str:
    """For each record: the command and its verdicts; questions with too few runs are only counted."""
    asked = [found for found in _records() if found.answers]
    judged = ["".join(_verdicts(found)) for found in asked if _judged(found)]
    open_ones = {found.folder.name: len(found.answers) - len(_judged(found)) for found in asked}
    counts = ", ".join(f"{count} in `{name}`" for name, count in open_ones.items() if count)
    more = f"\nNo verdict, for too few runs or one learning rate for all: {counts}.\n" if counts else ""
    return "\n".join(judged) + more or NO_RUNS


def compared(name: str) -> str:
    """The answer of a `lowrank compare`: its table and its sentence."""
    from lowrank_cnn.choose.frontier import DENSE_NAME, RECORD, in_words, load_frontier

    place = f"compare/{name}/{RECORD}"
    found = load_frontier(form.RESULTS / place)
    dense, rows = found.row(DENSE_NAME), list[list[object]]()
    assert dense is not None
    for row in sorted(found.rows, key=lambda row: -(found.ms(row) or 0.0)):
        held_out = 100 * mean(run.held_out or 0.0 for run in row.runs)
        shares = [f"{row.macs / dense.macs:.2f}", f"{found.ms(row):.2f} ms"]
        rows.append([in_words(row), *shares, f"{found.top1(row):.1f}%", f"{held_out:.1f}%", len(row.runs)])
    table = markdown(["network", "MACs", "time", "test", "held out", "runs"], rows)
    return f"{table}\n> {found.about['plan']['sentence']}\n{source(place, *found.environments)}"


def _records() -> list[Frontier]:
    from lowrank_cnn.choose.frontier import RECORD, load_frontier

    return [load_frontier(path) for path in sorted((form.RESULTS / FOLDER).glob(f"*/{RECORD}"))]


def _registered(found: Frontier) -> int:
    """The number of runs of each network that was registered."""
    from lowrank_cnn.choose.verdict import question_set, read_questions

    asked = question_set(found, read_questions())
    return asked["seeds"] if asked else 1


def questions() -> str:
    """The questions, with their networks and images."""
    from lowrank_cnn.choose.verdict import read_questions

    asked = read_questions()
    rows: list[list[object]] = [
        [one["family"], one["data"], one["seeds"], f"+{one['better_by']}", f"-{one['loss']}", _written(one, asked)]
        for one in asked["sets"]
        if "better_by" in one  # else its rivals are searched for
    ]
    columns = ["family", "<images", "runs of each", "better: by points", "faster: within points", "<written on"]
    return markdown(columns, rows)


def _written(one: dict[str, Any], asked: dict[str, Any]) -> str:
    return one.get("date", asked["date"])


def fewest_operations() -> str:
    """The designs and schedules that were trained on all images."""
    path = form.RESULTS / "fewest_operations.json"
    if not path.exists():
        return NO_RUNS
    found = json.loads(path.read_text())
    columns = ["design", "epochs", "PFLOP", "held out %", "test %", "runs", "s a run"]
    full = [row for row in found["summary"] if row["interval"]]
    more = f"\n{len(found['summary']) - len(full)} more trials on held-out images are in the record.\n"
    environments = found.get("environments", [found["environment"]])
    return markdown(columns, [_way(row) for row in full]) + more + source(path.name, *environments)


def _way(row: dict[str, Any]) -> list[object]:
    design, epochs, *_ = row["way"].split()
    cost = [f"`{design}`", epochs, f"{row['petaflop']:.3f}", f"{row['held_out']:.2f}"]
    return [*cost, "{:.2f} ({:.2f} to {:.2f})".format(*row["interval"]), row["runs"], f"{row['seconds']:.2f}"]


@form.from_record("tiny_fast.json")
def short_run(found: dict[str, Any]) -> str:
    """One run of `tiny-fast`, alone on the GPU."""
    steady = found["epochs"] * found["train"] / found["images_per_second"]
    return (
        f"On {found['data']} `{found['recipe']}` trains `{found['network']}` for {found['epochs']} epochs in "
        f"{steady:.0f} seconds, alone on the GPU, to {100 * found['top1']:.1f}% (one run). The first run on a "
        f"machine also chooses and compiles kernels, and took {found['seconds']:.0f} seconds.\n"
        + source("tiny_fast.json", found["environment"])
    )


def _record(found: Frontier) -> Iterator[str]:
    runs = _registered(found)
    rows = sorted((row for row in found.rows if len(row.runs) >= runs), key=_order)
    if len(rows) < 2:  # no network to compare with
        return
    yield f"**{found.title}**: {found.images:,} test images, {runs} runs of each\n\n"
    timed = any(row.timing for row in rows)
    columns = ["design", "parameters", *(["ms"] if timed else []), "top-1 %"]
    yield markdown(columns, [_line(found, row, timed) for row in rows])


def _order(row: DesignRow) -> tuple[float, int]:
    return (row.timing.ratio if row.timing else 0.0), row.macs


def _line(found: Frontier, row: DesignRow, timed: bool) -> list[object]:
    from lowrank_cnn.core.numbers import mean_interval
    from lowrank_cnn.core.text import si

    mean, low, high = mean_interval([100 * run.correct / found.images for run in row.runs])
    time = [f"{found.ms(row):.3f}" if row.timing else ""] if timed else []
    return [f"`{row.name}`", si(row.params), *time, f"{mean:.2f} ± {(high - low) / 2:.2f}"]


def _judged(found: Frontier) -> list[dict[str, Any]]:
    """The answers for which both networks had all registered runs, at learning rates of their own."""
    from lowrank_cnn.choose.verdict import UNTUNED

    known = [one for one in found.answers if one["verdict"] != UNTUNED]
    return [one for one in known if min(one["runs"]) >= _registered(found)]


def _verdicts(found: Frontier) -> Iterator[str]:
    place, judged = f"benchmarks/results/{FOLDER}/{found.folder.name}", _judged(found)
    yield f"**{found.title}**, {_registered(found)} runs of each, {_tries(found, judged)}; {_margins(judged)}:\n"
    yield f"`lowrank frontier {found.about['family']} --out {place}`\n\n"
    yield markdown(VERDICT_COLUMNS, [_answer(found, one) for one in judged])


def _margins(answers: list[dict[str, Any]]) -> str:
    """What was asked, with the margin of each question."""
    margins = {one["question"].partition(" ")[0]: one["margin"] for one in answers}
    told = {"better": "by {:g}", "faster": "within {:g}"}
    return ", ".join(f"*{what}* {told[what].format(abs(margin))}" for what, margin in margins.items())


def _tries(found: Frontier, answers: list[dict[str, Any]]) -> str:
    """How learning rates were chosen for the networks of these questions."""
    from lowrank_cnn.core.text import counted

    names = {one[side] for one in answers for side in ("design", "control")}
    tried = {
        tuple(sorted((one.rate, len(one.accuracies)) for one in row.tries))
        for row in found.rows
        if row.name in names
    }
    if len(tried) != 1 or not (rates := tried.pop()):
        return "one learning rate"
    return f"{len(rates)} learning rates tried in {counted(min(runs for _, runs in rates), 'run')} each"


def _answer(found: Frontier, one: dict[str, Any]) -> list[object]:
    from lowrank_cnn.core.text import p_value

    gaps = [f"{one[what]:+.2f}" for what in ("gap", "low", "high")]
    shares = ["" if share is None else f"{share:.2f}" for share in (one["time"], one["params"])]
    if within := one.get("time_within"):
        shares[0] += " ({:.2f} to {:.2f})".format(*within)
    asked = [f"`{one['design']}`", one["question"].partition(" ")[0], f"`{one['control']}`"]
    p = p_value(one["corrected"])
    weak = dict.fromkeys(letter for note in one["notes"] for words, letter in WEAK.items() if words in note)
    return [*asked, *gaps, *shares, p, " ".join([form.chip(verdict(one)), *weak])]


def verdict(one: dict[str, Any]) -> str:
    """A verdict in a word. Level: the whole interval lies within the margin on both sides."""
    from lowrank_cnn.choose.verdict import NO, YES

    if one["verdict"] == YES:
        return "wins"
    if one["verdict"] != NO:
        return one["verdict"]
    return "loses" if one["high"] < 0 else "level" if one["low"] > -one["margin"] else "does not win"


if __name__ == "__main__":
    from lowrank_cnn.choose.frontier import load_frontier
    from lowrank_cnn.report.trade import draw_frontier

    found = load_frontier(form.RESULTS / "compare" / "digits")
    draw_frontier(found, form.ROOT / "docs" / "images" / "digits-compared.svg", ["batch"])
