"""Time a network and a rival of equal cost in the installed engines, and keep the file of the fastest.

Each engine is timed in a process of its own: in one process their threads disturb each other.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.errors import LowRankError, first_line, to_caller
from lowrank_cnn.core.files import as_path
from lowrank_cnn.core.processes import apart
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.core.search import Search
from lowrank_cnn.deploy.blocks import has_strips
from lowrank_cnn.deploy.engines.targets import ENGINES, open_engine, target_of
from lowrank_cnn.deploy.export import check_place, export, placing
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.train.trained import Trained

_REST, _WARM = 0.03, 1
"""Before each timed run: seconds for other threads to fall asleep, and runs that are not timed."""


@dataclass(frozen=True)
class EngineRun:
    """A network in an engine: the user's, or the rival of the same cost."""

    engine: str
    precision: str
    rival: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.precision}"

    def __str__(self) -> str:
        return f"rival: {self.name}" if self.rival else self.name


@dataclass(frozen=True)
class EngineTimes:
    """Times by "engine, precision", the fastest first; reasons for engines left out; the file of the fastest.

    `rival` has the times of the thinner dense network of the same MACs, if one was given. Here int8 ranges come
    from random numbers, which only serves timing: no int8 file is kept.
    """

    times: dict[str, Sample]
    failed: dict[str, str]
    path: str | None
    rival: dict[str, Sample] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        """The engine and precision of the least time."""
        return next(iter(self.times))

    @property
    def verdict(self) -> str:
        told = f"Fastest here: {self.fastest} ({self.times[self.fastest].ms:.2f} ms)."
        if not all(time.steady for time in (*self.times.values(), *self.rival.values())):
            told += " Some times are unsteady: measure again while the machine is idle."
        if self.fastest.endswith("int8"):
            told += f" int8 needs real images: {to_caller('lr.quantize', '--precision int8 --calibrate DATA')}."
        if not self.rival:
            return told
        name, time = next(iter(self.rival.items()))
        advice = f"this one takes {self.times[self.fastest].ms / time.ms:.2f} of its time"
        if self.times[self.fastest].ms >= time.ms:
            advice = f"it is faster ({advice}), so compare their accuracies"
        return f"{told} A thinner dense network of the same MACs takes {time.ms:.2f} ms ({name}): {advice}."


@progress("engines")
def time_engines(
    model: nn.Module | Trained,
    input_size: Sequence[int],
    *,
    rival: nn.Module | None = None,
    engines: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32", "fp16", "int8"),
    threads: int = 0,
    repeats: int = 15,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> EngineTimes:
    """Export a network to every installed engine, time it there on one image, and write the fastest file.

    - `rival`: another network, timed in turns with this one, for example the thinner dense one of the same MACs.
    - `engines`: names of `ENGINES`; by default all that are installed.
    - `out`: a directory for the file of the fastest engine in float.
    - `say`: a function that is called with a line as each engine ends (`say=print`).

    >>> time_engines(net, (3, 32, 32), engines=["onnx", "ncnn"]).fastest  # doctest: +SKIP
    'ncnn, fp16'
    """
    place = None if out is None else as_path(out)
    if place is not None:
        check_place(place / "net", overwrite)
    names = list(engines) or [name for name, target in ENGINES.items() if target.installed]
    networks = {False: model} if rival is None else {False: model, True: rival}
    image = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
    search: Search[EngineRun, Path] = Search()

    def clock(files: Mapping[EngineRun, Path]) -> dict[EngineRun, Sample]:
        """The times of files; the files of one engine run in turns, in a process of their own."""
        taken: dict[EngineRun, Sample] = {}
        for engine in dict.fromkeys(run.engine for run in files):
            step(f"{engine} is timed")
            own = {str(run): run for run in files if run.engine == engine}
            paths = {name: str(files[run]) for name, run in own.items()}
            asked = paths, list(image.shape), threads, torch.get_num_threads(), repeats
            try:
                found = apart(__file__, "time_files", *asked)
            except LowRankError as error:
                search.failed |= dict.fromkeys(own.values(), first_line(error))
                continue
            taken |= {run: Sample(*found[name]) for name, run in own.items()}
            for run in own.values():
                say(f"{run}: {taken[run].ms:.2f} ms{'' if taken[run].steady else ', unsteady'}")
        return taken

    with tempfile.TemporaryDirectory() as scratch:
        for engine, (is_rival, network), precision in product(names, networks.items(), precisions):
            run, target = EngineRun(engine, precision, is_rival), target_of(engine)
            plain = network.network if isinstance(network, Trained) else network
            if (precision == "int8" and not target.int8) or (target.strips and not has_strips(plain)):
                continue
            step(f"{run} is written")
            folder = Path(scratch, str(run))
            folder.mkdir()
            written = partial(write_to_time, network, engine, precision, image, folder, strips=target.strips)
            search.attempt(run, written)
        times = search.times(clock)
        unsteady = {run.engine for run, time in times.items() if not time.steady}  # something else ran meanwhile
        again = clock({run: path for run, path in search.made.items() if run.engine in unsteady})
        times |= {run: min(time, times[run], key=lambda sample: sample.spread) for run, time in again.items()}
        for run in search.failed:
            say(f"{run}: left out")
        order = sorted(times, key=lambda run: times[run].ms)
        failed = {str(run): reason for run, reason in search.failed.items()}
        if all(run.rival for run in order):
            raise LowRankError(f"no engine runs this network: {'; '.join(failed.values())}.")
        kept = next((search.made[run] for run in order if not run.rival and run.precision != "int8"), None)
        path = None
        if place is not None and kept is not None:
            path = str(place / kept.name)
            with placing(place / kept.name, overwrite=overwrite) as aside:
                shutil.copytree(kept.parent, aside.parent, dirs_exist_ok=True)
    own, rivals = ({run.name: times[run] for run in order if run.rival == wanted} for wanted in (False, True))
    return EngineTimes(own, failed, path, rivals)


def write_to_time(
    model: nn.Module | Trained, engine: str, precision: str, images: torch.Tensor, place: Path, *, strips: bool
) -> Path:
    """The file of a network for an engine, in a folder; in int8 with ranges of these images."""
    path = place / f"net{target_of(engine).suffix}"
    if precision == "int8":
        quantize(model, images, path, dynamic=())
    else:
        how: Any = {"precision": precision, "strips": strips}
        export(model, path, input_size=images.shape[1:], **how)
    return path


def time_files(
    files: Mapping[str, str], shape: Sequence[int], threads: int, torch_threads: int, repeats: int
) -> dict[str, tuple[float, ...]]:
    """The times of files of one engine, in turns. `apart` calls it."""
    if torch_threads != torch.get_num_threads():  # which would start threads
        torch.set_num_threads(torch_threads)
    array = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).numpy()
    runners = {name: open_engine(path, threads=threads, trusted=True) for name, path in files.items()}
    runs = {name: lambda runner=runner: runner(array) for name, runner in runners.items()}
    return {name: astuple(time) for name, time in measure(runs, repeats=repeats, rest=_REST, warm=_WARM).items()}
