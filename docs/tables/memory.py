"""Memory of a training step."""

from __future__ import annotations

from typing import Any

from tables.form import JsonRecord, from_record, markdown, source


@from_record("memory.json")
def memory(found: JsonRecord) -> str:
    """Memory that a forward pass keeps per image, and the peak of a step on a GPU."""
    text = _kept(found["kept"])
    return text + ("\n" + _peaks(found["peaks"]) if "peaks" in found else "")


def _kept(part: dict[str, Any]) -> str:
    kept = {(row["network"], row["image"], row["way"]): row for row in part["rows"]}
    sizes, ways = (list(dict.fromkeys(row[key] for row in part["rows"])) for key in ("image", "way"))
    rows: list[list[object]] = []
    for network in dict.fromkeys(row["network"] for row in part["rows"]):
        cells = [f"{kept[network, size, way]['kept_bytes_per_image'] / 1e6:.2f}" for size in sizes for way in ways]
        rows.append([f"`{network}`", f"{kept[network, sizes[0], ways[0]]['weight_bytes'] / 1e6:.0f}", *cells])
    columns = ["network", f"weights at {sizes[0]}", *(f"{size}: {way}" for size in sizes for way in ways)]
    note = (
        "\nMegabytes of the weights, and of the tensors that the forward pass keeps per image, in float32, "
        "without fused layers. In bf16 activations take half, the indices of max-pools the same.\n"
    )
    return markdown(columns, rows) + note + source("memory.json", part["environment"])


def _peaks(part: dict[str, Any]) -> str:
    peaks = {(row["network"], row["image"], row["way"], row["batch"]): row for row in part["rows"]}
    batches = sorted({row["batch"] for row in part["rows"]})
    lines = dict.fromkeys((row["network"], row["image"], row["way"]) for row in part["rows"])
    rows = [
        [f"`{line[0]}`", *line[1:], *(_peak(peaks.get((*line, batch))) for batch in batches)] for line in lines
    ]
    columns = ["network", "image", "<way", *(f"batch {batch}" for batch in batches)]
    note = "\nPeak of allocated gigabytes in a training step, bf16, layers fused.\n"
    return markdown(columns, rows) + note + source("memory.json", part["environment"])


def _peak(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return "too large" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
