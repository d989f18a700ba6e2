"""Commands for any network: time and plan."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from statistics import correlation
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowrank_cnn.cli.convert import export_source
from lowrank_cnn.cli.options import (
    MODEL_HELP,
    Device,
    Inputs,
    Json,
    Model,
    Scheme,
    SourceOptions,
    Trusted,
    grouped,
)
from lowrank_cnn.cli.show import console, print_json, print_table
from lowrank_cnn.core.errors import LowRankError, LowRankWarning
from lowrank_cnn.core.notes import notes
from lowrank_cnn.core.progress import lasting
from lowrank_cnn.core.text import counted, si

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lowrank_cnn.cli.source import Source
    from lowrank_cnn.core.clock import Sample

Batch = Annotated[int, typer.Option(min=1, max=10**6, help="Images per batch.")]
Budget = Annotated[float, typer.Option(help="Seconds after which no further form is tried.")]
Repeats = Annotated[int, typer.Option(help="Runs per median.")]
Tries = Annotated[int, typer.Option("--repeats", help="Runs per median of each way that is tried.")]


def limit_threads(threads: int | None) -> int | None:
    """Limit the threads of OpenMP before torch starts them: on Arm its convs ignore `torch.set_num_threads`."""
    if threads is not None and threads > 0 and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


Threads = Annotated[
    int | None, typer.Option(max=1024, callback=limit_threads, help="CPU threads; by default all cores.")
]


@grouped
def time_command(
    models: Annotated[list[str], typer.Argument(help=MODEL_HELP)],
    named: SourceOptions,
    scheme: Annotated[str | None, typer.Option(help="Convert first; compare with the network as it was.")] = None,
    example: Inputs = None,
    batch: Batch = 1,
    device: Device = "auto",
    threads: Threads = None,
    runtime: Annotated[Literal["torch", "onnx"], typer.Option(help="torch, or onnx (on the CPU).")] = "torch",
    repeats: Repeats = 15,
    trusted: Trusted = False,
    as_json: Json = False,
) -> None:
    """Time networks layer by layer, beside their dense twins.

    A network and its twin run in turns, so that both see the same state of the machine. An exported file (.onnx,
    .pt2, ...) runs in its engine, on the CPU.

    Examples:

      lowrank time nin-c3-lr --batch 16
      lowrank time vgg11-gmp-lr --device cpu --threads 1
      lowrank time model.py:make --scheme lr --input 3x32x32 --runtime onnx
      lowrank time model.py:make --example model.py:inputs
    """
    from lowrank_cnn.cli.source import parse_size
    from lowrank_cnn.core.environment import environment
    from lowrank_cnn.deploy.engines.targets import is_engine_file
    from lowrank_cnn.deploy.timing import time_file, time_model

    options = {"batch": batch, "device": device, "threads": threads, "runtime": runtime, "repeats": repeats}
    timings = []
    for text in models:
        if is_engine_file(text):
            if scheme is not None or device not in ("cpu", "auto") or example is not None:
                told = f"{text} is timed as it is on the CPU, without --scheme, --device and --example."
                raise LowRankError(told)
            how: dict[str, Any] = {"batch": batch, "threads": threads, "repeats": repeats, "trusted": trusted}
            timings.append(time_file(text, parse_size(named.input_text), **how))
            continue
        source, size, given = named.find_inputs(text, example, scheme=scheme, batch=batch)
        inputs = given if size is None else size
        timings.append(time_model(source.network, inputs, twin=source.dense, **options))
    if as_json:
        return print_json({"environment": environment(), "timings": [timing.to_dict() for timing in timings]})
    for timing in timings:
        _print_timing(timing)
    if example is None and any(timing.device == "cpu" and timing.twin is not None for timing in timings):
        _print_cpu_advice(named.words(models[0], scheme=scheme))
    if len(timings) > 2:
        r = correlation([t.macs for t in timings], [t.total.ms for t in timings])
        console.print(f" Over these networks, MACs and time correlate with r = {r:.3f}.")
    return None


@grouped
def plan_command(
    model: Model,
    named: SourceOptions,
    scheme: Scheme = None,
    example: Inputs = None,
    batch: Batch = 1,
    device: Device = "auto",
    threads: Threads = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Try torch.compile too.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep measured times for the next plan.")] = True,
    repeats: Tries = 11,
    budget: Budget = 30.0,
    twin: Annotated[
        bool, typer.Option(help="Compare with the dense network; with --engine, thinned to the same MACs.")
    ] = True,
    engine: Annotated[
        str | None,
        typer.Option(help="auto: time the installed engines (ONNX Runtime, OpenVINO, ncnn, ...); or one by name."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="With --engine: a directory for the fastest engine's file.")
    ] = None,
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
    from lowrank_cnn.core.clock import torch_threads
    from lowrank_cnn.deploy.optimize import optimize
    from lowrank_cnn.models.build import dense_twin
    from lowrank_cnn.train.distributed import resolve_device

    source, size, given = named.find_inputs(model, example, scheme=scheme, batch=batch)
    if engine is not None:
        if batch != 1:
            raise LowRankError("--engine times one image at a time: leave --batch out.")
        return plan_engines(source, size or _size_of_one(given), engine, out, threads, twin=twin, as_json=as_json)
    place = resolve_device(device)
    network = source.network.eval().to(place)
    inputs = inputs_on(place, network, size, given, batch=batch)
    how: dict[str, Any] = {"compile": compile_, "cache": cache, "repeats": repeats, "budget": budget}
    with torch_threads(threads):
        fast = optimize(network, inputs, **how)
        held = None
        if twin and (dense := source.dense or dense_twin(network)) is not None:
            rival = optimize(dense.eval().to(place), inputs, **how)
            held = _beside(fast, rival, inputs, place) | {"macs": _macs(dense, inputs)}
    _show_plan(source.name, fast, inputs, held, macs=_macs(network, inputs), as_json=as_json)
    if place == "cpu" and size is not None and not as_json:
        _print_cpu_advice(named.words(model, scheme=scheme))
    return None


def _size_of_one(given: Any) -> tuple[int, ...]:
    """The size of the one input that --example gives to an engine."""
    import torch

    if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dim() > 1 and len(given) == 1:
        return tuple(given.shape[1:])
    raise LowRankError(
        "--engine times one input at a time: let --example give one tensor, in floating point and with a batch of "
        "1, or leave --engine out."
    )


def inputs_on(
    place: str, network: torch.nn.Module, size: tuple[int, ...] | None, given: Any, *, batch: int
) -> Any:
    """Inputs on a device: those of --example, or random images in the network's own precision."""
    import torch
    from torch.utils._pytree import tree_map_only

    from lowrank_cnn.models.network_file import dtype_of

    if size is not None:
        return torch.randn(batch, *size).to(place, dtype_of(network))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), given)


def input_shapes(inputs: Any) -> list[Any]:
    """The shape of an input, or the shapes of several, as JSON holds them."""
    import torch
    from torch.utils._pytree import tree_leaves

    shapes = [list(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return shapes[0] if isinstance(inputs, torch.Tensor) else shapes


def _macs(network: torch.nn.Module, inputs: Any) -> int | None:
    """Multiply-accumulates of a whole batch; None for a network that cannot be counted."""
    from lowrank_cnn.method.count import count

    try:
        return count(network, inputs).macs
    except LowRankError:
        return None


def _show_plan(
    name: str, fast: Any, inputs: Any, held: dict[str, Any] | None, *, macs: int | None, as_json: bool
) -> None:
    """Print the measured times, and those of the dense network (`held`), as text or JSON."""
    from lowrank_cnn.core.environment import environment

    plans = [found for part in fast.modules() if (found := notes(part).plan) is not None]
    if as_json:
        where = {"environment": environment(), "model": name, "input": input_shapes(inputs), "macs": macs}
        where |= {} if held is None else {"twin": held}
        return print_json({**where, **fast.report.to_dict(), "plans": [plan.to_dict() for plan in plans]})
    for plan in plans:
        _print_plan(name, plan)
    print_variants(fast.report)
    if held is not None:
        console.print(f" The dense network at its fastest ({held['choice']}): {held['twin_ms']:.2f} ms, in turns.")
        share = f", for {macs / held['macs']:.3f} of its MACs" if macs and held["macs"] else ""
        console.print(f" This one takes {held['ms'] / held['twin_ms']:.3f} of its time{share}.")
    return None


def _beside(fast: Any, rival: Any, inputs: Any, place: str) -> dict[str, Any]:
    """Time both optimised networks in turns: their own times were taken one after the other."""
    from lowrank_cnn.core.clock import measure
    from lowrank_cnn.core.modules import arguments

    args, kwargs = arguments(inputs, device=place, dtype=None)
    runs = {"ours": lambda: fast(*args, **kwargs), "rival": lambda: rival(*args, **kwargs)}
    times = measure(runs, cuda=place.startswith("cuda"))
    return {"choice": rival.report.choice, "twin_ms": times["rival"].ms, "ms": times["ours"].ms}


def _print_cpu_advice(network: str) -> None:
    """Name the command that measures what torch alone cannot tell: engines, precisions, and the thin rival."""
    told = " Other engines, in fp16 and int8, may be faster, and so may a thinner dense network. Measure them by"
    console.print(told)
    console.print(f"   lowrank plan {network} --engine auto", markup=False, soft_wrap=True)


def _print_timing(timing: Any) -> None:
    rows = [
        (
            layer.name,
            layer.type,
            si(layer.macs) if layer.macs else "",
            f"{layer.ms:.3f}",
            _rate(layer.macs, layer.ms),
        )
        for layer in timing.layers
    ]
    rows.append(
        (
            "total",
            "",
            si(timing.macs) if timing.macs else "",
            _ms(timing.total),
            _rate(timing.macs, timing.total.ms),
        )
    )
    threads = "" if timing.device != "cpu" else f", {counted(timing.threads, 'thread')}"
    sizes = " and ".join("x".join(map(str, shape)) for shape in (timing.input, *timing.more_inputs))
    title = f"{timing.name}, {sizes}, {timing.runtime} on {timing.device}{threads}"
    print_table(title, ("layer", "<", "MACs", "ms", "GMAC/s"), rows)
    console.print(f" Median of {counted(timing.total.runs, 'run')}, quartiles {_spread(timing.total)} ms.")
    if timing.correlation is not None:
        console.print(f" Over the layers, MACs and time correlate with r = {timing.correlation:.3f}.")
    if timing.twin is not None:
        twin = timing.twin
        console.print(f" Dense twin {twin.name}: {_ms(twin.total)} ms, quartiles {_spread(twin.total)} ms.")
        time, macs = timing.total.ms / twin.total.ms, timing.macs / twin.macs
        console.print(f" That is {time:.3f} of its time, for {macs:.3f} of its MACs.")


def print_variants(report: Any) -> None:
    rows = [(name, _ms(time), _spread(time)) for name, time in report.times.items()]
    print_table("The whole network", ("variant", "ms", "quartiles"), rows)
    for name, why in report.failed.items():
        console.print(f" Left out: {name} ({why}).", markup=False)
    console.print(f" Fastest: {report.choice}.")


def _print_plan(name: str, plan: Any) -> None:
    if plan.reason:
        return console.print(f" Not planned: {plan.reason}.", markup=False)
    rows = []
    for decision in plan.decisions:
        times = "\n".join(f"{ms:.2f} {way}" for way, ms in decision.times.items())
        rows.append((decision.name, si(decision.macs), times, decision.choice))
    print_table(f"{name} on {plan.device}", ("layer", "MACs", "<ms each way", "<chosen"), rows)
    for decision in plan.decisions:
        for way, why in decision.failed.items():
            console.print(f" {decision.name}, {way}: {why}", markup=False)
    return None


def _ms(sample: Any) -> str:
    return f"{sample.ms:.2f}"


def _spread(sample: Any) -> str:
    return f"{sample.low:.2f}-{sample.high:.2f}"


def _rate(macs: int, ms: float) -> str:
    return f"{macs / ms / 1e6:.1f}" if macs and ms else ""


# `lowrank plan --engine`: which of the installed engines runs a network fastest on this machine.


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
    from lowrank_cnn.deploy.choose_engine import time_engines
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
    from lowrank_cnn.method.count import count
    from lowrank_cnn.method.thin import thin
    from lowrank_cnn.models.build import dense_twin

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


# The command `lowrank optimize`.


@grouped
def optimize_command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="A file ending in .safetensors, .onnx, .pt2 or .ts.")],
    named: SourceOptions,
    scheme: Scheme = None,
    example: Inputs = None,
    batch: Batch = 1,
    device: Device = "auto",
    threads: Threads = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Try torch.compile too.")] = False,
    cache: Annotated[bool, typer.Option(help="Keep measured times for the next time.")] = True,
    repeats: Tries = 11,
    budget: Budget = 30.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
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
    from lowrank_cnn.core.clock import torch_threads
    from lowrank_cnn.core.environment import environment
    from lowrank_cnn.deploy.optimize import optimize
    from lowrank_cnn.train.distributed import resolve_device

    if out.exists() and not overwrite:
        raise LowRankError(f"{out} exists; --overwrite replaces it.")
    source, size, given = named.find_inputs(model, example, scheme=scheme, batch=batch)
    place = resolve_device(device)
    network = source.network.eval().to(place)
    inputs = inputs_on(place, network, size, given, batch=batch)
    how: dict[str, Any] = {"compile": compile_, "cache": cache, "repeats": repeats, "budget": budget}
    with torch_threads(threads):
        fast = optimize(network, inputs, **how)
        written = export_source(
            replace(source, network=fast), fast, out, size, example_input=given, overwrite=overwrite
        )
    if as_json:
        where = {"environment": environment(), "model": source.name, "input": input_shapes(inputs)}
        return print_json({**where, **fast.report.to_dict(), **written.to_dict()})
    print_variants(fast.report)
    console.print(f" {written.path}: {si(written.bytes)}B.", markup=False)
    return None
