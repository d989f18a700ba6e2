"""Speed on a CPU."""

from __future__ import annotations

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
    env = found["environment"]
    note = (
        f"\nfloat32, {env['threads']} threads for both; median and quartiles, all networks in turns in one run.\n"
    )
    return markdown(columns, rows) + note + source("cpu_speed.json", env)


def cpu_layout() -> str:
    found = record("cpu_layout.json")
    rows: dict[str, list[object]] = {}
    for row in found["rows"]:
        what = f"`{row['network']}`, {'training step' if row['step'] == 'train' else 'inference'}"
        rows.setdefault(what, []).append(f"{row['ms']:.0f} ({row['least']:.0f} to {row['most']:.0f})")
    note = f"\nMilliseconds for 64 images, a quarter of the width: median of {found['rows'][0]['n']}, and range.\n"
    table = markdown(["", "ordinary layout", "channels_last"], [[what, *times] for what, times in rows.items()])
    return table + note + source("cpu_layout.json", found["environment"])
