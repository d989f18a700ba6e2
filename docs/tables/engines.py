"""CPU engines: the fastest way of each network, and compiled strips against the engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tables.form import NOT_MEASURED, JsonRecord, compared, from_record, markdown, source

Row = dict[str, Any]
_PRECISIONS = ("fp32", "fp16", "int8")
_ALIKE = 0.98
"""Times that differ by less than this share of the longer one count as equal."""
_WAYS = ("dense", "thin", "low-rank")
_THREADS = 2
"""The verdicts have the ratios on one thread as well."""


@from_record("cpu_engines.json")
def cpu_engines(found: JsonRecord) -> str:
    """On two threads, for every network and precision: the fastest engine of dense, thin and low rank."""
    rows: list[list[object]] = []
    for family, threads, precision, best in _compared(found["rows"]):
        if threads != _THREADS:
            continue
        cells = [_cell(best[way]) for way in _WAYS]
        ms = {way: row["ms"] for way, row in best.items()}
        ratios = f"**{ms['low-rank'] / ms['dense']:.2f}**", f"{ms['low-rank'] / ms['thin']:.2f}"
        rows.append([f"`{family}`", precision, *cells, *ratios])
    columns = ["network", "<precision", "dense ms", "thin ms", "low-rank ms", "of dense", "of thin"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return markdown(columns, rows) + f"\n{versions}.\n" + source("cpu_engines.json", found["environment"])


@from_record("cpu_engines.json")
def speed_verdicts(found: JsonRecord) -> str:
    """Each network in its fastest engine: the time of low rank over that of each rival, and a verdict."""
    rows: dict[tuple[str, int], list[object]] = {}
    for family, threads, _, best in _compared(found["rows"]):
        cells = rows.setdefault((family, threads), [f"`{family}`", threads])
        cells += [compared(best["low-rank"]["ms"], best[rival]["ms"], 1 - _ALIKE) for rival in ("dense", "thin")]
    columns = [f"<{precision}, {rival}" for precision in _PRECISIONS for rival in ("dense", "thin")]
    return markdown(["network", "threads", *columns], list(rows.values())) + source(
        "cpu_engines.json", found["environment"]
    )


@from_record("mac_time.json")
def mac_time(found: JsonRecord) -> str:
    """How far multiply-accumulates tell the time of a layer, for each network and batch."""
    kinds = ("layers_with_macs", "without_the_first")
    rows: list[list[object]] = []
    for row in found["rows"]:
        within = [
            f"{min(rs):.2f} to {max(rs):.2f}"
            for rs in ([r[kind] for r in row["r_of_processes"]] for kind in kinds)
        ]
        rows.append([f"`{row['network']}`", row["batch"], f"{row['ms']:.0f}", *within])
    columns = ["network", "images", "ms", "<r, convs and linear layers", "<r, without the first layer"]
    return markdown(columns, rows) + source("mac_time.json", found["environment"])


@from_record("cpu_engines_convnext.json")
def depthwise_engines(found: JsonRecord) -> str:
    """Our ConvNeXt in each engine: milliseconds with 7x7 filters, and the share of them that bands take."""
    times: dict[tuple[str, str], Row] = {}
    for row in found["rows"]:
        if row["threads"] == _THREADS:
            times.setdefault((row["engine"], row["precision"]), {})[row["network"]] = row["ms"]
    rows: list[list[object]] = []
    for (engine, precision), ms in sorted(times.items()):
        if len(ms) == len(_WAYS):
            shares = (f"**{ms['low-rank'] / ms[rival]:.2f}**" for rival in ("dense", "thin"))
            rows.append([engine, precision, *(f"{ms[way]:.1f}" for way in _WAYS), *shares])
    columns = ["engine", "<precision", "7x7 ms", "thin ms", "bands ms", "of 7x7", "of thin"]
    return markdown(columns, rows) + "\n" + source("cpu_engines_convnext.json", found["environment"])


@from_record("int8_accuracy.json")
def int8_accuracy(found: JsonRecord) -> str:
    """Top-1 accuracy in float32 and int8 on the same test images."""
    rows: list[list[object]] = [
        [
            f"`{row['network']}`",
            _training(row["trained"]),
            f"{row['before']:.2%}",
            f"{row['after']:.2%}",
            _points(row),
            ", ".join(row["in_float"]) or "none",
        ]
        for row in found["rows"]
    ]
    columns = ["network", "<trained", "float32", "int8", "points lost (95%)", "<in float"]
    images = ", ".join(dict.fromkeys(f"{row['n']:,}" for row in found["rows"]))
    engines = ", ".join(dict.fromkeys(row["engine"] for row in found["rows"]))
    note = f"\nOn {images} test images, by {engines}.\n"
    return markdown(columns, rows) + note + source("int8_accuracy.json", found["environment"])


_MORE_TRAINING = {"none": "none", "float": "float32", "int8": 'int8 (`quantize="int8"`)'}


@from_record("int8_training.json")
def int8_training(found: JsonRecord) -> str:
    """A network that int8 makes less accurate: more training in float, or with int8 layers."""
    rows: list[list[object]] = []
    for row in found["rows"]:
        gain = row.get("int8_training_gains")
        rows.append(
            [
                _MORE_TRAINING[row["training"]],
                ", ".join(f"`{name}`" for name in row["in_float"]) or "none",
                f"{row['before']:.2%}",
                f"{row['after']:.2%}",
                _points(row),
                NOT_MEASURED if gain is None else "" if row["training"] == "int8" else _points(gain),
            ]
        )
    columns = [
        "further training",
        "<in float",
        "float32",
        "int8",
        "points lost (95%)",
        "int8 training is ahead by (95%)",
    ]
    return markdown(columns, rows) + source("int8_training.json", found["environment"])


def _points(found: dict[str, Any]) -> str:
    return f"**{found['loss']:.2f}** ({found['low']:.2f} to {found['high']:.2f})"


def _training(how: dict[str, Any]) -> str:
    """How a network was trained, in a few words."""
    images = f", {how['images']:,} images" if "images" in how else ""
    rounded = "" if how["quantize"] == "none" else f", with {how['quantize']} layers"
    return f"{how['recipe']}, {how['epochs']} epoch{'s' * (how['epochs'] > 1)}{images}{rounded}"


def _compared(rows: list[Row]) -> Iterator[tuple[str, int, str, dict[str, Row]]]:
    """Network, threads and precision with the fastest row of each way, if all ways were measured."""
    groups = dict.fromkeys((row["family"], row["threads"], row["precision"]) for row in rows)
    for group in sorted(groups, key=lambda group: (group[0], -group[1], _PRECISIONS.index(group[2]))):
        found = {way: _best(rows, *group, way) for way in _WAYS}
        best = {way: row for way, row in found.items() if row is not None}
        if len(best) == len(_WAYS):
            yield *group, best


def _best(rows: list[dict[str, Any]], *wanted: object) -> dict[str, Any] | None:
    chosen = [r for r in rows if (r["family"], r["threads"], r["precision"], r["network"]) == wanted]
    return min(chosen, key=lambda row: row["ms"], default=None)


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['ms']:.1f} ({row['low']:.1f}-{row['high']:.1f}) {row['engine']}"
