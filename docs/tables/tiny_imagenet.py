"""Tiny-ImageNet: accuracy beside the paper's ILSVRC column, and what carries over."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

from tables.form import NO_RUNS, JsonRecord, from_record, markdown, source

RECORD = "tiny-imagenet/table.json"
MEASURES = {"top1": "top-1", "top5": "top-5", "overfit": "over-fitting"}
NOTE = (
    "Gaps in points, ours with the 95% interval over seeds; the spread of a run is pooled over the networks of "
    "one recipe.\nVerdicts are corrected for the number of claims (Holm).\n"
)


@from_record(RECORD)
def tiny_imagenet(found: JsonRecord) -> str:
    """For each recipe: the networks, the gaps between them, and how far their order is the published one."""
    parts = dict.fromkeys(row["part"] for row in found["rows"])
    text = "\n".join("".join(_part(found, part)) for part in parts)
    left = f"\nNot finished: {len(found['missing'])} runs.\n" if found["missing"] else ""
    return (text or NO_RUNS) + left + source(RECORD, *found["environments"])


def _part(found: dict[str, Any], part: str) -> Iterator[str]:
    rows = [row for row in found["rows"] if row["part"] == part]
    yield f"**{part.capitalize()} recipe**\n\n"
    yield markdown(
        ["network", "MACs", "top-1 %", "paper", "top-5 %", "paper", "seeds", "epochs", "s per run"],
        [_line(row) for row in rows],
    )
    yield "\nMean ± standard deviation over seeds; the paper's columns are ILSVRC's.\n"
    if note := found["notes"].get(part):
        yield f"{note}\n"
    for comparison in found["comparisons"]:
        if comparison["part"] == part:
            yield from _compared(comparison, {row["network"]: row["n"] for row in rows})


def _line(row: dict[str, Any]) -> list[object]:
    ours = [
        _accuracy(row["top1"]),
        _percent(row["published"]),
        _accuracy(row["top5"]),
        _percent(row["published_top5"]),
    ]
    name = ", ".join(filter(None, [f"`{row['network']}`", row["variant"]]))
    return [name, f"{row['macs'] / 1e6:.0f} M", *ours, row["n"], f"{row['epochs']:.0f}", f"{row['seconds']:,.0f}"]


def _accuracy(values: list[float]) -> str:
    spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{spread}"


def _percent(share: float | None) -> str:
    return f"{100 * share:.2f}" if share else ""


def _compared(comparison: dict[str, Any], seeds: dict[str, int]) -> Iterator[str]:
    measure, order = MEASURES[comparison["measure"]], comparison["order"]
    if comparison["gaps"]:
        yield "\n"
        columns = [f"as published? ({measure})", "MACs", "paper", "ours", "seeds", "<verdict"]
        yield markdown(columns, [_gap(gap, seeds) for gap in comparison["gaps"]])
        yield f"\n{NOTE}"
    if not order["pairs"]:
        return
    rank = order["rank_correlation"]
    correlated = "" if rank is None else f"; rank correlation {rank:.2f}"
    pairs = f"{order['alike']} of {order['pairs']} pairs of networks"
    yield f"{pairs} have the published order of {measure}{correlated}.\n"


def _gap(gap: dict[str, Any], seeds: dict[str, int]) -> list[object]:
    error = f" ± {gap['half_width']:.2f}" if gap["half_width"] is not None else ""
    published = "" if gap["published"] is None else f"{gap['published']:+.2f}"
    ours = f"{gap['ours']:+.2f}{error}"
    fewest = min(seeds[gap["network"]], seeds[gap["base"]])
    return [gap["question"], f"x {gap['mac_ratio']:.2f}", published, ours, fewest, gap["verdict"]]
