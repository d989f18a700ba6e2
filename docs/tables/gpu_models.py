"""Today's networks on a GPU: low rank beside dense and thin dense, through `optimize` and `fit`."""

from __future__ import annotations

from typing import Any

from tables.form import markdown, record, recorded, source

FILE = "gpu_models.json"
MODES = {
    "inference": "Inference, batch 256",
    "batch1": "Inference, batch 1",
    "training": "Training step, batch 256",
}
WAYS = ("dense, torch.compile", "dense, optimize", "thin, optimize", "low-rank, optimize")
TRAINING = {"dense, optimize": "dense, fit", "thin, optimize": "thin, fit", "low-rank, optimize": "low-rank, fit"}


NOTE = """Milliseconds, 224x224, bf16; in brackets the ratio to dense by the compiler. Thin: the dense network of
the same MACs, its widths in multiples of 16. Compiler: torch.compile with freezing as a CUDA graph, none of our
kernels. Ours: `lr.optimize` or `lr.fit`, which take the faster of our kernels and the compiler's. Median of calls in turns, one process per row.
"""


def gpu_models() -> str:
    """A section with a table for each mode that was measured; nothing as long as there is no record."""
    if not recorded(FILE):
        return ""
    parts = [
        f"### {title[0].upper()}{title[1:]}\n\n{table}" for mode, title in MODES.items() if (table := _table(mode))
    ]
    return "\n".join(["## Networks of torchvision and timm on a GPU\n", *parts, NOTE]) if parts else ""


def _table(mode: str) -> str:
    """Milliseconds of every way, and in brackets the ratio to dense by torch.compile."""
    rows, environments = [], []
    for run, row in _newest(mode):
        times = row[mode]["ms"]
        names = [TRAINING.get(way, way) if mode == "training" else way for way in WAYS]
        rival = times[names[0]]["ms"]
        name, scheme = row["row"].partition(":")[2].split("/")
        ratio = f"{row['macs']['low-rank'] / row['macs']['dense']:.3f}"
        rows.append([f"`{name}`, `{scheme}`", ratio, *(_cell(times.get(way), rival) for way in names)])
        environments.append(run["environment"])
    if not rows:
        return ""
    rivals = ["dense: compiler", "dense: ours", "thin: ours"]
    return markdown(["network, scheme", "MACs", *rivals, "low rank: ours"], rows) + source(FILE, *environments)


def _newest(mode: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each row the newest run of this mode; one that was cut short does not replace one with more ways."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for run in record(FILE)["runs"]:
        for row in run["rows"]:
            measured = row.get(mode, {}).get("ms", {})
            known = found[row["row"]][1][mode]["ms"] if row["row"] in found else {}
            if WAYS[0] in measured and len(measured) >= len(known):
                found[row["row"]] = run, row
    return list(found.values())


def _cell(time: dict[str, float] | None, rival: float) -> str:
    return f"{time['ms']:.2f} ({time['ms'] / rival:.2f})" if time else "not measured"
