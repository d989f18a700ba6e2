"""Learned shapes beside fixed shares and thin networks, and initialisations at their best rates."""

from __future__ import annotations

import json
from statistics import fmean, stdev
from typing import Any

from tables import form
from tables.form import NO_RUNS, markdown, source


def learned_shapes() -> str:
    """One table for each record: the ways by falling accuracy, and the verdicts that were reached."""
    paths = sorted(form.RESULTS.glob("learned_shapes*.json"))
    return "\n".join(_ways(path.name, json.loads(path.read_text())) for path in paths) or NO_RUNS


def initialisations() -> str:
    """One table for each record of full runs."""
    paths = sorted(form.RESULTS.glob("initialisation*.json"))
    return "\n".join(_inits(path.name, json.loads(path.read_text())) for path in paths) or NO_RUNS


def _ways(name: str, found: dict[str, Any]) -> str:
    about, rows = found["about"], found["rows"]
    ways = {way: [row for row in rows if row["way"] == way] for way in dict.fromkeys(row["way"] for row in rows)}
    order = sorted(ways, key=lambda way: -fmean(row["top1"] for row in ways[way]))
    width = f" (width {about['width']:g})" if about["width"] != 1 else ""
    title = f"**{about['network']}{width} on {about['data']}, {about['recipe']['epochs']} epochs**\n\n"
    table = markdown(["way", "of the MACs", "top-1 %", "runs"], [_line(way, ways[way]) for way in order])
    decided = [one for one in found.get("answers", []) if one["verdict"] in ("yes", "no")]
    verdicts = [
        f"`{one['ours']}` over `{one['theirs']}` by {one['margin']:g}: {one['verdict']}" for one in decided
    ]
    told = f"\nBy the margins written down before the runs: {'; '.join(verdicts) or 'nothing is decided'}.\n"
    return title + table + told + source(name, found["environment"])


def _line(way: str, rows: list[dict[str, Any]]) -> list[object]:
    shares = [100 * row["top1"] for row in rows]
    accuracy = f"{fmean(shares):.2f}" + (f" ± {stdev(shares):.2f}" if len(shares) > 1 else "")
    return [f"`{way}`", f"{fmean(row['macs'] for row in rows):.3f}", accuracy, len(rows)]


def _inits(name: str, found: dict[str, Any]) -> str:
    columns = ["initialisation", "best rate", "top-1 %", "runs", "diverged", "of its tries"]
    table = markdown(columns, [_init_line(row) for row in found["summary"]])
    about = found["about"]
    title = f"**{about['network']} on {about['data']}, {about['recipe']['epochs']} epochs**\n\n"
    return title + table + source(name, found["environment"])


def _init_line(row: dict[str, Any]) -> list[object]:
    accuracy = "" if row["mean"] is None else f"{row['mean']:.2f}"
    accuracy += "" if row["sd"] is None else f" ± {row['sd']:.2f}"
    rate = "" if row["rate"] is None else f"x {row['rate']:g}"
    tries = f"{row['diverged_try']} of {row['tries']}"
    return [f"`{row['init']}`", rate, accuracy, row["runs"], row["diverged_full"], tries]
