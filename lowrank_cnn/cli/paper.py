"""The commands `lowrank reproduce` and `lowrank audit`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli.options import Bad, Device, Json, Limit, Runs, Settings, Workers, option
from lowrank_cnn.cli.show import (
    console,
    continued_by_same_command,
    errors,
    print_json,
    print_problems,
    print_table,
)
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    from lowrank_cnn.paper.audit import Finding
    from lowrank_cnn.paper.claims import ClaimAnswer
    from lowrank_cnn.paper.reproduce import AccuracyRow, Comparison, ExperimentTable

MEASURES = {"top1": "top-1", "top5": "top-5", "overfit": "over-fitting"}


def reproduce_command(
    experiment: Annotated[str, typer.Argument(help="cifar10, tiny-imagenet, ilsvrc or places.")],
    out: Annotated[Path, option("Directory of the runs; finished runs are not repeated.", "--out", "-o")],
    data: Annotated[str | None, option("The images, named as for `lowrank train`.")] = None,
    table: Annotated[bool, option("Only print the table of finished runs.", "--table")] = False,
    parts: Annotated[list[str] | None, option("Only this part; repeatable.", "--part")] = None,
    networks: Annotated[list[str] | None, option("Only this network; repeatable.", "--network")] = None,
    seeds: Annotated[int | None, option("Runs of each network; by default as in the experiment.", min=1)] = None,
    settings: Settings = None,
    device: Device = "auto",
    workers: Workers = 0,
    limit: Limit = None,
    bad: Bad = "skip",
    progress: Annotated[bool, option("Print a line for every epoch.", "--progress")] = False,
    as_json: Json = False,
) -> None:
    """Train the paper's networks and compare their accuracy.

    Each network is trained with several seeds and compared with the published accuracy. Processes started with
    the same directory share the runs among themselves.

    Examples:

      lowrank reproduce cifar10 --data uoft-cs/cifar10 --out runs/cifar10
      lowrank reproduce cifar10 --out runs/cifar10 --table
    """
    from lowrank_cnn.data import open_data
    from lowrank_cnn.paper.reproduce import build_table, lines, reproduce
    from lowrank_cnn.train.recipe import parse_settings

    chosen = {"parts": tuple(parts or ()), "networks": tuple(networks or ()), "seeds": seeds}
    lines(experiment, chosen["parts"], chosen["networks"])  # refuses unknown names before images are read
    if table and not out.is_dir():
        raise LowRankError(f"there are no runs: {out} is no folder.")
    if table:
        found = build_table(experiment, out, **chosen)
    else:
        if data is None:
            raise LowRankError("training needs images: give --data, or --table to see what is finished.")
        images = open_data(data, limit=limit, bad=bad)
        print_problems(images, _say)
        how = {"device": device, "workers": workers, "progress": progress and not as_json}
        changes = {"settings": parse_settings(settings or [])}
        with continued_by_same_command():
            found = reproduce(experiment, images, out, say=_say, **chosen, **changes, **how)
        # Show all finished runs, but list only missing runs of the selected parts and networks.
        found = replace(found, missing=build_table(experiment, out, **chosen).missing)
    if first_process():
        if not (parts or networks):  # the saved table is that of everything
            found.save(out)
        _show(found, out, as_json)


def _say(line: str) -> None:
    if first_process():
        errors.print(line)


def _show(table: ExperimentTable, out: Path, as_json: bool) -> None:
    """Print the table, as text or JSON, and write the page about all runs beside it."""
    page = lr.write_report([out], out / "report.html") if table.rows else None
    if as_json:
        return print_json(table.to_dict() | {"report": str(page) if page else None})
    for part in dict.fromkeys(row.part for row in table.rows):
        _print_rows(f"{table.experiment}: {part}", [row for row in table.rows if row.part == part])
        if part in table.notes:
            console.print(f" {table.notes[part]}")
    for comparison in table.comparisons():
        _print_comparison(comparison)
    _print_missing(table)
    if page:
        console.print(f" The report: {page}", soft_wrap=True)
    return None


def _print_missing(table: ExperimentTable) -> None:
    from lowrank_cnn.paper.reproduce import NOT_BEGUN

    waiting = [run for run, state in table.missing.items() if state == NOT_BEGUN]
    for run, state in table.missing.items():
        if run not in waiting:
            errors.print(f"{run}: {state}")
    if waiting:
        errors.print(f"Not begun: {counted(len(waiting), 'run')}, the first {waiting[0]}.")


def _print_rows(title: str, rows: Iterable[AccuracyRow]) -> None:
    columns = ("network", "paper", "top-1", "paper", "top-5", "n", "MACs", "params", "epochs", "s")
    found = [_line(row) for row in rows]
    kept = [i for i, _ in enumerate(columns) if any(line[i] != "" for line in found)]
    print_table(title, [columns[i] for i in kept], [tuple(line[i] for i in kept) for line in found])


def _line(row: AccuracyRow) -> tuple[object, ...]:
    top5 = f"{100 * sum(row.top5) / len(row.top5):.2f}"
    ours = f"{100 * row.mean:.2f}" + (f" ± {100 * row.spread:.2f}" if row.spread is not None else "")
    cost = (si(row.macs), si(row.params), f"{row.epochs:.0f}", f"{row.seconds:.0f}")
    name = ", ".join(filter(None, [row.network, row.variant]))
    return name, _percent(row.published), ours, _percent(row.published_top5), top5, len(row.top1), *cost


def _percent(share: float | None) -> str:
    return f"{100 * share:.2f}" if share else ""


def _print_comparison(comparison: Comparison) -> None:
    measure = MEASURES[comparison.measure]
    name = ", ".join(filter(None, [comparison.part, comparison.variant]))
    lines = [_gap_line(gap) for gap in comparison.gaps]
    if lines:
        columns = ("as published?", "MACs", "paper", "ours", "<verdict")
        print_table(f"{name}: gaps in {measure}, in points", columns, lines)
    agreed = comparison.order
    if agreed.pairs:
        rank = "" if agreed.rank_correlation is None else f"; rank correlation {agreed.rank_correlation:.2f}"
        told = f"{agreed.alike} of {counted(agreed.pairs, 'pair')} of networks in the published order"
        console.print(f" {name}, {measure}: {told}{rank}.", soft_wrap=True)


def _gap_line(gap: ClaimAnswer) -> tuple[object, ...]:
    error = f" ± {gap.half_width:.2f}" if gap.half_width is not None else ""
    published = "" if gap.published is None else f"{gap.published:+.2f}"
    return gap.question, f"x {gap.mac_ratio:.2f}", published, f"{gap.ours:+.2f}{error}", gap.verdict


_TITLES = {
    "vgg-ilsvrc": "VGG on ILSVRC",
    "vgg-places": "VGG on Places",
    "googlenet-ilsvrc": "GoogLeNet on ILSVRC",
    "nin-cifar10": "Network-in-Network on CIFAR-10",
    "big-picture": "The big picture",
    "big-picture-augmented": "The big picture, networks trained with more augmentation",
}


def audit_command(runs: Runs = None, as_json: Json = False) -> None:
    """Compare every published figure and claim with what this code computes.

    With --runs, trained accuracies and measured times are compared too.

    Examples:

      lowrank audit
      lowrank audit --json
      lowrank audit --runs runs
    """
    from lowrank_cnn.paper.audit import CONTRADICTED, MISSED, UNREPRODUCIBLE, audit, summary

    findings = _audit_runs(runs) if runs else audit()
    if as_json:
        return print_json([finding.to_dict() for finding in findings])
    claims = [finding for finding in findings if finding.table == "text"]
    disagree = (CONTRADICTED, UNREPRODUCIBLE, MISSED)
    _print_findings("Claims of the text that disagree", [f for f in claims if f.verdict in disagree])
    for table, rows in groupby(findings, key=lambda finding: finding.table):
        if table != "text":
            _print_counts(_TITLES[table], list(rows))
    console.print(" = : the code counts the published figure exactly. A number: what it counts instead.\n")
    trained = [f for f in findings if f.quantity.startswith("top") and f.computed]
    _print_findings("Accuracies, trained", trained)
    _print_findings("Other claims", [f for f in claims if f.verdict not in disagree])
    notes = [(f.subject, f.note) for f in findings if f.note and f.quantity in ("macs", "params")]
    print_table("Notes", ("network", "<"), notes)
    print_table("In sum", ("verdict", "figures and claims"), list(summary(findings).items()))
    return None


def _audit_runs(runs: list[Path]) -> list[Finding]:
    """The audit with records. Also names files that cannot be read, and says if no run tests an accuracy."""
    from lowrank_cnn.paper.audit import audit
    from lowrank_cnn.report.records import read_records, require_records
    from lowrank_cnn.report.results import accuracies, layer_times

    records = read_records(runs)
    require_records(runs, records)
    findings = audit(accuracies(records.runs), layer_times(records.timings))
    for problem in records.skipped:
        errors.print(f"Skipped {problem.path}: {problem.reason}")
    if not any(f.computed for f in findings if f.quantity.startswith("top")):
        why = "none finished training a published network by the paper's recipe on its images"
        errors.print(f"No accuracy is tested by what is here, {counted(len(records.runs), 'run')}: {why}.")
    return findings


def _print_counts(title: str, findings: list[Finding]) -> None:
    """A line per network: published MACs and parameters, and ours where they differ."""
    rows = []
    for network, group in groupby(findings, key=lambda finding: finding.subject):
        found = {finding.quantity: finding for finding in group}
        macs, params = found["macs"], found["params"]
        rows.append((network, macs.published, _ours(macs), params.published, _ours(params)))
    print_table(title, ("network", "MACs", "here", "parameters", "here"), rows)


def _ours(finding: Finding) -> str:
    from lowrank_cnn.paper.audit import REPRODUCED

    return "=" if finding.verdict == REPRODUCED else finding.computed


def _print_findings(title: str, findings: list[Finding]) -> None:
    """Claims, or accuracies, each with its verdict without the reason: "not reached by the runs here" is cut."""
    rows = []
    for f in findings:
        name = f.subject if f.quantity == "claim" else f"{f.subject}, {f.quantity}"
        rows.append((name, f.published, f.computed, re.split(r" by | from |:", f.verdict)[0], f.note))
    if rows:
        print_table(title, ("claim", "published", "here", "<verdict", "<note"), rows)
