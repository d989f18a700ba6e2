"""The picture of a frontier: accuracy against time, multiply-accumulates and parameters, dense beside low-rank."""

from __future__ import annotations

from pathlib import Path

from lowrank_cnn.frontier.designs import SHAPES
from lowrank_cnn.frontier.record import DesignRow, Frontier
from lowrank_cnn.report.charts.trade import DENSE, LEARNED, LOW_RANK, TradePoint, trade_chart, trade_spec
from lowrank_cnn.report.charts.vega import save_charts
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.statistics import mean_interval
from lowrank_cnn.system.text import counted


def draw_frontier(found: Frontier, out: str | Path) -> Path:
    """Draw a record into a file whose name says the format: svg, pdf or png."""
    points = [_point(found, row) for row in found.rows if row.runs]
    if not points:
        raise LowRankError(f"nothing in {found.folder} is trained yet: there is nothing to draw.")
    costs = [cost for cost in ("batch", "macs", "params") if all(cost in point.values for point in points)]
    runs = sorted({len(row.runs) for row in found.rows if row.runs})
    count = f"{runs[0]} to {runs[-1]} runs" if len(runs) > 1 else counted(runs[0], "run")
    title = {
        "text": found.title,
        "subtitle": f"Mean of {count} with its 95% interval over seeds; dashed: the Pareto front",
    }
    return save_charts(
        [{**trade_spec(trade_chart(points, cost, "top1")), "title": title} for cost in costs], Path(out)
    )


def _point(found: Frontier, row: DesignRow) -> TradePoint:
    mean, _, high = mean_interval([run.correct / found.images for run in row.runs])
    values = {"top1": mean, "macs": float(row.macs), "params": float(row.params)}
    values |= {} if (ms := found.ms(row)) is None else {"batch": ms}
    learned = row.design["scheme"].startswith(SHAPES)
    kind = DENSE if row.dense else LEARNED if learned else LOW_RANK
    return TradePoint(row.name, kind, "", "frontier", values, {"top1": high - mean}, n=found.images)
