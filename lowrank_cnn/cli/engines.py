"""`lowrank plan --engine`: which of the installed engines runs a network fastest on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.cli.show import console, print_json, print_table, status_line

if TYPE_CHECKING:
    from lowrank_cnn.cli.source import Source


def plan_engines(
    source: Source, size: tuple[int, ...], engine: str, out: Path | None, threads: int | None, *, as_json: bool
) -> None:
    """Time the engines on one image, print the table, and write the file of the fastest."""
    from lowrank_cnn.deploy.engines.choosing import time_engines
    from lowrank_cnn.deploy.engines.targets import target_of

    chosen = [] if engine == "auto" else [engine]
    for name in chosen:
        target_of(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with status_line() as shown:
        model = source.trained or source.network.eval()
        found = time_engines(
            model, size, engines=chosen, threads=threads or 0, out=out, overwrite=True, say=shown(source.name)
        )
    if as_json:
        print_json({"model": source.name, "input": [1, *size], "fastest": found.fastest, **asdict(found)})
        return
    rows = [(name, f"{time.ms:.2f}", f"{time.low:.2f}-{time.high:.2f}") for name, time in found.times.items()]
    print_table(f"{source.name}, 1x{'x'.join(map(str, size))}", ("engine", "ms", "quartiles"), rows)
    for name, why in found.failed.items():
        console.print(f" Left out: {name} ({why}).", markup=False)
    console.print(f" Fastest here: {found.fastest}.", markup=False)
    if found.path is not None:
        console.print(f" Written: {found.path}.", markup=False)
