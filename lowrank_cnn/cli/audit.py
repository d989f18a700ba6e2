"""The command `lowrank audit`."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from lowrank_cnn.cli.options import Json, Runs
from lowrank_cnn.cli.show import console, errors, print_json, print_table
from lowrank_cnn.core.text import counted

if TYPE_CHECKING:
    from pathlib import Path

    from lowrank_cnn.paper.audit import Finding

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
