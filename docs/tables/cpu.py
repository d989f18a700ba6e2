"""Speed on a CPU."""

from __future__ import annotations

from tables.form import markdown, record, source


def cpu_speed() -> str:
    """Each network at its best against its dense twin at its best: in the runtimes, and with minimal filtering."""
    found = record("cpu_speed.json")
    kinds = ("mac_ratio", "ratio", "ratio_of_bests", "ratio_to_runtimes")
    rows: list[list[object]] = [
        [f"`{row['network']}`", result["batch"], *(f"{row[kind]:.3f}" for kind in kinds)]
        for result in found["batches"]
        for row in result["rows"]
    ]
    columns = ["network", "batch", "MAC ratio", "time ratio", "filtered on both sides", "on ours alone"]
    threads = found["environment"]["threads"]
    note = f"\nfloat32, {threads} threads for both; medians, all networks in turns in one run.\n"
    return markdown(columns, rows) + note + source("cpu_speed.json", found["environment"])


def cpu_layout() -> str:
    found = record("cpu_layout.json")
    rows: dict[str, list[object]] = {}
    for row in found["rows"]:
        what = f"`{row['network']}`, {'training step' if row['step'] == 'train' else 'inference'}"
        rows.setdefault(what, []).append(f"{row['ms']:.0f} ({row['least']:.0f} to {row['most']:.0f})")
    note = f"\nMilliseconds for 64 images, a quarter of the width: median of {found['rows'][0]['n']}, and range.\n"
    table = markdown(["", "ordinary layout", "channels_last"], [[what, *times] for what, times in rows.items()])
    return table + note + source("cpu_layout.json", found["environment"])
