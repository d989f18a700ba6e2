"""The command `lowrank frontier`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowrank_cnn.cli.options import Device, ImageOptions, Json, Settings, grouped, option
from lowrank_cnn.cli.show import console, errors, over_seeds, print_json, print_table, resumable
from lowrank_cnn.core.errors import LowRankError, MissingExtra
from lowrank_cnn.core.text import p_value, si

if TYPE_CHECKING:
    from lowrank_cnn.choose.frontier import DesignRow, Frontier
    from lowrank_cnn.choose.trace import FrontierPlan
    from lowrank_cnn.choose.verdict import Answer


@dataclass(frozen=True)
class PlanOptions:
    """The fields of `FrontierPlan`: which networks are trained and timed, and how often."""

    designs: Annotated[
        list[str] | None, option("A scheme or design (lr-late, ...), @0.75 for a width; repeatable.", "--design")
    ] = None
    widths: Annotated[list[float] | None, option("A width of the dense network; repeatable.", "--width")] = None
    match: Annotated[list[str] | None, option("Add thin dense networks of equal macs or time; or none.")] = None
    seeds: Annotated[int, option("Runs of each network.")] = 8
    rates: Annotated[
        list[float] | None, option("Try a factor of the learning rate on held-out images; repeatable.", "--rate")
    ] = None
    tries: Annotated[int, option("Runs of each factor.")] = 1
    batch: Annotated[int, option("Images in a timed batch; 0 times nothing.")] = 256
    compile: Annotated[bool, option("Let torch.compile compete.", "--compile/--no-compile")] = True
    repeats: Annotated[int, option("Runs per median time.")] = 21
    base: Annotated[float, option("Width of the family's network to call 1; less for a miniature.")] = 1.0
    teacher: Annotated[str, option("A design that teaches all others (distillation), such as dense@1.5.")] = ""
    processes: Annotated[int, option("Trainings at a time on the device; then their seconds are not kept.")] = 1
    budget: Annotated[float, option("Start no new run after this many seconds.")] = float("inf")

    def plan(self) -> FrontierPlan:
        from lowrank_cnn.choose.trace import FrontierPlan

        given: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        if "none" in given.get("match", ()):
            given["match"] = ()
        return FrontierPlan(**given)


@grouped
def frontier_command(
    *,
    family: Annotated[str, typer.Argument(help="airbench, nin, vgg11, resnet18 or any network, as for compare.")],
    out: Annotated[Path, option("Folder of record and picture; finished runs are not repeated.", "--out", "-o")],
    networks: PlanOptions,
    data: Annotated[str | None, option("The images; without them, show what is finished.")] = None,
    recipe: Annotated[str | None, option("Another recipe than the family's.")] = None,
    settings: Settings = None,
    device: Device = "auto",
    reading: ImageOptions,
    as_json: Json = False,
) -> None:
    """Train a network over widths and schemes: accuracy against time.

    This is the long form of `lowrank compare`, for research: many runs, and questions that were written down
    before them. One record and one picture hold the results. A command that was killed continues when it is
    started again.

    Examples:

      lowrank frontier airbench --data uoft-cs/cifar10 --design lr -o runs/lr
      lowrank frontier airbench --out runs/lr
    """
    from lowrank_cnn.choose.candidates import find_design, find_family
    from lowrank_cnn.choose.frontier import load_frontier
    from lowrank_cnn.choose.trace import trace_frontier
    from lowrank_cnn.core.clock import check_repeats
    from lowrank_cnn.data import open_data
    from lowrank_cnn.train.recipe import parse_settings

    find_family(family)
    check_repeats(networks.repeats)
    for text in networks.designs or []:
        find_design(text)  # refuse it before images are read
    if data is None:
        return _show(load_frontier(out), as_json, keep=False)
    options: dict[str, Any] = {"recipe": recipe, "settings": parse_settings(settings or []), "device": device}
    plan, images = networks.plan(), open_data(data, **vars(reading))
    with resumable():
        found = trace_frontier(family, images, out, plan, say=errors.print, **options)
    return _show(found, as_json)


def _show(found: Frontier, as_json: bool, *, keep: bool = True) -> None:
    """Print the table, as text or JSON, and draw the picture beside the record, which keeps the answers."""
    from lowrank_cnn.choose.verdict import add_answers
    from lowrank_cnn.report.trade import draw_frontier

    if not found.rows:
        raise LowRankError(f"there is nothing in {found.folder} yet.")
    answers, picture = add_answers(found, keep=keep), None
    if any(row.runs for row in found.rows):
        try:
            picture = draw_frontier(found, found.folder / "frontier.svg")
        except MissingExtra as missing:  # training works all the same
            errors.print(f"There is no picture: {missing}")
    if as_json:
        rows = [_entry(found, row) for row in found.rows]
        told = {"folder": str(found.folder), "picture": str(picture) if picture else None}
        return print_json({**told, "rows": rows, "answers": found.answers})
    columns = ("design", "MACs", "params", "ms", "of dense", "top-1 %", "n", "s a run")
    lines = []
    for row in sorted(found.rows, key=lambda row: row.macs):
        accuracy = over_seeds([run.correct / found.images for run in row.runs])
        ms = ("", "") if row.timing is None else (f"{found.ms(row):.3f}", f"{row.timing.ratio:.2f}")
        took = "" if row.seconds is None else f"{row.seconds:.1f}"
        lines.append((row.name, si(row.macs), si(row.params), *ms, accuracy, len(row.runs), took))
    print_table(found.title, columns, lines)
    if answers:
        columns = ("design", "<question", "<control", "time", "params", "gap", "99% interval", "p", "<verdict")
        print_table("Questions asked before the runs", columns, [_answer_line(one) for one in answers])
        for note in dict.fromkeys(note for one in answers for note in one.notes):
            console.print(f"* {note}.")
    if picture:
        console.print(f"The picture: {picture}", soft_wrap=True)
    return None


def _answer_line(one: Answer) -> tuple[object, ...]:
    interval = f"{one.low:+.2f} to {one.high:+.2f}"
    asked = f"{one.question} ({one.margin:+g})"
    costs = ["" if share is None else f"x {share:.2f}" for share in (one.time, one.params)]
    costs[0] += " ({:.2f} to {:.2f})".format(*one.time_within) if one.time_within else ""
    verdict = f"{one.verdict} *" if one.notes else one.verdict
    return one.design, asked, one.control, *costs, f"{one.gap:+.2f}", interval, p_value(one.corrected), verdict


def _entry(found: Frontier, row: DesignRow) -> dict[str, object]:
    timing = row.timing
    return {
        "design": row.name,
        "dense": row.dense,
        "macs": row.macs,
        "params": row.params,
        "ms": found.ms(row),
        "of_dense": timing.ratio if timing else None,
        "accuracies": [run.correct / found.images for run in row.runs],
        "seconds": [run.seconds for run in row.runs],
        "failed": row.failed,
    }
