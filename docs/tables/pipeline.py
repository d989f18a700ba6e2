"""The input pipeline: decoders, and ways to frame what they give."""

from __future__ import annotations

from typing import Any

from tables.form import NO_RUNS, markdown, record, recorded, source

KINDS = {"upscaled": "smooth", "mosaic": "textured", "shrunk": "textured, shrunk"}


def input_pipeline() -> str:
    """Images per second and core, by decoder and by way to frame, for each processor."""
    if not recorded("input_pipeline.json"):
        return NO_RUNS
    return "\n".join(_pipeline(machine) for machine in record("input_pipeline.json")["machines"])


def _pipeline(machine: dict[str, Any]) -> str:
    kinds, setting = machine["rows"], machine["setting"]
    rows: list[list[object]] = []
    for part, title in (("decode", "decoded"), ("frame", "framed")):
        for name in kinds["mosaic"][part]:
            rates = [_rate(kinds[kind][part].get(name)) for kind in KINDS]
            rows.append([title, name, *rates])
    rows.append(["read and framed", "a worker", *(_rate(kinds[kind]["worker"]) for kind in KINDS)])
    columns = ["images/s per core", "<by", *(f"{title}, {_kilo(kinds[kind])}" for kind, title in KINDS.items())]
    libraries = ", ".join(f"{library} {version}" for library, version in setting["libraries"].items())
    note = (
        f"\nMedian and range of {setting['repeats']} rounds over {setting['photographs']} JPEGs of "
        f"{setting['size'][0]}x{setting['size'][1]}, one core's own time; shrunk to a shorter side of 256.\n"
        f"Framed: decoded, scaled to a shorter side of 256, cropped to 224, mirrored. {libraries}.\n"
    )
    loader = kinds["mosaic"]["loader"]
    if loader:
        told = "; ".join(f"{workers} workers {rate:,.0f}" for workers, rate in loader.items())
        note += f"The whole loader, textured, images/s: {told}.\n"
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
