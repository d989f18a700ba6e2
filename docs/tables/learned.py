"""Learned shapes against fixed shares and thin networks, and initialisations at their best rates."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tables import form
from tables.form import NO_RUNS, markdown, source

from lowrank_cnn.choose.verdict import YES
from lowrank_cnn.graph.finalize_shapes import LearnedShapes
from lowrank_cnn.method.schemes import parse_scheme
from lowrank_cnn.models import create_model
from lowrank_cnn.report.figures import shapes_spec
from lowrank_cnn.report.style import save_charts
from lowrank_cnn.report.trade import LEARNED, LOW_RANK, THIN, TradePoint, trade_chart, trade_spec


def learned_shapes() -> str:
    """For each record with times: the ways by falling accuracy."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(form.RESULTS.glob("learned_shapes*.json"))}
    return "\n".join(_ways(name, one) for name, one in found.items() if one.get("equal_time")) or NO_RUNS


def initialisations() -> str:
    """One table for each record of full runs."""
    paths = sorted(form.RESULTS.glob("initialisation*.json"))
    return "\n".join(_inits(path.name, json.loads(path.read_text())) for path in paths) or NO_RUNS


def _ways(name: str, found: dict[str, Any]) -> str:
    about = found["about"]
    rows = [row for row in found["rows"] if row.get("phase", "full") == "full" and row["top1"] is not None]
    ways = {way: [row for row in rows if row["way"] == way] for way in dict.fromkeys(row["way"] for row in rows)}
    order = sorted(ways, key=lambda way: -fmean(row["top1"] for row in ways[way]))
    lines = [_line(way, ways[way]) for way in order]
    title = f"**{about['network']} on {about['data']}, {about['recipe']['epochs']} epochs**\n\n"
    columns = ["way", "of the MACs", "of the dense time", "top-1 %", "runs"]
    schemes = {row["way"]: row["scheme"] for row in rows if "scheme" in row}
    told = "; ".join(f"`{way}`: `{scheme}`" for way, scheme in schemes.items())
    known = found.get("environments", [found["environment"]])
    return f"{title}{markdown(columns, lines)}\nIn every layer: {told}.\n{source(name, *known)}"


def _line(way: str, rows: list[dict[str, Any]]) -> list[object]:
    shares = [100 * row["top1"] for row in rows]
    accuracy = f"{fmean(shares):.2f}" + (f" ± {stdev(shares):.2f}" if len(shares) > 1 else "")
    ms = next((row["ms"] for row in rows if "ms" in row), None)
    time = "" if ms is None else f"{ms['ours'] / ms['dense']:.2f}"
    return [f"`{way}`", f"{fmean(row['macs'] for row in rows):.3f}", time, accuracy, len(rows)]


def _inits(name: str, found: dict[str, Any]) -> str:
    columns = ["initialisation", "best rate", "top-1 %", "runs", "diverged"]
    rates = [row["rate"] for row in found["rows"] if row["phase"] == "try"]
    edges = (min(rates, default=0), max(rates, default=0))
    table = markdown(columns, [_init_line(row, edges) for row in found["summary"]])
    about = found["about"]
    title = f"**{about['network']} on {about['data']}, {about['recipe']['epochs']} epochs**\n\n"
    decided = [f"`{one['ours']}` over `{one['theirs']}`" for one in found["answers"] if one["verdict"] == YES]
    tries = f"Rates were tried in runs of {about['try_epochs']} epochs, on held-out images."
    if any(0 < row["diverged_full"] < row["runs"] for row in found["summary"]):
        tries += " Means are those of the runs that did not diverge."
    told = f"\n{tries} Decided: {', '.join(decided) or 'nothing'}.\n"
    return title + table + told + source(name, *found.get("environments", [found["environment"]]))


def _init_line(row: dict[str, Any], edges: tuple[float, float]) -> list[object]:
    accuracy = "" if row["mean"] is None else f"{row['mean']:.2f}"
    accuracy += "" if row["sd"] is None else f" ± {row['sd']:.2f}"
    rate = "" if row["rate"] is None else f"x {row['rate']:g}" + (", at the edge" if row["rate"] in edges else "")
    return [f"`{row['init']}`", rate, accuracy, row["runs"], row["diverged_full"]]


def draw(out: Path) -> Path:
    """The shapes that the first run of the default way learned on stripes, as stacked bars."""
    found = json.loads((form.RESULTS / "learned_shapes_stripes.json").read_text())
    about = found["about"]
    row = next(row for row in found["rows"] if row["way"] == "proximal")
    shapes = LearnedShapes({name: parse_scheme(text) for name, text in row["shapes"].items()})
    network = create_model(about["network"], num_classes=4, in_channels=1, width=about["width"])
    title = f"Learned shapes: {about['network']} (width {about['width']:g}), {about['macs']:g} of the MACs"
    return save_charts([shapes_spec(title, shapes.apply(network))], out)


def draw_times(out: Path) -> Path:
    """Accuracy against time: learned networks among fixed shares and thin networks, one chart for each record."""
    records = [json.loads(path.read_text()) for path in sorted(form.RESULTS.glob("learned_shapes*.json"))]
    return save_charts([_timed_spec(found) for found in records if found.get("equal_time")], out)


def _timed_spec(found: dict[str, Any]) -> dict[str, Any]:
    about = found["about"]
    timed = {row["way"]: row["ms"] for row in found["rows"] if "ms" in row}
    dense = next(iter(timed.values()))["dense"]  # ways timed in other runs are set beside it by their share of it
    points = [
        _timed_point(way, ms["ours"] * dense / ms["dense"], [row for row in found["rows"] if row["way"] == way])
        for way, ms in timed.items()
    ]
    title = {
        "text": f"{about['network']} on {about['data']}",
        "subtitle": f"{about['recipe']['epochs']} epochs; mean and standard deviation of the runs of each",
    }
    return {**trade_spec(trade_chart(points, "batch", "top1")), "title": title}


def _timed_point(way: str, ms: float, rows: list[dict[str, Any]]) -> TradePoint:
    shares = [row["top1"] for row in rows if row["top1"] is not None]
    kind = {"thin": THIN, "strips": LOW_RANK, "points": LOW_RANK}.get(way.partition(":")[0], LEARNED)
    spread = {"top1": stdev(shares)} if len(shares) > 1 else {}
    label, values = way.replace(":", " at "), {"top1": fmean(shares), "batch": ms}
    return TradePoint(label, kind, "", "", values, spread, n=rows[0]["images"])


if __name__ == "__main__":
    images = Path(__file__).parents[1] / "images"
    draw(images / "learned-shapes.svg")
    draw_times(images / "learned-times.svg")
