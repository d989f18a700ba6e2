"""Memory of a training step."""

from __future__ import annotations

from tables.form import JsonRecord, from_record, markdown, source

WAY = "all maps kept"
"""The record has another, which the library no longer has."""


@from_record("memory.json")
def memory(found: JsonRecord) -> str:
    """At the larger image and batch: what a forward pass keeps per image, and the peak of a step on a GPU."""
    kept, peaks = found["kept"], found.get("peaks", {"rows": []})
    size = max(row["image"] for row in kept["rows"])
    batch = max((row["batch"] for row in peaks["rows"]), default=0)
    cells: dict[str, list[str]] = {}
    for row in (row for row in kept["rows"] if (row["image"], row["way"]) == (size, WAY)):
        start = cells.setdefault(row["network"], [f"{row['weight_bytes'] / 1e6:.0f}"])
        start.append(f"{row['kept_bytes_per_image'] / 1e6:.1f}")
    for row in (row for row in peaks["rows"] if (row["image"], row["batch"], row["way"]) == (size, batch, WAY)):
        cells[row["network"]].append(
            "too large" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        )
    columns = ["network", "weights, MB", "MB per image", *(["GB of a step"] if peaks["rows"] else [])]
    note = (
        f"\nAt {size} pixels: weights and the tensors that the forward pass keeps, in float32, without fused "
        f"layers; peak of a training step, batch {batch}, bf16, layers fused.\n"
    )
    environments = [part["environment"] for part in (kept, peaks) if "environment" in part]
    table = markdown(columns, [[f"`{network}`", *values] for network, values in cells.items()])
    return table + note + source("memory.json", *environments)
