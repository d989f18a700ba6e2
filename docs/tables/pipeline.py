"""The input pipeline: decoders, and ways to scale and crop their images."""

from __future__ import annotations

from typing import Any

from tables.form import JsonRecord, from_record, markdown, source

KINDS = {"upscaled": "smooth", "mosaic": "textured", "shrunk": "textured, shrunk"}


SHOWN = "Pillow", "simplejpeg"
"""The decoders that training uses; the record has others, and ways to scale and crop."""
REMOVED = "decoded by the GPU"
"""A way that the library no longer has."""


@from_record("input_pipeline.json")
def input_pipeline(found: JsonRecord) -> str:
    """Images per second and core, decoded and by a worker, for each processor."""
    return "\n".join(_pipeline(machine) for machine in found["machines"])


def _pipeline(machine: dict[str, Any]) -> str:
    kinds, setting = machine["rows"], machine["setting"]
    rows: list[list[object]] = []
    for name in SHOWN:
        if name in kinds["mosaic"]["decode"]:
            rows.append([f"decoded by {name}", *(_rate(kinds[kind]["decode"].get(name)) for kind in KINDS)])
    rows.append(["read and framed by a worker", *(_rate(kinds[kind]["worker"]) for kind in KINDS)])
    columns = ["<images/s per core", *(f"{title}, {_kilo(kinds[kind])}" for kind, title in KINDS.items())]
    note = (
        f"\nMedian and range of {setting['repeats']} rounds over {setting['photographs']} JPEGs of "
        f"{setting['size'][0]}x{setting['size'][1]}; shrunk to a shorter side of 256.\n"
    )
    for network, share in machine["idle"].items():
        rate = f"{machine['train_rates'][network]:,.0f}"
        note += f"A GPU that trains `{network}` at {rate} images/s waits {share:.0%} of the time.\n"
    return markdown(columns, rows) + note + source("input_pipeline.json", machine["environment"])


def _rate(found: dict[str, float] | None) -> str:
    if not found:
        return ""
    return f"{found['images_per_second']:,.0f} ({found['lowest']:,.0f} to {found['highest']:,.0f})"


def _kilo(kind: dict[str, Any]) -> str:
    return f"{kind['bytes'] / 1e3:.0f} kB"


@from_record("loaders.json")
def loaders(found: JsonRecord) -> str:
    """Images per second for each way to store a set, for each machine, and how long a GPU waits."""
    return "\n".join(_loader_table(machine) for machine in found["machines"])


def _loader_table(machine: dict[str, Any]) -> str:
    setting, trained = machine["setting"], machine["step_images_per_second"]
    rows = []
    for name, row in machine["rows"].items():
        if name == REMOVED:
            continue
        idle = [f"{row['trained_per_second']:,.0f}", f"{row['idle']:.0%}"] if trained else []
        rows.append([name, _rate(row), f"{row['seconds_before']:.1f}", *idle])
    columns = ["<the set is kept", "images/s", "s before the first epoch"]
    columns += ["trained on, images/s", "the GPU waits"] if trained else []
    width, height = setting["size"]
    note = (
        f"\nMedian and range of {setting['repeats']} epochs of {setting['images']:,} JPEGs of {width}x{height} "
        f"({setting['bytes'] / 1e3:.0f} kB) by {setting['workers']} workers: crops of {setting['crop']} from a "
        f"shorter side of {setting['side']}.\n"
    )
    if trained:
        note += f"With data already on the GPU, `{setting['network']}` trains at {trained:,.0f} images/s.\n"
    return markdown(columns, rows) + note + source("loaders.json", machine["environment"])
