"""Today's networks on a GPU: low rank beside dense and thin dense, through `optimize` and `fit`."""

from __future__ import annotations

from typing import Any

from tables.form import NO_RUNS, markdown, record, recorded, source

FILE = "gpu_models.json"
MODES = {
    "inference": "inference, batch 256",
    "batch1": "inference, batch 1",
    "training": "training step, batch 256",
}
WAYS = ("dense, torch.compile", "dense, optimize", "thin, torch.compile", "thin, optimize", "low-rank, optimize")
TRAINING = {"dense, optimize": "dense, fit", "thin, optimize": "thin, fit", "low-rank, optimize": "low-rank, fit"}


def gpu_models(mode: str) -> str:
    """Milliseconds of every way, and in brackets the ratio to dense by torch.compile."""
    if not recorded(FILE):
        return NO_RUNS
    rows, environments = [], []
    for run, row in _newest(mode):
        times = _best_fits(row[mode]["ms"])
        names = [TRAINING.get(way, way) if mode == "training" else way for way in WAYS]
        rival = times[names[0]]["ms"]
        name, scheme = row["row"].partition(":")[2].split("/")
        ratio = f"{row['macs']['low-rank'] / row['macs']['dense']:.3f}"
        rows.append([f"`{name}`, `{scheme}`", ratio, *(_cell(times.get(way), rival) for way in names)])
        environments.append(run["environment"])
    if not rows:
        return NO_RUNS
    rivals = ["dense: compiler", "dense: ours", "thin: compiler", "thin: ours"]
    columns = ["network, scheme", "MACs", *rivals, "low rank: ours"]
    note = f"\nMilliseconds, {MODES[mode]}, 224x224, bf16 (in brackets over dense by the compiler). "
    note += "Thin: the dense network\nof the same MACs, its widths in multiples of 16. "
    note += "Compiler: torch.compile with freezing as a CUDA graph, none of our\nkernels. Ours: `lr.optimize` "
    note += "or `lr.fit`. Median of calls in turns, one process per row.\n"
    return markdown(columns, rows) + note + source(FILE, *environments)


def _newest(mode: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each row the newest run that measured this mode."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for run in record(FILE)["runs"]:
        found |= {row["row"]: (run, row) for row in run["rows"] if "ms" in row.get(mode, {})}
    return list(found.values())


def _best_fits(times: dict[str, Any]) -> dict[str, Any]:
    """Of `fit` with and without the compiler the faster, as a long run would choose by itself."""
    compiled = {way.removesuffix(", compiled"): time for way, time in times.items() if way.endswith(", compiled")}
    faster = {way: min(times[way], time, key=lambda t: t["ms"]) for way, time in compiled.items() if way in times}
    return times | faster


def _cell(time: dict[str, float] | None, rival: float) -> str:
    return f"{time['ms']:.2f} ({time['ms'] / rival:.2f})" if time else "not measured"
