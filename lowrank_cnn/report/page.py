"""The page: one HTML file with everything in it, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lowrank_cnn.paper.auditing import audit
from lowrank_cnn.report import charts, sections
from lowrank_cnn.report.entries import gather
from lowrank_cnn.report.entry import Entry
from lowrank_cnn.report.files import read_records, require_records
from lowrank_cnn.report.markup import embed, escape
from lowrank_cnn.report.records import Records
from lowrank_cnn.report.trained import accuracies
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.train.checkpoint import write_atomically

SCRIPTS = ("base.js", "table.js", "scatter.js", "curves.js", "bars.js", "start.js")


def write_report(run_paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page about the records in these files and folders, and return the path that it was written to."""
    records = read_records(run_paths)
    require_records(run_paths, records)
    return write_page(records, out)


def write_page(records: Records, out: str | Path) -> Path:
    """Write the page about records that were read before."""
    out = Path(out)
    if out.is_dir():
        raise LowRankError(f"{out} is a folder: give the name of a file, like {out / 'report.html'}.")
    page = render(records)
    write_atomically(out, page.encode())
    return out


def render(records: Records) -> str:
    """The page as text."""
    entries, here = gather(records), environment()
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        "policy": _policy(style, script),
        "style": style,
        "script": script,
        "made": escape(f"{str(here['date'])[:16].replace('T', ' ')} UTC by lowrank-cnn {here['lowrank_cnn']}"),
        "found": escape(found_in(records)),
        "skipped": sections.skipped(records.problems),
        "headline": sections.headline(entries),
        "summary": sections.summary_table(entries),
        "published": sections.published_table(),
        "audit": sections.audit_part(audit(accuracies(records.runs))),
        "environment": sections.environment_part(records, here),
        "problems": sections.problems_part(records.problems),
        "data": embed(_chart_data(records, entries)),
    }
    return Template(_asset("page.html")).substitute(parts)


def _chart_data(records: Records, entries: Sequence[Entry]) -> dict[str, Any]:
    points = charts.points_of(entries)
    return {
        "scatters": charts.scatters(points),
        "curves": charts.curves(entries),
        "layers": charts.layer_charts(records.timings),
    }


def found_in(records: Records) -> str:
    """How many runs and timings there are, in words."""
    counts = [(len(records.runs), "training run"), (len(records.timings), "timing")]
    return " and ".join(f"{n} {name}{'s' * (n != 1)}" for n, name in counts if n)


def _asset(name: str) -> str:
    return (files("lowrank_cnn.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Only this style and this script may run, and nothing may be fetched, whatever a record holds."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
