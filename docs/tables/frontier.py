"""Accuracy against measured time: the results of every frontier, and the questions asked before the runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from tables import form
from tables.form import NO_RUNS, markdown, source

if TYPE_CHECKING:
    from lowrank_cnn.choose.frontier import DesignRow, Frontier

FOLDER = "frontier"
VERDICT_COLUMNS = ["design", "<asked", "<rival", "margin", "gap", "low", "high", "time", "parameters", "runs", "p"]
VERDICT_COLUMNS.append("<verdict")


def frontier() -> str:
    """For each record: its networks by rising time."""
    return "\n".join("".join(_record(found)) for found in _records()) or NO_RUNS


def verdicts() -> str:
    """For each record: its questions, with one figure in a cell, what weakens them, and the command for them."""
    judged = [found for found in _records() if found.answers]
    judged.sort(key=lambda found: -found.about["network"]["base"])  # miniatures last
    return "\n".join("".join(_verdicts(found)) for found in judged) or NO_RUNS


def _records() -> list[Frontier]:
    from lowrank_cnn.choose.frontier import RECORD, load_frontier

    return [load_frontier(path) for path in sorted((form.RESULTS / FOLDER).glob(f"*/{RECORD}"))]


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
    designs = ", ".join(f"`{name}`" for name in asked["designs"])
    told = f"\nDesigns: {designs}.\n"
    return markdown(columns, rows) + told


def _written(one: dict[str, Any], asked: dict[str, Any]) -> str:
    return one.get("date", asked["date"])


def fewest_operations() -> str:
    """The trials by rising operations; those that were trained on all images have a test accuracy."""
    path = form.RESULTS / "fewest_operations.json"
    if not path.exists():
        return NO_RUNS
    found = json.loads(path.read_text())
    columns = ["design", "epochs", "<optimizer", "PFLOP", "held out %", "tries", "test %", "runs", "s a run"]
    others = {text for row in found["summary"] if (text := _split_way(row["way"])[3])}
    told = "".join(f"\nMuon has {text}.\n" for text in sorted(others))
    table = markdown(columns, [_way(row) for row in found["summary"]])
    return table + told + source(path.name, *found.get("environments", [found["environment"]]))


def _way(row: dict[str, Any]) -> list[object]:
    design, epochs, optimizer, _ = _split_way(row["way"])
    accuracy = "{:.2f} ({:.2f} to {:.2f})".format(*row["interval"]) if row["interval"] else ""
    seconds = f"{row['seconds']:.2f}" if row["seconds"] else ""
    known = [f"`{design}`", epochs, optimizer, f"{row['petaflop']:.3f}", f"{row['held_out']:.2f}", row["tries"]]
    return [*known, accuracy, row["runs"] or "", seconds]


def _split_way(text: str) -> tuple[str, str, str, str]:
    """A way as design, epochs, optimizer with its rate, and its other settings."""
    design, epochs, *settings = text.split()
    values = dict(setting.split("=") for setting in settings)
    if not values:
        return design, epochs, "", ""
    optimizer = f"{values.pop('optimizer')}, lr {values.pop('lr')}"
    return design, epochs, optimizer, ", ".join(f"`{name}={value}`" for name, value in values.items())


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
    name = f"{FOLDER}/{found.folder.name}/frontier.json"
    rows = [row for row in found.rows if row.runs]
    if not rows:
        yield f"**{found.title}, learning rates tried on held-out images**\n\n"
        yield from _tries(found)
        yield source(name, *found.environments)
        return
    yield f"**{found.title}, {found.images:,} test images**\n\n"
    columns = ["design", "MACs", "parameters", "ms", "of dense", "top-1 %", "runs", "s a run"]
    yield markdown(columns, [_line(found, row) for row in sorted(rows, key=_order)])
    batches = sorted({row.timing.batch for row in rows if row.timing})
    clock = f"Times are of {batches[0]} images, each in turns with the dense network. " if batches else ""
    yield f"\n{clock}Mean and 95% interval over seeds; seconds are those of training, without compiling.\n"
    yield source(name, *found.environments)


def _verdicts(found: Frontier) -> Iterator[str]:
    """The verdicts of a record; questions with too few runs are only counted."""
    from lowrank_cnn.choose.verdict import EARLY

    place = f"benchmarks/results/{FOLDER}/{found.folder.name}"
    yield f"**{found.title}**: `lowrank frontier {found.about['family']} --out {place}`\n"
    judged = [one for one in found.answers if one["verdict"] != EARLY]
    notes = list(dict.fromkeys(note for one in judged for note in one["notes"]))
    if judged:
        yield "\n" + markdown(VERDICT_COLUMNS, [_answer(found, one, notes) for one in judged])
    if notes:
        yield "\n" + "; ".join(f"({place}) {note}" for place, note in enumerate(notes, 1)) + ".\n"
    if early := len(found.answers) - len(judged):
        yield f"\n{early} more {'question has' if early == 1 else 'questions have'} too few runs for a verdict.\n"


def _tries(found: Frontier) -> Iterator[str]:
    """The learning rates that were tried, if nothing was trained on all images."""
    rates = sorted({one.rate for row in found.rows for one in row.tries})
    rows: list[list[object]] = []
    for row in sorted(found.rows, key=lambda row: row.macs):
        known = {one.rate: 100 * sum(one.accuracies) / len(one.accuracies) for one in row.tries if one.accuracies}
        rows.append([f"`{row.name}`", *(f"{known[rate]:.2f}" if rate in known else "" for rate in rates)])
    yield markdown(["design", *(f"{rate:g} x the rate" for rate in rates)], rows)
    most = max((len(one.accuracies) for row in found.rows for one in row.tries), default=0)
    yield f"\nTop-1 % on held-out training images; runs of each: {most}.\n"


def _order(row: DesignRow) -> tuple[float, int]:
    return (row.timing.ratio if row.timing else 0.0), row.macs


def _line(found: Frontier, row: DesignRow) -> list[object]:
    from lowrank_cnn.core.numbers import mean_interval
    from lowrank_cnn.core.text import si

    mean, low, high = mean_interval([100 * run.correct / found.images for run in row.runs])
    seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
    times = [f"{found.ms(row):.3f}", f"{row.timing.ratio:.2f}"] if row.timing else ["", ""]
    accuracy = f"{mean:.2f} ({low:.2f} to {high:.2f})" if len(row.runs) > 1 else f"{mean:.2f}"
    name = f"`{row.name}`" + (f", {row.design['matched']}" if row.design["matched"] else "")
    cost = [si(row.macs), si(row.params), *times]
    return [name, *cost, accuracy, len(row.runs), seconds]


def _answer(found: Frontier, one: dict[str, Any], notes: list[str]) -> list[object]:
    from lowrank_cnn.core.text import p_value

    gaps = [f"{one[what]:+.2f}" for what in ("margin", "gap", "low", "high")]
    time = one["time"] or _searched_time(found, one)
    shares = ["" if share is None else f"{share:.2f}" for share in (time, one["params"])]
    asked = [f"`{one['design']}`", one["question"].partition(" ")[0], f"`{one['control']}`"]
    said = " ".join([f"**{chip(one)}**", *(f"({notes.index(note) + 1})" for note in one["notes"])])
    return [*asked, *gaps, *shares, min(one["runs"]), p_value(one["corrected"]), said]


def chip(one: dict[str, Any]) -> str:
    """A verdict in a word. Level: the whole interval lies within the margin on both sides."""
    from lowrank_cnn.choose.verdict import NO, YES

    if one["verdict"] == YES:
        return "wins"
    if one["verdict"] != NO:
        return one["verdict"]
    return "loses" if one["high"] < 0 else "level" if one["low"] > -one["margin"] else "does not win"


def _searched_time(found: Frontier, one: dict[str, Any]) -> float | None:
    """The share of a searched rival's time, by the medians over processes that were taken before the runs."""
    path = found.folder / "times.json"
    if not path.exists():
        return None
    times = {row["design"]: median(row["of_dense"]) for row in json.loads(path.read_text())["rows"]}
    return times[one["design"]] / times[one["control"]]
