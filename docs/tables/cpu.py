"""Speed on a CPU."""

from __future__ import annotations

from typing import Any

from tables.form import markdown, record, source


def cpu_speed() -> str:
    """Each network at its best against its dense twin at its best, for every batch size."""
    found = record("cpu_speed.json")
    rows: list[list[object]] = []
    for result in found["batches"]:
        for row in result["rows"]:
            times = (f"{t['ms']:.1f} ({t['low']:.1f} to {t['high']:.1f})" for t in (row["ms"], row["twin_ms"]))
            ratios = f"{row['mac_ratio']:.3f}", f"**{row['ratio']:.3f}**"
            rows.append([f"`{row['network']}`", result["batch"], *ratios, *times, row["way"], row["twin_way"]])
    columns = ["network", "batch", "MAC ratio", "time ratio", "ms", "dense ms", "<run by", "<dense by"]
    return markdown(columns, rows) + _note(found["environment"])


def cpu_filtered() -> str:
    """The same with minimal filtering: on both sides, and on ours against the runtimes as they are."""
    found = record("cpu_speed.json")
    rows: list[list[object]] = []
    for result in found["batches"]:
        for row in result["rows"]:
            both = (row["best_ms"], row["twin_best_ms"])
            times = (f"{t['ms']:.1f} ({t['low']:.1f} to {t['high']:.1f})" for t in both)
            ratios = (f"{row[name]:.3f}" for name in ("mac_ratio", "ratio_of_bests", "ratio_to_runtimes"))
            rows.append([f"`{row['network']}`", result["batch"], *ratios, *times, row["best_way"]])
    columns = ["network", "batch", "MAC ratio", "on both sides", "on ours alone", "ms", "dense ms", "<run by"]
    return markdown(columns, rows) + _note(found["environment"])


def _note(environment: dict[str, Any]) -> str:
    threads = environment["threads"]
    note = f"\nfloat32, {threads} threads for both; median and quartiles, all networks in turns in one run.\n"
    return note + source("cpu_speed.json", environment)


def cpu_layout() -> str:
    found = record("cpu_layout.json")
    rows: dict[str, list[object]] = {}
    for row in found["rows"]:
        what = f"`{row['network']}`, {'training step' if row['step'] == 'train' else 'inference'}"
        rows.setdefault(what, []).append(f"{row['ms']:.0f} ({row['least']:.0f} to {row['most']:.0f})")
    note = f"\nMilliseconds for 64 images, a quarter of the width: median of {found['rows'][0]['n']}, and range.\n"
    table = markdown(["", "ordinary layout", "channels_last"], [[what, *times] for what, times in rows.items()])
    return table + note + source("cpu_layout.json", found["environment"])
