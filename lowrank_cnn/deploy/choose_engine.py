"""Measure the installed engines on a network, beside a rival of equal cost, and keep the file of the fastest.

Each engine is timed in a process of its own: in one process their threads disturb each other.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowrank_cnn.core.clock import Sample, measure
from lowrank_cnn.core.errors import LowRankError, first_line
from lowrank_cnn.core.files import as_path
from lowrank_cnn.core.processes import apart
from lowrank_cnn.core.progress import progress, step
from lowrank_cnn.deploy.cpu_convs import has_strips
from lowrank_cnn.deploy.engines.targets import ENGINES, open_engine, target_of
from lowrank_cnn.deploy.export import check_place, export, placing
from lowrank_cnn.deploy.quantize import quantize
from lowrank_cnn.train.trained import Trained

_REST, _WARM = 0.03, 1
"""Before each timed run: seconds for other threads to fall asleep, and runs that are not timed."""
_INT8, _RIVAL = ", int8", "rival: "
"""Parts of labels: the precision whose file is not kept, and the network of the same cost."""


@dataclass(frozen=True)
class EngineTimes:
    """Times by "engine, precision", the fastest first; why engines were left out; the file of the fastest.

    `rival` has the times of the thinner dense network of the same MACs, where one was given. int8 has ranges from
    random numbers here, which is right for its time alone: no such file is kept.
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
        """What is fastest here, in a few sentences."""
        told = f"Fastest here: {self.fastest} ({self.times[self.fastest].ms:.2f} ms)."
        if not all(time.steady for time in (*self.times.values(), *self.rival.values())):
            told += " Some times are unsteady: measure again while the machine is idle."
        if self.fastest.endswith(_INT8):
            told += " int8 needs real images: lowrank export --int8 --calibrate DATA."
        if not self.rival:
            return told
        name, ms = next(iter(self.rival)), next(iter(self.rival.values())).ms
        ratio = self.times[self.fastest].ms / ms
        advice = (
            f"this one takes {ratio:.2f} of its time"
            if ratio < 1
            else f"it is faster (this one takes {ratio:.2f} of its time), so compare their accuracies"
        )
        return f"{told} A thinner dense network of the same MACs takes {ms:.2f} ms ({name}): {advice}."


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

    - `rival`: another network, timed in turns with this one: the thinner dense one of the same MACs, say.
    - `engines`: names of `ENGINES`; all that are installed if not given.
    - `out`: a directory for the file of the fastest engine in float.
    - `say`: a function that is called with a line as each engine ends (`say=print`).

    >>> time_engines(net, (3, 32, 32), engines=["onnx", "ncnn"]).fastest  # doctest: +SKIP
    'ncnn, fp16'
    """
    folder_out = None if out is None else as_path(out)
    if folder_out is not None:
        check_place(folder_out / "net", overwrite)
    names = list(engines) or [name for name, target in ENGINES.items() if target.installed]
    networks = {"": model} if rival is None else {"": model, _RIVAL: rival}
    with tempfile.TemporaryDirectory() as scratch:
        image = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
        bench = _EngineBench(Path(scratch), image, threads, repeats, say)
        times: dict[str, Sample] = {}
        for name in names:
            times |= bench.times(networks, name, precisions)
        for name in names:  # once more where something else ran meanwhile
            unsteady = [label for label in bench.files.get(name, {}) if not times[label].steady]
            for label, time in (bench.timed(name) if unsteady else {}).items():
                times[label] = min(time, times[label], key=lambda sample: sample.spread)
        ours, theirs = (_sorted(times, rival=wanted) for wanted in (False, True))
        if not ours:
            raise LowRankError(f"no engine runs this network: {'; '.join(bench.failed.values())}.")
        kept = next((label for label in ours if not label.endswith(_INT8)), None)
        found = None if folder_out is None or kept is None else _copy(Path(scratch) / kept, folder_out, overwrite)
    return EngineTimes(ours, bench.failed, found, theirs)


def engine_for(
    model: nn.Module, example: torch.Tensor, engine: str, precision: str | None = None
) -> tuple[str, str]:
    """The engine and precision to use: fp32 if none is named; for "auto" the fastest, in fp32 or fp16."""
    if engine != "auto":
        return engine, precision or "fp32"
    if example.is_cuda:
        raise LowRankError("engine='auto' measures engines on the CPU: give an example on the CPU, or an engine.")
    precisions = ("fp32", "fp16") if precision is None else (precision,)
    threads = torch.get_num_threads()
    found = time_engines(model, tuple(example.shape[1:]), precisions=precisions, threads=threads)
    name, _, fastest = found.fastest.partition(", ")
    return name, fastest


@dataclass(frozen=True)
class _EngineBench:
    """Writes files into a directory and times them; `failed` says why one could not be."""

    folder: Path
    image: torch.Tensor
    threads: int
    repeats: int
    say: Callable[[str], None]
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def times(
        self, networks: Mapping[str, nn.Module | Trained], engine: str, precisions: Sequence[str]
    ) -> dict[str, Sample]:
        """The times of networks in an engine, by label."""
        files = self.files[engine] = {}
        for prefix, model in networks.items():
            network = model.network if isinstance(model, Trained) else model
            if target_of(engine).strips and not has_strips(network):
                continue
            for precision in precisions:
                label = f"{prefix}{engine}, {precision}"
                step(f"{label} is written")
                try:
                    if precision != "int8" or target_of(engine).int8:
                        files[label] = self._write(model, label, engine, precision)
                except LowRankError as error:
                    self._leave_out(label, error)
        return self.timed(engine)

    def timed(self, engine: str) -> dict[str, Sample]:
        """The times of an engine's files, taken in turns in a process in which no other engine runs."""
        files = self.files[engine]
        step(f"{engine} is timed")
        asked = files, list(self.image.shape), self.threads, torch.get_num_threads(), self.repeats
        try:
            taken = apart(__file__, "_time_files", *asked) if files else {}
        except LowRankError as error:
            for label in files:
                self._leave_out(label, error)
            files.clear()
            return {}
        found = {label: Sample(*values) for label, values in taken.items()}
        for label, time in found.items():
            self.say(f"{label}: {time.ms:.2f} ms{'' if time.steady else ', unsteady'}")
        return found

    def _leave_out(self, label: str, error: LowRankError) -> None:
        self.failed[label] = first_line(error)
        self.say(f"{label}: left out")

    def _write(self, model: nn.Module | Trained, label: str, engine: str, precision: str) -> str:
        place = self.folder / label
        place.mkdir()
        path = place / f"net{target_of(engine).suffix}"
        if precision == "int8":
            quantize(model, self.image, path, dynamic=())
        else:
            how: Any = {"precision": precision, "strips": target_of(engine).strips}
            export(model, path, input_size=self.image.shape[1:], **how)
        return str(path)


def _time_files(
    files: Mapping[str, str], shape: Sequence[int], threads: int, torch_threads: int, repeats: int
) -> dict[str, tuple[float, ...]]:
    """The times of files of one engine, in turns: what `apart` calls."""
    if torch_threads != torch.get_num_threads():  # which would start threads
        torch.set_num_threads(torch_threads)
    array = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).numpy()
    runners = {label: open_engine(path, threads=threads, trusted=True) for label, path in files.items()}
    runs = {label: lambda runner=runner: runner(array) for label, runner in runners.items()}
    return {name: astuple(time) for name, time in measure(runs, repeats=repeats, rest=_REST, warm=_WARM).items()}


def _sorted(times: Mapping[str, Sample], *, rival: bool) -> dict[str, Sample]:
    """The times of one of the two networks, the fastest first, without the mark of the rival."""
    own = {label: time for label, time in times.items() if label.startswith(_RIVAL) == rival}
    return {label.removeprefix(_RIVAL): time for label, time in sorted(own.items(), key=lambda pair: pair[1].ms)}


def _copy(place: Path, out: Path, overwrite: bool) -> str:
    """Copy an engine's files; the path of the one that is opened."""
    suffixes = {target.suffix for target in ENGINES.values()}
    path = next(out / file.name for file in place.iterdir() if file.suffix in suffixes)
    with placing(path, overwrite=overwrite) as aside:
        shutil.copytree(place, aside.parent, dirs_exist_ok=True)
    return str(path)
