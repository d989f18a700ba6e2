"""Tiny-ImageNet: accuracy beside the paper's ILSVRC column, and what carries over."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev
from typing import Any

from tables.form import NO_RUNS, JsonRecord, chip, from_record, markdown, source

RECORD = "tiny-imagenet/table.json"
NOTE = (
    "Gaps in points with the 95% interval over seeds, whose spread is pooled over the networks. Verdicts are "
    "corrected for the number of claims (Holm).\n"
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
    seeds = " to ".join(str(n) for n in sorted({row["n"] for row in rows}))
    yield f"**{part.capitalize()} recipe, {rows[0]['epochs']:.0f} epochs, {seeds} seeds of each**\n\n"
    yield markdown(
        ["network", "MACs", "top-1 %", "paper", "top-5 %", "paper"],
        [_line(row) for row in rows],
    )
    yield "\nMean ± standard deviation over seeds; the paper's columns are ILSVRC's.\n"
    if note := found["notes"].get(part):
        yield f"{note}\n"
    yield from _compared({one["measure"]: one for one in found["comparisons"] if one["part"] == part})


def _line(row: dict[str, Any]) -> list[object]:
    ours = [
        _accuracy(row["top1"]),
        _percent(row["published"]),
        _accuracy(row["top5"]),
        _percent(row["published_top5"]),
    ]
    name = ", ".join(filter(None, [f"`{row['network']}`", row["variant"]]))
    return [name, f"{row['macs'] / 1e6:.0f} M", *ours]


def _accuracy(values: list[float]) -> str:
    spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{spread}"


def _percent(share: float | None) -> str:
    return f"{100 * share:.2f}" if share else ""


def _compared(comparisons: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Each claim with its gap in top-1; over-fitting has a line of its own."""
    gaps = {measure: {one["question"]: one for one in found["gaps"]} for measure, found in comparisons.items()}
    if not any(gaps.values()):
        return
    first, apart = (gaps.get(measure, {}) for measure in ("top1", "overfit"))
    rows = [[name, f"x {one['mac_ratio']:.2f}", *_gap(one)] for name, one in first.items()]
    yield "\n" + markdown(["as published, top-1?", "MACs", "paper", "ours", "<verdict"], rows)
    told = [f"{name}: {_gap(one)[1]}, {_gap(one)[2]}." for name, one in apart.items()]
    yield f"\n{' '.join([*told, NOTE])}"
    order = comparisons["top1"]["order"]
    yield f"{order['alike']} of {order['pairs']} pairs have the published order of top-1.\n"


def _gap(gap: dict[str, Any]) -> list[str]:
    error = f" ± {gap['half_width']:.2f}" if gap["half_width"] is not None else ""
    published = "" if gap["published"] is None else f"{gap['published']:+.2f}"
    return [published, f"{gap['ours']:+.2f}{error}", chip(gap["verdict"])]
