"""The input pipeline: decoders, and ways to scale and crop their images."""

from __future__ import annotations

from typing import Any

from tables.form import JsonRecord, from_record, markdown, source

KINDS = {"mosaic": "full size", "shrunk": "scaled once"}
DECODER = "Pillow"
"""That of training; the record has others, and ways to scale and crop."""
REMOVED = ("decoded by the GPU", "shrunk once")
"""Ways that the library no longer has."""


@from_record("input_pipeline.json")
def input_pipeline(found: JsonRecord) -> str:
    """Images per second and core, decoded and by a worker, on machines with a GPU."""
    return "\n".join(_pipeline(machine) for machine in found["machines"] if machine["environment"]["gpu"])


def _pipeline(machine: dict[str, Any]) -> str:
    kinds, setting = machine["rows"], machine["setting"]
    rows = [
        [f"decoded by {DECODER}", *(_rate(kinds[kind]["decode"][DECODER]) for kind in KINDS)],
        ["read and framed by a worker", *(_rate(kinds[kind]["worker"]) for kind in KINDS)],
    ]
    columns = ["<images/s per core", *(f"{title}, {_kilo(kinds[kind])}" for kind, title in KINDS.items())]
    note = (
        f"\nMedian and range of {setting['repeats']} rounds over {setting['photographs']} JPEGs of "
        f"{setting['size'][0]}x{setting['size'][1]}; scaled to a shorter side of 256.\n"
    )
    return markdown(columns, rows) + note + source("input_pipeline.json", machine["environment"])


def _rate(found: dict[str, float]) -> str:
    return f"{found['images_per_second']:,.0f} ({found['lowest']:,.0f} to {found['highest']:,.0f})"


def _kilo(kind: dict[str, Any]) -> str:
    return f"{kind['bytes'] / 1e3:.0f} kB"


@from_record("loaders.json")
def loaders(found: JsonRecord) -> str:
    """Images per second for each way to store a set, and how long the GPU waits, for each machine with one."""
    machines: dict[str, list[dict[str, Any]]] = {}
    for run in found["machines"]:
        if gpu := run["environment"]["gpu"]:
            machines.setdefault(gpu, []).append(run)
    return "\n".join(map(_loader_table, machines.values()))


def _loader_table(runs: list[dict[str, Any]]) -> str:
    """All runs on one machine."""
    setting, trains = runs[0]["setting"], [run["step_images_per_second"] for run in runs]
    rows = []
    for name, row in ((name, row) for run in runs for name, row in run["rows"].items() if name not in REMOVED):
        idle = f"{row['trained_per_second']:,.0f}", f"{row['idle']:.0%}"
        rows.append([name, _rate(row), f"{row['seconds_before']:.1f}", *idle])
    columns = ["<the set is kept", "images/s", "s before the first epoch", "trained on, images/s", "the GPU waits"]
    width, height = setting["size"]
    epochs = " or ".join(dict.fromkeys(str(run["setting"]["repeats"]) for run in runs))
    note = (
        f"\nMedian and range of {epochs} epochs of {setting['images']:,} JPEGs of {width}x{height} "
        f"({setting['bytes'] / 1e3:.0f} kB) by {setting['workers']} workers: crops of {setting['crop']} from a "
        f"shorter side of {setting['side']}.\nWith data already on the GPU, `{setting['network']}` trains at "
        f"{' or '.join(f'{rate:,.0f}' for rate in trains)} images/s.\n"
    )
    return markdown(columns, rows) + note + source("loaders.json", *(run["environment"] for run in runs))
