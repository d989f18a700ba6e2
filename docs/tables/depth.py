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
    setting, seeds = found["setting"], max(len(row.get("seeds", [row])) for row in found["rows"])
    flows: dict[str, dict[str | None, list[str]]] = {}
    for row in found["rows"]:
        flows.setdefault(row["network"], {})[row.get("norm")] = _flow(row)
    norms = {None: "", "batch": ", batch norm"}
    kinds = [norm for norm in norms if any(norm in found for found in flows.values())]
    columns = [f"{what}{norms[norm]}" for norm in kinds for what in ("first / last", "dead")]
    rows = [
        [f"`{name}`", *(cell for norm in kinds for cell in found.get(norm, ["", ""]))]
        for name, found in flows.items()
    ]
    note = (
        "\nNorm of the gradient at the output of the first conv, divided by that of the last (geometric mean of "
        f"{seeds} seeds);\nfilters whose output stays below {setting['dead_below']:g} of the largest of their "
        f"layer on all {setting['images']} images (mean).\n"
    )
    return markdown(["network", *columns], rows) + note + source("depth_flow.json", found["environment"])


def _flow(row: dict[str, Any]) -> list[str]:
    seeds = row.get("seeds", [row])
    first = geometric_mean([seed["first_to_last"] for seed in seeds])
    return [
        f"{first:.2g}" if first < 100 else f"{first:,.0f}",
        f"{mean(seed['dead_share'] for seed in seeds):.1%}",
    ]
