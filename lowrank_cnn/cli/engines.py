"""`lowrank plan --engine`: which of the installed engines runs a network fastest on this machine."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.system.errors import LowRankError, LowRankWarning
from lowrank_cnn.system.progress import lasting

if TYPE_CHECKING:
    from torch import nn

    from lowrank_cnn.cli.source import Source
    from lowrank_cnn.system.clock import Sample


def plan_engines(
    source: Source,
    size: tuple[int, ...],
    engine: str,
    out: Path | None,
    threads: int | None,
    *,
    twin: bool,
    as_json: bool,
) -> None:
    """Time the engines on one image, print the table and the advice, and write the file of the fastest."""
    from lowrank_cnn.deploy.engines.choosing import time_engines
    from lowrank_cnn.deploy.engines.targets import target_of

    chosen = [] if engine == "auto" else [engine]
    for name in chosen:
        target_of(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found = time_engines(
        source.trained or source.network.eval(),
        size,
        rival=_thin_rival(source, size) if twin else None,
        engines=chosen,
        threads=threads or 0,
        out=out,
        overwrite=True,
        say=lasting,
    )
    if as_json:
        told = {"fastest": found.fastest, "verdict": found.verdict}
        print_json({"model": source.name, "input": [1, *size], **told, **asdict(found)})
        return
    names = dict.fromkeys([*found.times, *found.rival])
    rows = [(name, *_cells(found.times.get(name)), *_cells(found.rival.get(name))) for name in names]
    columns = ("engine", "ms", "quartiles", "thin dense ms", "quartiles")
    print_table(f"{source.name}, 1x{'x'.join(map(str, size))}", columns if found.rival else columns[:3],
                rows if found.rival else [row[:3] for row in rows])  # fmt: skip
    for name, why in found.failed.items():
        console.print(f" Left out: {name} ({why}).", markup=False)
    console.print(f" {found.verdict}", markup=False, soft_wrap=True)
    if found.path is not None:
        console.print(f" Written: {found.path}.", markup=False)


def _cells(time: Sample | None) -> tuple[str, str]:
    if time is None:
        return "", ""
    return f"{time.ms:.2f}", f"{'' if time.steady else 'unsteady, '}{time.low:.2f}-{time.high:.2f}"


def _thin_rival(source: Source, size: tuple[int, ...]) -> nn.Module | None:
    """The dense network, thinned to about the MACs of this one; None where there is none.

    Narrow networks are rounded to fewer channels at a time: in sixteens they would stay as they are.
    """
    from lowrank_cnn.method.counting import count
    from lowrank_cnn.method.thinning import thin
    from lowrank_cnn.models.twins import dense_twin

    dense = source.dense or dense_twin(source.network)
    if dense is None:
        return None
    try:
        macs = count(source.network, size).macs
        share = macs / count(dense, size).macs
        for multiple in (16, 8, 4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LowRankWarning)
                thinner = thin(dense.eval(), macs=share, input_size=size, multiple=multiple).eval()
            if 0.8 < count(thinner, size).macs / macs < 1.2:
                return thinner
    except LowRankError:  # a network that cannot be thinned has no such rival
        pass
    return None
