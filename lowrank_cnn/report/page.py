"""The page: one HTML file with everything in it, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowrank_cnn.paper.auditing import audit, summary
from lowrank_cnn.report.cards import cards, headline
from lowrank_cnn.report.charts import curves, details, layers, trade, vega
from lowrank_cnn.report.gathering import gather
from lowrank_cnn.report.paper_runs import accuracies, layer_times
from lowrank_cnn.report.reading import read_records, require_records
from lowrank_cnn.report.records import NetworkResult, Records
from lowrank_cnn.report.tables import (
    VERDICT_COLOURS,
    audit_table,
    environment_table,
    published_table,
    summary_table,
)
from lowrank_cnn.system.environment import environment
from lowrank_cnn.system.errors import LowRankError, require
from lowrank_cnn.system.files import write_atomically
from lowrank_cnn.system.text import counted

SCRIPTS = ("vega/vega.js", "base.js", "drawing.js", "trade.js", "curves.js", "details.js", "page.js")
"""In the order in which the page runs them."""


def write_report(run_paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page about the records in these files and folders, and return the path that it was written to.

    Example:
        >>> write_report(["runs"], "report.html")  # doctest: +SKIP
    """
    records = read_records(run_paths)
    require_records(run_paths, records)
    return write_page(records, out)


def write_page(records: Records, out: str | Path) -> Path:
    """Write the page about records that were read before, in one move."""
    out = Path(out)
    if out.is_dir():
        raise LowRankError(f"{out} is a folder: give the name of a file, like {out / 'report.html'}.")
    write_atomically(out, render(records).encode())
    return out


def render(records: Records) -> str:
    """The page as text."""
    results, here = gather(records), environment()
    told = cards(results)
    findings = audit(accuracies(records.runs), layer_times(records.timings))
    style, script = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    return _template().render(
        policy=_policy(style, script),
        style=style,
        script=script,
        made=f"{str(here['date'])[:16].replace('T', ' ')} UTC by lowrank-cnn {here['lowrank_cnn']}",
        found=found_in(records),
        unsealed=sum(not run.sealed for run in records.runs),
        headline=headline(told),
        cards=told,
        networks=summary_table(results),
        published=published_table(),
        findings=len(findings),
        verdicts=[(verdict, n, VERDICT_COLOURS[verdict]) for verdict, n in summary(findings).items()],
        audit=audit_table(findings),
        machines=environment_table(records, here),
        skipped=records.skipped,
        data=_chart_data(records, results),
    )


def _chart_data(records: Records, results: Sequence[NetworkResult]) -> dict[str, Any]:
    """The charts' data, and once for all of them their specifications."""
    return {
        "trade": trade.trade_charts(trade.trade_points(results)),
        "curves": curves.training_curves(results),
        "layers": layers.layer_charts(records.timings),
        "details": details.details_data(results),
        "specs": {"trade": trade.SPEC, "curves": curves.SPEC, "layers": layers.SPEC},
        "labels": {"transform": vega.LABELS, "leaders": vega.LEADERS},
        "themes": {"light": vega.theme(), "dark": vega.theme(dark=True)},
        "kinds": {
            kind: dict(zip(("shape", "light", "dark"), look, strict=True)) for kind, look in trade.KINDS.items()
        },
        "measures": curves.MEASURES,
        "axes": trade.AXES,
    }


def found_in(records: Records) -> str:
    """How many runs and timings there are, in words."""
    counts = [(len(records.runs), "training run"), (len(records.timings), "timing")]
    return " and ".join(counted(n, name) for n, name in counts if n)


def _template() -> Any:
    """The template, which escapes whatever it is given."""
    jinja2: Any = require("jinja2", extra="plots", purpose="writing a report")
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made.from_string(_asset("page.html"))


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
