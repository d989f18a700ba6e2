"""Commands that measure any network on this machine: time, plan and optimize."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import correlation
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lowrank_cnn as lr
from lowrank_cnn.cli import options as opt
from lowrank_cnn.cli.options import Json, Model, SourceOptions, grouped, option
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.progress import lasting
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    from torch import nn

    from lowrank_cnn.cli.source import Source


@dataclass(frozen=True)
class SearchOptions:
    """The inputs and the device of a network, and the search for its fastest form."""

    scheme: opt.Scheme = None
    example: opt.Inputs = None
    batch: opt.Batch = 1
    device: opt.Device = "auto"
    threads: opt.Threads = None
    compile_: Annotated[bool, option("Try torch.compile too.", "--compile")] = False
    cache: Annotated[bool, option("Keep measured times for the next time.")] = True
    repeats: Annotated[int, option("Runs per median of each way that is tried.")] = 11
    budget: Annotated[float, option("Seconds after which no further form is tried.")] = 30.0

    def search(self, network: nn.Module, inputs: Any) -> Any:
        """The fastest form of a network."""
        how: dict[str, Any] = {"compile": self.compile_, "cache": self.cache}
        return lr.optimize(network, inputs, repeats=self.repeats, budget=self.budget, **how)


@grouped
def time_command(
    models: Annotated[list[str], typer.Argument(help=opt.MODEL_HELP)],
    named: SourceOptions,
    scheme: opt.Scheme = None,
    example: opt.Inputs = None,
    batch: opt.Batch = 1,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    repeats: Annotated[int, option("Runs per median.")] = 15,
    trusted: opt.Trusted = False,
    as_json: Json = False,
) -> None:
    """Time networks layer by layer, beside their dense twins.

    A network and its twin run in turns, under the same load. With --scheme, the twin is the network before
    conversion. An exported file (.onnx, .pt2, ...) runs in its engine, on the CPU.

    Examples:

      lowrank time nin-c3-lr --batch 16
      lowrank time vgg11-gmp-lr --device cpu --threads 1
      lowrank time model.py:make --scheme lr --input 3x32x32
      lowrank time model.py:make --example model.py:inputs
    """
    from lowrank_cnn.cli.source import parse_size
    from lowrank_cnn.core.environment import environment
    from lowrank_cnn.deploy.engines.targets import suffixes
    from lowrank_cnn.deploy.timing import time_file

    how: dict[str, Any] = {"batch": batch, "threads": threads, "repeats": repeats}
    timings = []
    for text in models:
        if Path(text).suffix not in suffixes():
            source, inputs = named.find(text, example, scheme=scheme, batch=batch)
            timings.append(lr.time_model(source.network, inputs, twin=source.dense, device=device, **how))
        elif scheme is not None or device not in ("cpu", "auto") or example is not None:
            raise LowRankError(f"{text} is timed as it is on the CPU, without --scheme, --device and --example.")
        else:
            timings.append(time_file(text, parse_size(named.input_text), trusted=trusted, **how))
    if as_json:
        return print_json({"environment": environment(), "timings": [timing.to_dict() for timing in timings]})
    for timing in timings:
        _print_timing(timing)
    if example is None and any(timing.device == "cpu" and timing.twin is not None for timing in timings):
        _print_cpu_advice()
    if len(timings) > 2:
        r = correlation([t.macs for t in timings], [t.total.ms for t in timings])
        console.print(f" Over these networks, MACs and time correlate with r = {r:.3f}.")
    return None


@grouped
def plan_command(
    model: Model,
    named: SourceOptions,
    how: SearchOptions,
    twin: Annotated[bool, option("Compare with the dense network; with --engine, thinned to equal MACs.")] = True,
    engine: Annotated[str | None, option("auto times the installed engines; or one by name (onnx).")] = None,
    out: Annotated[Path | None, option("With --engine: directory for the fastest file.", "--out", "-o")] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest way to run a network on this machine.

    It measures every way to run each layer, and then the whole network. In Python: `lr.optimize`.

    Examples:

      lowrank plan nin-c3-lr
      lowrank plan model.py:make --scheme lr --input 3x32x32 --batch 16
      lowrank plan nin-c3-lr --engine auto --out engines
      lowrank plan model.py:make --example model.py:inputs
    """
    from lowrank_cnn.cli.source import placed
    from lowrank_cnn.core.clock import measure, torch_threads
    from lowrank_cnn.core.modules import call

    source, given = named.find(model, how.example, scheme=how.scheme, batch=how.batch)
    if engine is not None:
        if how.batch != 1:
            raise LowRankError("--engine times one image at a time: leave --batch out.")
        return _plan_engines(source, given, engine, out, how.threads, twin=twin, as_json=as_json)
    place, network, inputs = placed(source.network, given, how.batch, how.device)
    macs, held = _macs(network, inputs), None
    with torch_threads(how.threads):
        fast = how.search(network, inputs)
        if twin and (dense := source.twin()) is not None:
            rival = how.search(dense.eval().to(place), inputs)
            # In turns: their own times were taken one after the other.
            runs = {"ms": lambda: call(fast, inputs), "twin_ms": lambda: call(rival, inputs)}
            times = measure(runs, cuda=place.startswith("cuda"))
            held: Any = {"choice": rival.report.choice, "macs": _macs(dense, inputs)}
            held |= {name: time.ms for name, time in times.items()}
    plans = [found for part in fast.modules() if (found := notes(part).plan) is not None]
    if as_json:
        about = {"macs": macs} if held is None else {"macs": macs, "twin": held}
        return _print_search(source, inputs, fast, **about, plans=[plan.to_dict() for plan in plans])
    for plan in plans:
        _print_plan(source.name, plan)
    _print_variants(fast.report)
    if held is not None:
        console.print(f" The dense network at its fastest ({held['choice']}): {held['twin_ms']:.2f} ms, in turns.")
        share = f", for {macs / held['macs']:.3f} of its MACs" if macs and held["macs"] else ""
        console.print(f" This one takes {held['ms'] / held['twin_ms']:.3f} of its time{share}.")
    if place == "cpu" and how.example is None:
        _print_cpu_advice()
    return None


@grouped
def optimize_command(
    model: Model,
    out: Annotated[Path, option("A file ending in .safetensors, .onnx, .pt2 or .ts.", "--out", "-o")],
    named: SourceOptions,
    how: SearchOptions,
    overwrite: opt.Overwrite = False,
    as_json: Json = False,
) -> None:
    """Find the fastest form of a network, and write it to a file.

    A .safetensors holds the network with what was chosen: lr.load makes that form again without measuring, and
    compares it with the network. Other formats hold the layers alone, without what was chosen for this machine.

    Examples:

      lowrank optimize nin-c3-lr -o net.safetensors --pretrained cifar10
      lowrank optimize runs/photos -o net.safetensors --batch 16 --compile
      lowrank optimize model.py:make -o net.onnx --example model.py:inputs
    """
    from lowrank_cnn.cli.source import placed
    from lowrank_cnn.core.clock import torch_threads

    if out.exists() and not overwrite:
        raise LowRankError(f"{out} exists; --overwrite replaces it.")
    source, given = named.find(model, how.example, scheme=how.scheme, batch=how.batch)
    _, network, inputs = placed(source.network, given, how.batch, how.device)
    with torch_threads(how.threads):
        fast = how.search(network, inputs)
        written = source.export(fast, out, given, overwrite=overwrite)
    if as_json:
        return _print_search(source, inputs, fast, **written.to_dict())
    _print_variants(fast.report)
    console.print(f" {written.path}: {si(written.bytes)}B.")
    return None


def _macs(network: nn.Module, inputs: Any) -> int | None:
    """Multiply-accumulates of a whole batch; None for a network that cannot be counted."""
    try:
        return lr.count(network, inputs).macs
    except LowRankError:
        return None


def _print_search(source: Source, inputs: Any, fast: Any, **more: Any) -> None:
    """Print the result of a search as JSON, with the fields that the command adds."""
    from torch import Tensor

    from lowrank_cnn.core.compare import tensors_of
    from lowrank_cnn.core.environment import environment

    shapes = [list(tensor.shape) for tensor in tensors_of(inputs)]
    where = {"model": source.name, "input": shapes[0] if isinstance(inputs, Tensor) else shapes}
    print_json({"environment": environment(), **where, **fast.report.to_dict(), **more})


def _print_cpu_advice() -> None:
    """Name the command that measures what torch alone cannot tell: engines, precisions, and the thin rival."""
    console.print(" Other engines, in fp16 and int8, may be faster, and so may a thinner dense network.")
    console.print(" Measure them by `lowrank plan ... --engine auto`.")


def _print_timing(timing: Any) -> None:
    total, quartiles = _cells(timing.total)
    lines = [(layer.name, layer.type, layer.macs, layer.ms, f"{layer.ms:.3f}") for layer in timing.layers]
    rows = [
        (name, kind, si(macs) if macs else "", shown, f"{macs / ms / 1e6:.1f}" if macs and ms else "")
        for name, kind, macs, ms, shown in [*lines, ("total", "", timing.macs, timing.total.ms, total)]
    ]
    threads = "" if timing.device != "cpu" else f", {counted(timing.threads, 'thread')}"
    sizes = " and ".join("x".join(map(str, shape)) for shape in (timing.input, *timing.more_inputs))
    title = f"{timing.name}, {sizes}, {timing.runtime} on {timing.device}{threads}"
    print_table(title, ("layer", "<", "MACs", "ms", "GMAC/s"), rows)
    console.print(f" Median of {counted(timing.total.runs, 'run')}, quartiles {quartiles} ms.")
    if (twin := timing.twin) is not None:
        ms, quartiles = _cells(twin.total)
        console.print(f" Dense twin {twin.name}: {ms} ms, quartiles {quartiles} ms.")
        time, macs = timing.total.ms / twin.total.ms, timing.macs / twin.macs
        console.print(f" That is {time:.3f} of its time, for {macs:.3f} of its MACs.")


def _print_variants(report: Any) -> None:
    rows = [(name, *_cells(time)) for name, time in report.times.items()]
    print_table("The whole network", ("variant", "ms", "quartiles"), rows)
    for name, why in report.failed.items():
        console.print(f" Left out: {name} ({why}).")
    console.print(f" Fastest: {report.choice}.")


def _print_plan(name: str, plan: Any) -> None:
    if plan.reason:
        return console.print(f" Not planned: {plan.reason}.")
    rows = []
    for decision in plan.decisions:
        times = "\n".join(f"{ms:.2f} {way}" for way, ms in decision.times.items())
        rows.append((decision.name, si(decision.macs), times, decision.choice))
    print_table(f"{name} on {plan.device}", ("layer", "MACs", "<ms each way", "<chosen"), rows)
    for decision in plan.decisions:
        for way, why in decision.failed.items():
            console.print(f" {decision.name}, {way}: {why}")
    return None


def _cells(time: Any) -> tuple[str, str]:
    """The median and the quartiles of a time; empty if nothing was timed."""
    return ("", "") if time is None else (f"{time.ms:.2f}", f"{time.low:.2f}-{time.high:.2f}")


def _plan_engines(
    source: Source, given: Any, engine: str, out: Path | None, threads: int | None, *, twin: bool, as_json: bool
) -> None:
    """Time the engines on one image, print the table and the advice, and write the file of the fastest."""
    from torch import Tensor

    from lowrank_cnn.core.modules import is_example
    from lowrank_cnn.deploy.choose_engine import time_engines
    from lowrank_cnn.deploy.engines.targets import target_of
    from lowrank_cnn.method.thin import thin_like

    if is_example(given):
        if not isinstance(given, Tensor) or not given.is_floating_point() or given.dim() < 2 or len(given) != 1:
            raise LowRankError(
                "--engine times one input at a time: let --example give one tensor, in floating point and with a "
                "batch of 1, or leave --engine out."
            )
        given = given.shape[1:]
    size = tuple(given)
    if engine != "auto":
        target_of(engine)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    dense = source.twin() if twin else None
    found = time_engines(
        source.trained or source.network.eval(),
        size,
        rival=None if dense is None else thin_like(dense, source.network, size),
        engines=[] if engine == "auto" else [engine],
        threads=threads or 0,
        out=out,
        overwrite=True,
        say=lasting,
    )
    if as_json:
        told = {"fastest": found.fastest, "verdict": found.verdict}
        return print_json({"model": source.name, "input": [1, *size], **told, **asdict(found)})

    def cells(time: Any) -> tuple[str, str]:
        ms, quartiles = _cells(time)
        return ms, quartiles if time is None or time.steady else f"unsteady, {quartiles}"

    columns = ("engine", "ms", "quartiles", "thin dense ms", "quartiles")
    names = dict.fromkeys([*found.times, *found.rival])
    rows = [(name, *cells(found.times.get(name)), *cells(found.rival.get(name))) for name in names]
    print_table(f"{source.name}, 1x{'x'.join(map(str, size))}", columns, rows)
    for name, why in found.failed.items():
        console.print(f" Left out: {name} ({why}).")
    console.print(f" {found.verdict}", soft_wrap=True)
    if found.path is not None:
        console.print(f" Written: {found.path}.")
    return None
