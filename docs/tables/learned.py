"""Learned shapes beside fixed shares and thin networks, and initialisations at their best rates."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tables import form
from tables.form import NO_RUNS, markdown, source

from lowrank_cnn.method.scheme import parse_scheme
from lowrank_cnn.method.settling import LearnedShapes
from lowrank_cnn.models import create_model
from lowrank_cnn.report.charts.shapes import shapes_spec
from lowrank_cnn.report.charts.vega import save_charts


def learned_shapes() -> str:
    """One table for each record: the ways by falling accuracy, and the verdicts that were reached."""
    paths = sorted(form.RESULTS.glob("learned_shapes*.json"))
    return "\n".join(_ways(path.name, json.loads(path.read_text())) for path in paths) or NO_RUNS


def initialisations() -> str:
    """One table for each record of full runs."""
    paths = sorted(form.RESULTS.glob("initialisation*.json"))
    return "\n".join(_inits(path.name, json.loads(path.read_text())) for path in paths) or NO_RUNS


def _ways(name: str, found: dict[str, Any]) -> str:
    about, answers = found["about"], found.get("answers", [])
    rows = [row for row in found["rows"] if row.get("phase", "full") == "full" and row["top1"] is not None]
    ways = {way: [row for row in rows if row["way"] == way] for way in dict.fromkeys(row["way"] for row in rows)}
    order = sorted(ways, key=lambda way: -fmean(row["top1"] for row in ways[way]))
    rivals = list(dict.fromkeys(one["theirs"] for one in answers))
    gaps = {(one["ours"], one["theirs"]): _gap(one) for one in answers}
    width = f" (width {about['width']:g})" if about["width"] != 1 else ""
    images = f", {about['train']:,} images" if about.get("train") else ""
    title = f"**{about['network']}{width} on {about['data']}{images}, {about['recipe']['epochs']} epochs**\n\n"
    columns = ["way", "of the MACs", "top-1 %", "runs", *(f"over `{rival}`, 99 % interval" for rival in rivals)]
    lines = [[*_line(way, ways[way]), *(gaps.get((way, rival), "") for rival in rivals)] for way in order]
    decided = [one for one in answers if one["verdict"] in ("yes", "no")]
    verdicts = [
        f"`{one['ours']}` over `{one['theirs']}` by {one['margin']:g}: {one['verdict']}" for one in decided
    ]
    told = f"\nBy the margins written down before the runs: {'; '.join(verdicts) or 'nothing is decided'}.\n"
    return title + markdown(columns, lines) + told + _mechanisms(found) + source(name, found["environment"])


def _mechanisms(found: dict[str, Any]) -> str:
    """The default against the other ways to learn shapes."""
    gaps = [f"`{one['theirs']}` {_gap(one)}" for one in found.get("mechanisms", [])]
    return f"\n`proximal` is ahead by, in points with 99 % intervals: {'; '.join(gaps)}.\n" if gaps else ""


def _gap(one: dict[str, Any]) -> str:
    return f"{one['gap']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"


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


def draw(out: Path) -> Path:
    """The shapes that the first run of the default way learned on stripes, as stacked bars."""
    found = json.loads((form.RESULTS / "learned_shapes_stripes.json").read_text())
    about = found["about"]
    row = next(row for row in found["rows"] if row["way"] == "proximal")
    shapes = LearnedShapes({name: parse_scheme(text) for name, text in row["shapes"].items()})
    network = create_model(about["network"], num_classes=4, in_channels=1, width=about["width"])
    title = f"Learned shapes: {about['network']} (width {about['width']:g}), {about['macs']:g} of the MACs"
    return save_charts([shapes_spec(title, shapes.apply(network))], out)


if __name__ == "__main__":
    draw(Path(__file__).parents[1] / "images" / "learned-shapes.svg")
