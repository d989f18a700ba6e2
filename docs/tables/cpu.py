"""Speed on a CPU."""

from __future__ import annotations

from tables.form import markdown, record, source


def cpu_speed() -> str:
    """Each network at its best against its dense twin at its best: in the runtimes, and with minimal filtering."""
    found = record("cpu_speed.json")
    kinds = ("mac_ratio", "ratio", "ratio_of_bests")
    rows: list[list[object]] = [
        [f"`{row['network']}`", result["batch"], *(f"{row[kind]:.3f}" for kind in kinds)]
        for result in found["batches"]
        for row in result["rows"]
    ]
    columns = ["network", "batch", "MAC ratio", "time ratio", "filtered"]
    threads = found["environment"]["threads"]
    note = f"\nfloat32, {threads} threads for both; medians, all networks in turns in one run.\n"
    return markdown(columns, rows) + note + source("cpu_speed.json", found["environment"])
