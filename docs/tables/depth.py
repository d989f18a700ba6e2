"""Gradients at depth, and dead filters."""

from __future__ import annotations

from statistics import geometric_mean, mean
from typing import Any

from tables.form import JsonRecord, from_record, markdown, record, source


def init_depth() -> str:
    found = record("init_depth.json")
    by_name: dict[str, list[str]] = {}
    for row in found["rows"]:
        spread = f"{min(row['gradients']):.2g} to {max(row['gradients']):.2g}"
        by_name.setdefault(row["initialisation"], []).extend([f"{row['gradient']:.2g}", spread])
    columns = ["initialisation", "circular padding", "spread", "zero padding", "spread"]
    seeds = len(found["setting"]["seeds"])
    note = f"\nGeometric mean and range over {seeds} seeds.\n"
    table = markdown(columns, [[name, *values] for name, values in by_name.items()])
    return table + note + source("init_depth.json", found["environment"])


@from_record("init_depth.json")
def join_depth(found: JsonRecord) -> str:
    """Mean and median of signal and gradient after twelve layers of each scheme."""
    kinds = dict.fromkeys((row["padding"], row["width"]) for row in found["schemes"])
    columns = ["scheme", *(f"{padding}, width {width}" for padding, width in kinds), "gradient, narrowest"]
    by_scheme: dict[str, list[str]] = {}
    for row in found["schemes"]:
        cells = by_scheme.setdefault(row["scheme"], [])
        cells.append(f"{row['signal']:.2f} ({row['median_signal']:.2f})")
    first = found["schemes"][: len(by_scheme)]
    rows = [
        [f"`{row['scheme']}`", *by_scheme[row["scheme"]], f"{row['gradient']:.2f} ({row['median_gradient']:.2f})"]
        for row in first
    ]
    draws = " and ".join(dict.fromkeys(f"{row['draws']} of width {row['width']}" for row in found["schemes"]))
    note = (
        "\nMean square of a unit signal after twelve layers on 8x8 feature maps: mean (median)"
        f"\nover draws of the weights, {draws}. Last: the gradient, circular padding.\n"
    )
    return markdown(columns, rows) + note + source("init_depth.json", found["environment"])


@from_record("depth_flow.json")
def depth_flow(found: JsonRecord) -> str:
    """Networks at initialisation: how gradients change with depth, and dead filters."""
    columns = ["network", "<batch norm", "first / last", "least", "most", "dead filters", "<most of one group"]
    rows = [_flow(row) for row in found["rows"]]
    setting, seeds = found["setting"], max(len(row.get("seeds", [row])) for row in found["rows"])
    note = (
        "\nNorm of the gradient at the output of a conv, divided by that of the last conv: for the first conv "
        f"(geometric mean and\nrange of {seeds} seeds), and the least and the most of all convs and seeds. A "
        f"filter is dead if its output stays below\n{setting['dead_below']:g} of the largest of its layer on all "
        f"{setting['images']} images; mean over seeds, and the group with the largest share.\n"
    )
    return markdown(columns, rows) + note + source("depth_flow.json", found["environment"])


def _flow(row: dict[str, Any]) -> list[object]:
    seeds = row.get("seeds", [row])
    ratios = [seed["first_to_last"] for seed in seeds]
    first = _ratio(geometric_mean(ratios))
    first += f" ({_ratio(min(ratios))} to {_ratio(max(ratios))})" if len(ratios) > 1 else ""
    ends = _ratio(min(seed["least"] for seed in seeds)), _ratio(max(seed["most"] for seed in seeds))
    group, share = max((seed["worst_group"] for seed in seeds), key=lambda worst: worst[1])
    worst = f"{share:.1%}: `{group}`" if share else "none"
    norm = {None: "no", "batch": "yes"}[row["norm"]] if "norm" in row else ""
    return [f"`{row['network']}`", norm, first, *ends, f"{mean(seed['dead_share'] for seed in seeds):.1%}", worst]


def _ratio(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"
