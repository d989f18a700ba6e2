"""Speed on a GPU: layer by layer, whole networks, training."""

from __future__ import annotations

from typing import Any

from tables.form import markdown, record, source

BATCH = 256
SIZES = "224x224 (NiN 30x30)"
COLUMNS = ["network", "MAC ratio", "time ratio", "with our kernels", "ms", "fastest dense ms"]

Run = dict[str, Any]
Row = dict[str, Any]


def gpu_layers() -> str:
    """Each layer's best tile, floor and dense twin, and its backward against torch's own."""
    found = record("gpu_kernels.json")
    rows: list[list[object]] = []
    for name, layer in found["layers"].items():
        right = [tile for tile in layer["tiles"].values() if tile.get("right")]
        best = min(right, key=lambda tile: tile["ms"])
        rate = 2 * layer["macs"] / best["ms"] / 1e9
        rivals = layer["rivals"]
        pool = rivals["max-pool"]["ms"] if "max-pool" in rivals else 0.0
        dense = min(way["ms"] for way_name, way in rivals.items() if "relu" in way_name) + pool
        times = [f"{best['ms']:.3f}", f"{layer['floor_ms']:.3f}", f"{dense:.2f}"]
        rows.append([name, best["kernel"], f"{rate:.0f}", *times, *_backward(layer.get("backward", {}))])
    columns = ["layer", "<kernel", "TFLOP/s", "ms", "floor", "dense", "backward", "torch's", "torch's, dense"]
    return markdown(columns, rows) + _layers_source(found)


def _backward(times: dict[str, Any]) -> list[str]:
    """Our time, and those of torch for the same layer and for a dense one; empty if not measured."""
    ways = ("all", "naive composite", "dense")
    return [f"{times[way]['ms']:.2f}" if "ms" in times.get(way, {}) else "" for way in ways]


def _layers_source(found: dict[str, Any]) -> str:
    """Layers may be measured again one by one: each then names its commit."""
    known = found["environment"]
    commits = [layer.get("commit", known["commit"]) for layer in found["layers"].values()]
    return source("gpu_kernels.json", known, *({**known, "commit": commit} for commit in commits))


def gpu_speed() -> str:
    """Inference, against the strongest dense rival of the run and the dense network with our own kernels."""
    return _networks("inference", BATCH)


def gpu_training() -> str:
    return _networks("training", BATCH)


def gpu_small() -> str:
    return _networks("inference", 1)


def newest(mode: str, batch: int) -> list[tuple[Run, Row]]:
    """For each network the row of the newest run that has it, with that run: ratios never mix two runs."""
    found: dict[str, tuple[Run, Row]] = {}
    for run in record("gpu_speed.json")["runs"]:
        rows = [row for row in run["rows"] if "/" not in row["network"]]  # those with another stride
        found |= {r["network"]: (run, r) for r in rows if (r["mode"], r["batch"]) == (mode, batch)}
    return [taken for _, taken in sorted(found.items(), key=_place)]


def _place(item: tuple[str, tuple[Run, Row]]) -> tuple[str, float]:
    """Families together, and within one by the ratio of MACs."""
    _, (_, row) = item
    return row["dense"], row["mac_ratio"]


def _networks(mode: str, batch: int) -> str:
    rows, found = [], newest(mode, batch)
    for run, row in found:
        ours, dense = (
            _range(run, row, row[who], row[way]) for who, way in (("network", "way"), ("dense", "dense_way"))
        )
        own = f"{row['tricks_ratio']:.3f}" if "tricks_ratio" in row else ""
        cells = [f"`{row['network']}`", f"{row['mac_ratio']:.3f}", f"**{row['ratio']:.3f}**", own, ours]
        rows.append([*cells, f"{dense} {row['dense_way']}"])
    return markdown(COLUMNS, rows) + _note(mode, batch, found) + _source([run for run, _ in found])


def _note(mode: str, batch: int, found: list[tuple[Run, Row]]) -> str:
    """How it was measured, and which rivals are missing."""
    what = "Inference" if mode == "inference" else "Training steps (forward, backward, SGD)"
    repeats = [run["ways"][_key(row, row["network"], row["way"])]["repeats"] for run, row in found]
    replays = " to ".join(dict.fromkeys(map(str, (min(repeats), max(repeats)))))
    text = f"\n{what}, bf16, batch {batch}, {SIZES}; medians (least to most) of {replays} replays of a graph,\n"
    text += "ours and dense in one run."
    missing = dict.fromkeys(f"`{row['dense']}` with {way}" for run, row in found for way in _missing(run, row))
    text += f" Not measured: {', '.join(missing)}." if missing else ""
    notes = dict.fromkeys(run["note"] for run, _ in found if "note" in run)
    return text + "".join(f"\n{note}" for note in notes) + "\n"


def _missing(run: Run, row: Row) -> list[str]:
    """The planned ways of the dense network that were not measured with this row."""
    place = _key(row, row["dense"], "")
    late = [name for name in run["undone"] if name.startswith(place) and name not in run["ways"]]
    return [name.removeprefix(place) for name in late]


def _source(runs: list[Run]) -> str:
    return source("gpu_speed.json", *sorted((run["environment"] for run in runs), key=lambda known: known["date"]))


def _key(row: Row, network: str, way: str) -> str:
    return f"{network}|{row['mode']}|{row['batch']}|{way}"


def _range(run: Run, row: Row, network: str, way: str) -> str:
    taken = run["ways"][_key(row, network, way)]
    return f"{_ms(taken['ms'])} ({_ms(taken['least'])} to {_ms(taken['most'])})"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def train_speed() -> str:
    *earlier, newest = record("train_speed.json")["runs"]
    setting = newest["setting"]
    note = (
        f"\nAll {setting['images']:,} images, median epoch and range; {setting['workers']} workers feed the plain "
        "loop.\nThe share is the time of a step alone, divided by the time per step in an epoch.\n"
    )
    columns = ["network", "<recipe", "batch", "<loop", "images/s", "share of the GPU"]
    table = markdown(columns, [row for measured in newest["rows"] for row in _loops(measured, setting)])
    return table + note + _compiled([newest, *earlier[::-1]]) + source("train_speed.json", newest["environment"])


def _loops(measured: Row, setting: Row) -> list[list[object]]:
    """A network and its recipe: a line for each loop with a range over epochs."""
    batch = setting["recipes"][measured["recipe"]]["batch_size"]
    who = [f"`{measured['network']}`", f"`{measured['recipe']}`", batch]
    rows: list[list[object]] = []
    for way, row in ((way, row) for way, row in measured["ways"].items() if row["epochs"] > 1):
        share = f"{row['device_share']:.1%}" if "device_share" in row else ""
        rows.append([*who, way, _rate(row), share])
    return rows


def _compiled(runs: list[Run]) -> str:
    """Compiled graphs against plain graphs, in the newest run that has both."""
    told: dict[tuple[str, str], str] = {}
    for measured in (measured for run in runs for measured in run["rows"]):
        ways, whose = measured["ways"], (measured["network"], measured["recipe"])
        if whose in told or "CUDA graph, compiled" not in ways:
            continue
        alone, compiled = ways["CUDA graph"], ways["CUDA graph, compiled"]
        how = "" if "device_share" in compiled else ", its steps not recorded as a graph"
        told[whose] = (
            f"Compiled `{whose[0]}` by `{whose[1]}`: {compiled['images_per_second']:,.0f} images/s{how} "
            f"(uncompiled in the same run: {alone['images_per_second']:,.0f})."
        )
    return "".join(f"\n{text}\n" for text in told.values())


def _rate(row: Row) -> str:
    return f"{row['images_per_second']:,.0f} ({row['lowest']:,.0f} to {row['highest']:,.0f})"
