"""Measure the installed engines on one network, and keep the file of the fastest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lowrank_cnn.deploy.engines import open_engine
from lowrank_cnn.deploy.engines.precision import Precision
from lowrank_cnn.deploy.engines.targets import TARGETS, target_of
from lowrank_cnn.deploy.exporting import check_place, export
from lowrank_cnn.system.clock import Sample, measure
from lowrank_cnn.system.errors import LowRankError, first_line
from lowrank_cnn.system.files import as_path, replacing
from lowrank_cnn.train.trained import Trained

_REST = 0.03
"""Seconds before each run, for the threads of the engine before it to fall asleep."""


@dataclass(frozen=True)
class EngineTimes:
    """Times by "engine, precision", the fastest first; why engines were left out; the file of the fastest."""

    times: dict[str, Sample]
    failed: dict[str, str]
    path: str | None

    @property
    def fastest(self) -> str:
        """The engine and precision of the least time."""
        return next(iter(self.times))


def time_engines(
    model: nn.Module | Trained,
    input_size: Sequence[int],
    *,
    engines: Sequence[str] = (),
    precisions: Sequence[Precision] = ("fp32", "fp16"),
    threads: int = 0,
    repeats: int = 15,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> EngineTimes:
    """Export a network to every installed engine, time them in turns on one image, and write the fastest file.

    - `engines`: names of `TARGETS`; all that are installed if not given.
    - `out`: a directory for the file of the fastest engine.

    >>> time_engines(net, (3, 32, 32), engines=["onnx", "ncnn"]).fastest  # doctest: +SKIP
    'ncnn, fp16'
    """
    folder_out = None if out is None else as_path(out)
    if folder_out is not None:
        check_place(folder_out / "net", overwrite)
    names = list(engines) or [name for name, target in TARGETS.items() if target.installed]
    image = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0)).numpy()
    runs, files, failed = {}, {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for key in [(name, precision) for name in names for precision in precisions]:
            label, place = ", ".join(key), Path(scratch) / "-".join(key)
            say(label)
            place.mkdir()
            path = place / f"net{target_of(key[0]).suffix}"
            try:
                export(model, path, input_size=input_size, precision=key[1])  # type: ignore[arg-type]
                runner = open_engine(path, threads=threads, trusted=True)
                runs[label] = lambda r=runner: r(image)
                files[label] = place
            except LowRankError as error:
                failed[label] = first_line(error)
        if not runs:
            raise LowRankError(f"no engine runs this network: {'; '.join(failed.values())}.")
        times = measure(runs, repeats=repeats, rest=_REST)
        times = dict(sorted(times.items(), key=lambda pair: pair[1].ms))
        found = None if folder_out is None else _move(files[next(iter(times))], folder_out)
    return EngineTimes(times, failed, found)


def _move(place: Path, out: Path) -> str:
    """Move an engine's files; the path of the one that is opened."""
    suffixes = {target.suffix for target in TARGETS.values()}
    for file in place.iterdir():
        with replacing(out / file.name) as temporary:
            shutil.copyfile(file, temporary)
    return str(next(out / file.name for file in place.iterdir() if file.suffix in suffixes))
