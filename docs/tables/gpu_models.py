"""Today's networks on a GPU: low rank beside dense and thin dense, through `optimize` and `fit`."""

from __future__ import annotations

import re
from typing import Any

from tables.form import NO_RUNS, compared, markdown, record, recorded, source

FILE = "gpu_models.json"
MODES = {
    "inference": "Inference, batch 256",
    "batch1": "Inference, batch 1",
    "training": "Training step, batch 256",
}
SHORT = {"inference": "batch 256", "batch1": "batch 1", "training": "training"}
WAYS = ("dense, torch.compile", "dense, optimize", "thin, optimize", "low-rank, optimize")
TRAINING = {"dense, optimize": "dense, fit", "thin, optimize": "thin, fit", "low-rank, optimize": "low-rank, fit"}

REPEATS = 0.07
"""Times of one network differ by up to this share between processes: a smaller difference decides nothing."""

NOTE = """Milliseconds, 224x224, bf16; in brackets the ratio to dense by the compiler. Thin: the dense network of
about the same MACs, its channels in multiples of 16 or 64, whichever was faster. Compiler: torch.compile with
freezing as a CUDA graph. Ours: `lr.optimize` or `lr.fit`, which use the faster of our kernels and the
compiler's. Inference: medians of calls in turns; training: steps of the fastest epoch of three. Of several
runs, the one with the strongest rivals.
"""


def gpu_models() -> str:
    """A section with a table for each measured mode; empty if there is no record."""
    if not recorded(FILE):
        return ""
    parts = [
        f"### {title[0].upper()}{title[1:]}\n\n{table}" for mode, title in MODES.items() if (table := _table(mode))
    ]
    return "\n".join(["## Networks of torchvision and timm on a GPU\n", *parts, NOTE]) if parts else ""


def _table(mode: str) -> str:
    """Milliseconds of every way, and in brackets the ratio to dense by torch.compile."""
    names = [TRAINING.get(way, way) if mode == "training" else way for way in WAYS]
    rows, environments = [], []
    for run, row in strictest(mode):
        rival = milliseconds(row, mode, names[0])
        assert rival is not None
        times = [milliseconds(row, mode, way) for way in names]
        name, scheme = row["row"].partition(":")[2].split("/")
        ratio = f"{row['macs']['low-rank'] / row['macs']['dense']:.3f}"
        digits = 3 if rival < 1 else 2
        cells = ["not measured" if time is None else f"{time:.{digits}f} ({time / rival:.2f})" for time in times]
        cells[2] += f" in {_multiple(row, mode, names[2])}s" if times[2] else ""
        rows.append([f"`{name}`, `{scheme}`", ratio, *cells])
        environments.append(run["environment"])
    if not rows:
        return ""
    rivals = ["dense: compiler", "dense: ours", "thin: ours"]
    return markdown(["network, scheme", "MACs", *rivals, "low rank: ours"], rows) + source(FILE, *environments)


def speed_verdicts() -> str:
    """Each network and scheme: the time of low rank over that of each rival, and a verdict."""
    rows: dict[str, dict[str, str]] = {}
    environments = []
    for mode in MODES if recorded(FILE) else ():
        names = [TRAINING.get(way, way) if mode == "training" else way for way in WAYS]
        for run, row in strictest(mode):
            compiled, dense, thin, ours = (milliseconds(row, mode, way) for way in names)
            dense = min(time for time in (compiled, dense) if time is not None)
            cells = rows.setdefault(row["row"].partition(":")[2].replace("/", "`, `"), {})
            cells |= {
                f"{mode} {rival}": compared(ours, time, REPEATS)
                for rival, time in (("dense", dense), ("thin", thin))
            }
            environments.append(run["environment"])
    if not rows:
        return NO_RUNS
    columns = {
        f"{mode} {rival}": f"<{title}, {rival}" for mode, title in SHORT.items() for rival in ("dense", "thin")
    }
    lines = [[f"`{name}`", *(cells.get(column, "") for column in columns)] for name, cells in rows.items()]
    return markdown(["network, scheme", *columns.values()], lines) + source(FILE, *environments)


def _multiple(row: dict[str, Any], mode: str, way: str) -> int:
    """The thin network of `milliseconds` has channels in multiples of this number."""
    return 64 if " in 64s" in _fastest(row, mode, way) else 16


def strictest(mode: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each row the run with the strongest rivals, of those that got as far as the low-rank network."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in record(FILE)["runs"]:
        for row in run["rows"]:
            ways = row.get(mode, {}).get("ms", {})
            if WAYS[0] in ways and any(way.startswith("low-rank") for way in ways):
                found.setdefault(row["row"], []).append((run, row))

    def weakness(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[bool, float]:
        thin = any(" in 64s" in way for way in pair[1][mode]["ms"])
        return not thin, _milliseconds(pair[1], mode, WAYS[0])

    return [min(reversed(pairs), key=weakness) for pairs in found.values()]


def milliseconds(row: dict[str, Any], mode: str, way: str) -> float | None:
    """Milliseconds of a way: the median, in training of the fastest epoch; of two thin networks the faster one."""
    return min((_milliseconds(row, mode, name) for name in _alike(row, mode, way)), default=None)


def macs(row: dict[str, Any], mode: str, way: str) -> int:
    """Multiply-accumulates of the network whose time `milliseconds` gives."""
    return row["macs"][_fastest(row, mode, way).partition(", ")[0]]


def _fastest(row: dict[str, Any], mode: str, way: str) -> str:
    return min(_alike(row, mode, way), key=lambda name: _milliseconds(row, mode, name))


def _milliseconds(row: dict[str, Any], mode: str, name: str) -> float:
    return row[mode]["ms"][name]["low" if mode == "training" else "ms"]


def _alike(row: dict[str, Any], mode: str, way: str) -> list[str]:
    """The names of a way: a thin network may be there with channels in multiples of 16 and of 64."""
    return [name for name in row.get(mode, {}).get("ms", {}) if re.sub(r" in \d+s,", ",", name) == way]
