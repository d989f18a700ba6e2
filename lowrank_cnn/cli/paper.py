"""The commands `lowrank reproduce` and `lowrank audit`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli.options import Bad, Device, Json, Limit, Runs, Settings, Workers, option
from lowrank_cnn.cli.show import console, errors, over_seeds, print_json, print_problems, print_table, resumable
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.processes import first_process
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    from lowrank_cnn.paper.audit import Finding
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
    if table:
        if not out.is_dir():
            raise LowRankError(f"there are no runs: {out} is no folder.")
        found = build_table(experiment, out, **chosen)
    else:
        if data is None:
            raise LowRankError("training needs images: give --data, or --table to see what is finished.")
        images = open_data(data, limit=limit, bad=bad)
        print_problems(images, _say)
        how = {"device": device, "workers": workers, "progress": progress and not as_json}
        changes = {"settings": parse_settings(settings or [])}
        with resumable():
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
    from lowrank_cnn.paper.reproduce import NOT_BEGUN

    page = lr.write_report([out], out / "report.html") if table.rows else None
    if as_json:
        return print_json(table.to_dict() | {"report": str(page) if page else None})
    for part, rows in groupby(table.rows, key=lambda row: row.part):
        _print_rows(f"{table.experiment}: {part}", rows)
        if part in table.notes:
            console.print(f" {table.notes[part]}")
    for comparison in table.comparisons():
        _print_comparison(comparison)
    waiting = [run for run, state in table.missing.items() if state == NOT_BEGUN]
    for run, state in table.missing.items():
        if state != NOT_BEGUN:
            errors.print(f"{run}: {state}")
    if waiting:
        errors.print(f"Not begun: {counted(len(waiting), 'run')}, the first {waiting[0]}.")
    if page:
        console.print(f" The report: {page}", soft_wrap=True)
    return None


def _print_rows(title: str, rows: Iterable[AccuracyRow]) -> None:
    columns = ("network", "paper", "top-1", "paper", "top-5", "n", "MACs", "params", "epochs", "s")
    lines = []
    for row in rows:
        name = ", ".join(filter(None, [row.network, row.variant]))
        top1, top5 = (f"{100 * share:.2f}" if share else "" for share in (row.published, row.published_top5))
        ours = top1, over_seeds(row.top1), top5, f"{100 * mean(row.top5):.2f}", len(row.top1)
        lines.append((name, *ours, si(row.macs), si(row.params), f"{row.epochs:.0f}", f"{row.seconds:.0f}"))
    print_table(title, columns, lines)


def _print_comparison(comparison: Comparison) -> None:
    measure = MEASURES[comparison.measure]
    name = ", ".join(filter(None, [comparison.part, comparison.variant]))
    lines = []
    for gap in comparison.gaps:
        ours = f"{gap.ours:+.2f}" + (f" ± {gap.half_width:.2f}" if gap.half_width is not None else "")
        published = "" if gap.published is None else f"{gap.published:+.2f}"
        lines.append((gap.question, f"x {gap.mac_ratio:.2f}", published, ours, gap.verdict))
    if lines:
        columns = ("as published?", "MACs", "paper", "ours", "<verdict")
        print_table(f"{name}: gaps in {measure}, in points", columns, lines)
    agreed = comparison.order
    if agreed.pairs:
        rank = "" if agreed.rank_correlation is None else f"; rank correlation {agreed.rank_correlation:.2f}"
        told = f"{agreed.alike} of {counted(agreed.pairs, 'pair')} of networks in the published order"
        console.print(f" {name}, {measure}: {told}{rank}.", soft_wrap=True)


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
    from lowrank_cnn.cli.report import records_in
    from lowrank_cnn.paper.audit import CONTRADICTED, MISSED, UNREPRODUCIBLE, audit, summary
    from lowrank_cnn.report.results import accuracies, layer_times

    records = records_in(runs) if runs else None
    findings = audit(accuracies(records.runs), layer_times(records.timings)) if records else audit()
    trained = [f for f in findings if f.quantity.startswith("top") and f.computed]
    if records and not trained:
        why = "none finished training a published network by the paper's recipe on its images"
        errors.print(f"No accuracy is tested by what is here, {counted(len(records.runs), 'run')}: {why}.")
    if as_json:
        return print_json([finding.to_dict() for finding in findings])
    claims = [finding for finding in findings if finding.table == "text"]
    disagree = (CONTRADICTED, UNREPRODUCIBLE, MISSED)
    _print_findings("Claims of the text that disagree", [f for f in claims if f.verdict in disagree])
    for table, rows in groupby(findings, key=lambda finding: finding.table):
        if table != "text":
            _print_counts(_TITLES[table], rows)
    console.print(" = : the code counts the published figure exactly. A number: what it counts instead.\n")
    _print_findings("Accuracies, trained", trained)
    _print_findings("Other claims", [f for f in claims if f.verdict not in disagree])
    notes = [(f.subject, f.note) for f in findings if f.note and f.quantity in ("macs", "params")]
    print_table("Notes", ("network", "<"), notes)
    print_table("In sum", ("verdict", "figures and claims"), list(summary(findings).items()))
    return None


def _print_counts(title: str, findings: Iterable[Finding]) -> None:
    """A line per network: published MACs and parameters, and ours where they differ."""
    from lowrank_cnn.paper.audit import REPRODUCED

    rows = []
    for network, group in groupby(findings, key=lambda finding: finding.subject):
        found = {finding.quantity: finding for finding in group}
        row = [network]
        for one in (found["macs"], found["params"]):
            row += [one.published, "=" if one.verdict == REPRODUCED else one.computed]
        rows.append(row)
    print_table(title, ("network", "MACs", "here", "parameters", "here"), rows)


def _print_findings(title: str, findings: list[Finding]) -> None:
    """Claims, or accuracies, each with its verdict without the reason: "not reached by the runs here" is cut."""
    rows = []
    for f in findings:
        name = f.subject if f.quantity == "claim" else f"{f.subject}, {f.quantity}"
        rows.append((name, f.published, f.computed, re.split(r" by | from |:", f.verdict)[0], f.note))
    if rows:
        print_table(title, ("claim", "published", "here", "<verdict", "<note"), rows)
