"""What depth does to gradients, and which filters do nothing."""

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
    """What twelve layers of each scheme leave of a signal and of a gradient, on average and as a rule."""
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
        "\nMean square of the signal that leaves twelve layers on 8x8 maps, where a unit goes in: mean (median)"
        f"\nover draws of the weights, {draws}. Last: the gradient, circular padding.\n"
    )
    return markdown(columns, rows) + note + source("init_depth.json", found["environment"])


@from_record("depth_flow.json")
def depth_flow(found: JsonRecord) -> str:
    """Networks as initialised: how gradients change on their way down, and the filters that answer nothing."""
    columns = ["network", "<batch norm", "first / last", "least", "most", "dead filters", "<most of one group"]
    rows = [_flow(row) for row in found["rows"]]
    setting, seeds = found["setting"], max(len(row.get("seeds", [row])) for row in found["rows"])
    note = (
        "\nNorm of the gradient at the output of a conv over that of the last conv: of the first one (geometric "
        f"mean and range of\n{seeds} seeds), and the least and the most of all convs and seeds. Dead: answers "
        f"none of {setting['images']} images with\n{setting['dead_below']:g} of the largest answer in its layer; "
        "mean over seeds, and the group with the largest share in any.\n"
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
